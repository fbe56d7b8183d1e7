"""Committed checkpoints copied to a second place: any address that fsspec knows (s3://, gs://, file://, …).

The copy has a manifest and a marker of its own, written after everything they vouch for, so that it too is there whole
or not at all. Files go up as they are; what is brought back is verified like any other checkpoint.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from ...spec import CheckpointError, SpecError
from ...spec.files import sync_folder
from .folders import Keep, discard, put_in_place, work_folder
from .manifest import FOLDER, MANIFEST, MARKER, parsed, step_of, vouched
from .validation import DamagedError

STREAMS = 4  # files that travel at once


def connect(url: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError:
        raise CheckpointError(
            f"checkpoint.remote = {url!r} needs fsspec; install it with: pip install fsspec"
        ) from None
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:  # a protocol whose package is not there: fsspec says which
        raise CheckpointError(f"checkpoint.remote = {url!r}: {error}") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"checkpoint.remote = {url!r} cannot be opened: {error}") from None
    return system, str(path)


def upload(folder: Path, url: str, keep: Keep) -> None:
    """Copy one checkpoint; then remove there what `keep` does not keep."""
    system, root = connect(url)
    target = f"{root}/{folder.name}"
    remove(system, target)
    system.makedirs(target, exist_ok=True)
    held = hold(folder)
    try:
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(lambda name: system.put_file(str(held / name), f"{target}/{name}"), vouched(folder).files))
        for name in (MANIFEST, MARKER):
            system.put_file(str(held / name), f"{target}/{name}")
    finally:
        discard(held)
    prune_remote(system, root, keep, step_of(folder))


def hold(folder: Path) -> Path:
    """A second name for every file, so that a checkpoint can be removed here while it is still being copied."""
    held = work_folder(folder, os.getpid(), 1)
    discard(held)
    held.mkdir()
    for path in folder.iterdir():
        os.link(path, held / path.name)
    return held


def prune_remote(system: Any, root: str, keep: Keep, copied: int) -> None:
    """As `folders.prune` does. Steps after the one just copied are those of a line that a rewind has given up."""
    steps = sorted(committed_there(system, root), reverse=True)
    line = [step for step in steps if step <= copied]
    kept = {*line[: keep.newest or None], *(step for step in line if keep.every and step % keep.every == 0)}
    for step in steps:
        if step not in kept:
            remove(system, f"{root}/step-{step:06d}")


def remove(system: Any, target: str) -> None:
    """The marker first: half a copy must not look whole."""
    if system.exists(f"{target}/{MARKER}"):
        system.rm_file(f"{target}/{MARKER}")
    if system.exists(target):
        system.rm(target, recursive=True)


def committed_there(system: Any, root: str) -> list[int]:
    """Steps of which a whole copy is there."""
    if not system.exists(root):
        return []
    system.invalidate_cache()
    names = [PurePosixPath(path).name for path in system.ls(root, detail=False)]
    steps = [step_of(Path(name)) for name in names if (found := FOLDER.fullmatch(name)) and not found[2]]
    return [step for step in steps if system.exists(f"{root}/step-{step:06d}/{MARKER}")]


def steps_there(url: str) -> list[int]:
    """Newest first."""
    system, root = connect(url)
    try:
        return sorted(committed_there(system, root), reverse=True)
    except Exception as error:  # each kind of store has its own
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"checkpoint.remote = {url!r} cannot be read: {type(error).__name__}: {why}") from error


def refuse_taken(url: str) -> None:
    """A new run must neither go on from another's checkpoints nor keep its own among them."""
    if url and (steps := steps_there(url)):
        raise SpecError(
            f"checkpoint.remote = {url!r} already holds the checkpoints of a run (the newest of step {steps[0]}); "
            "go on with that run (lmworks resume), or name another place"
        )


def download(url: str, final: Path) -> None:
    """Bring the copy of one step here and commit it. Its files are verified by whoever loads them."""
    system, root = connect(url)
    source, work = f"{root}/{final.name}", work_folder(final, os.getpid(), 0)
    discard(work)
    work.mkdir(parents=True)
    try:
        text = system.cat_file(f"{source}/{MANIFEST}")
        if hashlib.sha256(text).hexdigest() != system.cat_file(f"{source}/{MARKER}").decode(errors="replace").strip():
            raise DamagedError(f"{source}/{MANIFEST} is not the one that {MARKER} vouches for (checksum mismatch)")
        files = parsed(text, f"{source}/{MANIFEST}").files  # plain names: none leads out of the folder
        (work / MANIFEST).write_bytes(text)
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(lambda name: system.get_file(f"{source}/{name}", str(work / name)), files))
        sync_folder(work)
        put_in_place(work, final)
    except DamagedError:
        raise
    except Exception as error:  # each kind of store has its own
        raise DamagedError(f"cannot bring {source} here: {type(error).__name__}: {error}") from error
    finally:
        discard(work)
