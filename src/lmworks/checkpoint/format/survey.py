"""Lists the checkpoints of a run, complete or not, verifies their files, and shows their contents.

Read-only, and without torch: it starts quickly.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...record.folder import RunFolder
from ...spec import CheckpointError, SpecError
from ...spec.errors import NoSuchCheckpoint
from .folders import LEFTOVER, folders, is_other_process
from .index import read_index
from .manifest import (
    FOLDER,
    INDEX,
    MANIFEST,
    MARKER,
    Files,
    Manifest,
    check_file,
    check_size,
    read_committed,
    read_manifest,
    step_of,
)

FILES = 2  # read in parallel, each by several threads

Progress = Callable[[str, int, int], None]


# --- location -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointLocation:
    """The checkpoints of a run, or a copied folder of them."""

    root: Path
    run: RunFolder | None = None
    step: int | None = None  # if the folder of one step was given

    @property
    def name(self) -> Path:
        return self.run.path if self.run else self.root

    def choose(self, step: int | None) -> Path:
        """The folder of a step, or of the newest committed one (without one, the newest)."""
        found = folders(self.root)
        whole = [folder for folder in found if (folder / MARKER).exists()]
        wanted = self.step if step is None else step
        if not found:
            raise CheckpointError(f"{self.name} has no checkpoint, only what unfinished saves have left")
        if wanted is None:
            return (whole or found)[0]
        for folder in (*whole, *found):
            if step_of(folder) == wanted:
                return folder
        there = ", ".join(str(step) for step in dict.fromkeys(map(step_of, found)))
        raise NoSuchCheckpoint(f"{self.root} has no checkpoint of step {wanted}; steps there: {there}")


def locate(path: Path) -> CheckpointLocation:
    """A run folder, a folder of step folders, or one step folder; anything else is refused."""
    path = with_name(path)
    try:
        if not path.is_dir():
            raise SpecError(f"{path} {'is a file' if path.exists() else 'does not exist'}; name a run folder")
        if FOLDER.fullmatch(path.name):
            place = CheckpointLocation(path.parent, run_of(path.parent), step_of(path))
        elif (path / "spec.toml").is_file():
            place = CheckpointLocation(path / "checkpoints", RunFolder(path))
        else:
            place = CheckpointLocation(path, run_of(path))
        found = place.root.is_dir() and any(map(is_checkpoint_folder, place.root.iterdir()))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if not found and place.run:
        raise CheckpointError(f"{place.run.path} has no checkpoint yet; train it with: lmworks resume {place.run.path}")
    if not found:
        raise SpecError(f"{path} is neither a run folder (no spec.toml) nor a folder of checkpoints (no step-000100)")
    return place


def run_of(root: Path) -> RunFolder | None:
    """The run of a checkpoints folder, if it is inside a run folder."""
    root = with_name(root)
    run = RunFolder(root.parent)
    return run if run.spec_path.is_file() and run.checkpoints.name == root.name else None


def with_name(path: Path) -> Path:
    """Resolves `.` and `..`."""
    return path if path.name not in ("", "..") else Path(os.path.abspath(path))


def is_checkpoint_folder(path: Path) -> bool:
    return bool(FOLDER.fullmatch(path.name) or LEFTOVER.fullmatch(path.name)) and path.is_dir()


# --- listing ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointStatus:
    folder: Path
    step: int
    status: str  # committed, damaged, unfinished, replaced, leftover, writing
    time: str  # of the commit; otherwise of the last modification
    bytes: int  # on the disk
    files: int
    ranks: int  # that wrote it (0: unknown)
    reason: str = ""  # why it is damaged


def list_checkpoints(root: Path) -> list[CheckpointStatus]:
    """Every step folder, newest first, then leftovers of failed saves. Sizes are compared, contents are not."""
    try:
        hidden = [path for path in sorted(root.glob(".step-*")) if LEFTOVER.fullmatch(path.name) and path.is_dir()]
        return [*existing(inspect_folder, folders(root)), *existing(inspect_leftover, hidden)]
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename or root}: {error.strerror}") from None


def existing(inspect: Callable[[Path], CheckpointStatus], paths: Iterable[Path]) -> Iterator[CheckpointStatus]:
    """Without those that a run removes meanwhile."""
    for path in paths:
        with suppress(FileNotFoundError):
            yield inspect(path)


def inspect_folder(folder: Path) -> CheckpointStatus:
    status, reason, ranks, when = "committed", "", 0, modified_time(folder)
    try:
        manifest = read_committed(folder)
        ranks, when = len({entry["rank"] for entry in manifest.files.values()}), manifest.time
        read_manifest(folder)  # checks sizes, too
    except CheckpointError as error:
        status, reason = ("damaged", str(error)) if (folder / MARKER).exists() else ("unfinished", "")
    if status == "committed" and folder.suffix:
        status = "replaced"
    return CheckpointStatus(
        folder, step_of(folder), status, when, size_of(folder), len(files_of(folder)), ranks, reason
    )


def inspect_leftover(path: Path) -> CheckpointStatus:
    name = LEFTOVER.fullmatch(path.name)
    status = "writing" if name and is_other_process(int(name[1])) else "leftover"
    step = int(path.name.removeprefix(".step-").partition(".")[0])
    return CheckpointStatus(path, step, status, modified_time(path), size_of(path), len(files_of(path)), 0)


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_of(folder))


def modified_time(folder: Path) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(folder.stat().st_mtime))


# --- verification -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileError:
    file: str
    rank: int | None  # that wrote it
    reason: str


@dataclass(frozen=True)
class VerifyResult:
    folder: Path
    step: int
    status: str  # intact, damaged, unfinished
    files: int = 0
    bytes: int = 0
    wrong: tuple[FileError, ...] = ()


def verify_all(checkpoints: Sequence[Path], progress: Progress) -> list[VerifyResult]:
    """Read every byte of these checkpoints, several files in parallel, and list all damage."""
    manifests: dict[Path, Manifest | FileError] = {folder: opened(folder) for folder in checkpoints}
    jobs = [
        (folder / name, manifest)
        for folder, manifest in manifests.items()
        if isinstance(manifest, Manifest)
        for name in manifest.files
    ]
    sizes = [manifest.files[path.name]["bytes"] for path, manifest in jobs]
    wrong: dict[Path, list[FileError]] = {folder: [] for folder in checkpoints}
    done = 0
    pool = ThreadPoolExecutor(FILES)
    try:
        for (path, _), size, found in zip(jobs, sizes, pool.map(lambda job: check(*job), jobs), strict=True):
            wrong[path.parent] += [found] if found else []
            done += size
            progress("verify", done, sum(sizes))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for pending files
    return [verdict(folder, manifest, wrong[folder]) for folder, manifest in manifests.items()]


def opened(folder: Path) -> Manifest | FileError:
    try:
        return read_committed(folder)
    except CheckpointError as error:
        return FileError(MANIFEST, None, str(error))


def check(path: Path, manifest: Manifest) -> FileError | None:
    try:
        check_size(path, manifest)
        check_file(path, manifest)
        if path.name == INDEX:
            read_index(path.parent, manifest)
    except CheckpointError as error:
        return FileError(path.name, manifest.files[path.name]["rank"], str(error))
    return None


def verdict(folder: Path, manifest: Manifest | FileError, wrong: list[FileError]) -> VerifyResult:
    step = step_of(folder)
    if isinstance(manifest, FileError):
        if not (folder / MARKER).exists():
            return VerifyResult(folder, step, "unfinished")
        return VerifyResult(folder, step, "damaged", wrong=(manifest,))
    size = sum(entry["bytes"] for entry in manifest.files.values())
    return VerifyResult(folder, step, "damaged" if wrong else "intact", len(manifest.files), size, tuple(wrong))


# --- contents --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A whole tensor as it was saved."""

    name: str
    dtype: str  # as safetensors calls it: F32, BF16 …
    shape: list[int]
    bytes: int
    pieces: int  # number of them

    @property
    def section(self) -> str:
        """model, optim, rng."""
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Contents:
    folder: Path
    step: int
    time: str
    torch: str
    format: int
    cursor: int | None  # data cursor
    parallel: dict[str, Any]  # the layout that it was saved under
    files: Files
    sections: dict[str, dict[str, int]]  # name → tensors, bytes
    tensors: list[Shape]

    @property
    def ranks(self) -> int:
        return len({entry["rank"] for entry in self.files.values()})

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.files.values())


def contents(folder: Path) -> Contents:
    """Of a committed checkpoint with all its files; the index is verified, the tensors are not."""
    manifest = read_manifest(folder)
    tensors = [
        Shape(name, saved.dtype, list(saved.shape), saved.bytes, len(saved.pieces))
        for name, saved in read_index(folder, manifest).items()
    ]
    tensors.sort(key=by_name)
    sections: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        total = sections.setdefault(tensor.section, {"tensors": 0, "bytes": 0})
        total["tensors"] += 1
        total["bytes"] += tensor.bytes
    parallel = manifest.meta.get("spec", {}).get("parallel", {})
    about = (folder, manifest.step, manifest.time, manifest.torch, manifest.format)
    return Contents(*about, manifest.meta.get("cursor"), parallel, manifest.files, sections, tensors)


def by_name(tensor: Shape) -> list[str]:
    """Sort key: block 10 after block 9."""
    return [part.zfill(9) if part.isdigit() else part for part in tensor.name.split(".")]
