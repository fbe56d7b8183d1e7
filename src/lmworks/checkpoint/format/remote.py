"""Remote copies of committed checkpoints: any URL that fsspec supports (s3://, gs://, file://, …).

The manifest and the marker are uploaded last, so that a copy is complete or does not count. A download is verified like
any other checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ...spec import CheckpointError, SpecError
from ...spec.files import sync_folder
from . import writer_client
from .folders import RetentionPolicy, discard, rename_and_commit, work_folder
from .manifest import FOLDER, MANIFEST, MARKER, DamagedError, parse_manifest, read_committed, step_of
from .writer_client import CopyJob, JobFailed, WriterClient, WriterSetup

STREAMS = 4  # parallel transfers


def connect(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError:
        raise CheckpointError(
            f"checkpoint.remote = {url!r} needs fsspec; install it with: pip install fsspec"
        ) from None
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:  # the package of the protocol is missing: fsspec names it
        raise CheckpointError(f"checkpoint.remote = {url!r}: {error}") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"checkpoint.remote = {url!r} cannot be opened: {error}") from None
    return system, str(path)


def upload(folder: Path, url: str, keep: RetentionPolicy) -> None:
    """Copy one checkpoint; then delete remote ones that `keep` does not retain."""
    system, root = connect(url)
    target = f"{root}/{folder.name}"
    remove(system, target)
    system.makedirs(target, exist_ok=True)
    held = hard_link(folder)
    try:
        with ThreadPoolExecutor(STREAMS) as pool:
            list(
                pool.map(
                    lambda name: system.put_file(str(held / name), f"{target}/{name}"), read_committed(folder).files
                )
            )
        for name in (MANIFEST, MARKER):
            system.put_file(str(held / name), f"{target}/{name}")
    finally:
        discard(held)
    prune_remote(system, root, keep, step_of(folder))


def hard_link(folder: Path) -> Path:
    """Hard links to every file, so that a checkpoint can be deleted locally while it is being copied."""
    held = work_folder(folder, os.getpid(), 1)
    discard(held)
    held.mkdir()
    for path in folder.iterdir():
        os.link(path, held / path.name)
    return held


def prune_remote(system: Any, root: str, keep: RetentionPolicy, copied: int) -> None:
    """Like `folders.prune`. Steps after the one just copied were discarded by a rewind."""
    steps = sorted(list_committed(system, root), reverse=True)
    valid = [step for step in steps if step <= copied]
    kept = {*valid[: keep.newest or None], *(step for step in valid if keep.every and step % keep.every == 0)}
    for step in steps:
        if step not in kept:
            remove(system, f"{root}/step-{step:06d}")


def remove(system: Any, target: str) -> None:
    """The marker first: a partial copy must not look complete."""
    if system.exists(f"{target}/{MARKER}"):
        system.rm_file(f"{target}/{MARKER}")
    if system.exists(target):
        system.rm(target, recursive=True)


def list_committed(system: Any, root: str) -> list[int]:
    """Steps with a complete copy."""
    if not system.exists(root):
        return []
    system.invalidate_cache()
    names = [PurePosixPath(path).name for path in system.ls(root, detail=False)]
    steps = [step_of(Path(name)) for name in names if (found := FOLDER.fullmatch(name)) and not found[2]]
    return [step for step in steps if system.exists(f"{root}/step-{step:06d}/{MARKER}")]


def remote_steps(url: str) -> list[int]:
    """Newest first."""
    system, root = connect(url)
    try:
        return sorted(list_committed(system, root), reverse=True)
    except Exception as error:  # each backend has its own
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"checkpoint.remote = {url!r} cannot be read: {type(error).__name__}: {why}") from error


def check_empty(url: str) -> None:
    """A new run must neither resume from the checkpoints of another nor mix with them."""
    if url and (steps := remote_steps(url)):
        raise SpecError(
            f"checkpoint.remote = {url!r} already holds the checkpoints of a run (the newest of step {steps[0]}); "
            "resume that run (lmworks resume), or use another URL"
        )


def download(url: str, final: Path) -> None:
    """Download the copy of one step and commit it. Its files are verified when they are loaded."""
    system, root = connect(url)
    source, work = f"{root}/{final.name}", work_folder(final, os.getpid(), 0)
    discard(work)
    work.mkdir(parents=True)
    try:
        text = system.cat_file(f"{source}/{MANIFEST}")
        if hashlib.sha256(text).hexdigest() != system.cat_file(f"{source}/{MARKER}").decode(errors="replace").strip():
            raise DamagedError(f"{source}/{MANIFEST} does not match {MARKER} (checksum mismatch)")
        files = parse_manifest(text, f"{source}/{MANIFEST}").files  # plain names: none points outside the folder
        (work / MANIFEST).write_bytes(text)
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(lambda name: system.get_file(f"{source}/{name}", str(work / name)), files))
        sync_folder(work)
        rename_and_commit(work, final)
    except DamagedError:
        raise
    except Exception as error:  # each backend has its own
        raise DamagedError(f"cannot download {source}: {type(error).__name__}: {error}") from error
    finally:
        discard(work)


# --- copies in the background ----------------------------------------------------------------------------

POLL_S = 0.02


@dataclass(frozen=True)
class CopyResult:
    folder: Path
    seconds: float
    error: str = ""


class RemoteCopier:
    """Of one run, on rank 0: copies one checkpoint at a time, the newest first.

    Storage that is slower than the saves gets fewer checkpoints, not a queue of them.
    """

    def __init__(self, remote: str, keep: RetentionPolicy) -> None:
        self.remote, self.keep = remote, keep
        self.writer: WriterClient | None = None
        self.current: Path | None = None
        self.next: Path | None = None
        self.began = 0.0

    def add(self, folder: Path) -> None:
        if self.current is None:
            self.send(folder)
        else:
            self.next = folder

    def send(self, folder: Path) -> None:
        if self.writer is None or not self.writer.alive():
            self.close()
            self.writer = WriterClient(WriterSetup(0, b"", 0, b"", "", tuple(writer_client.startup)))
        self.current, self.began = folder, time.perf_counter()
        self.writer.send(CopyJob(step_of(folder), folder, self.remote, self.keep))

    def poll(self, timeout_s: float = 0.0) -> CopyResult | None:
        """The result of the running copy, once it has ended; starts the next one."""
        if self.writer is None or self.current is None:
            return None
        answer = self.writer.answer(timeout_s)
        if answer is None:
            return None
        error = answer.reason if isinstance(answer, JobFailed) else ""
        copied = CopyResult(self.current, time.perf_counter() - self.began, error)
        self.current, next_folder = None, self.next
        self.next = None
        if next_folder is not None:
            self.send(next_folder)
        return copied

    def drain(self) -> Iterator[CopyResult]:
        """Wait until all copies are done."""
        while self.current is not None:
            if copied := self.poll(POLL_S):
                yield copied

    def close(self) -> None:
        """The running copy is abandoned; without its marker it does not count."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None
