"""Checkpoints that are committed, not just written: Torch Distributed Checkpoint inside, a manifest around it.

A save goes to a hidden folder beside its place, is synced and sealed, renamed, and only then marked as
committed. A process killed at any point leaves the checkpoints that were there, and at most a leftover that
the next save sweeps away. Every rank writes its shards into the same folder; rank 0 makes, seals and commits it, and
whatever fails on one rank is raised by all.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..parallel.world import from_lead, is_lead, together
from ..spec import CheckpointError
from ..spec.files import sync_folder
from . import shards
from .manifest import FOLDER, MARKER, Manifest, commit, seal, step_of, verify

LEFTOVER = re.compile(r"\.step-\d+\.tmp-(\d+)")


def save(root: Path, step: int, state: dict[str, Any], meta: dict[str, Any], keep: int = 0) -> Path:
    """Write `root/step-000100` and return it; then keep the newest `keep` checkpoints (0: all).

    A checkpoint of the same step is replaced, since after a resume the new one is the truth, but stays
    beside it until the new one is committed. If anything fails, what was there before is there again.
    """
    final = root / f"step-{step:06d}"
    work = from_lead(lambda: make_room(root, final))
    try:
        together(lambda: disk(final, lambda: shards.write(work, state)))
        from_lead(lambda: disk(final, lambda: finish(work, final, step, meta)))
    finally:
        if is_lead():
            discard(work)
    from_lead(lambda: prune(root, keep, saved=final))
    return final


def make_room(root: Path, final: Path) -> Path:
    work = root / f".{final.name}.tmp-{os.getpid()}"
    discard(work)  # of an earlier process with our number, as happens in containers
    disk(final, lambda: work.mkdir(parents=True))
    return work


def finish(work: Path, final: Path, step: int, meta: dict[str, Any]) -> None:
    seal(work, step, meta)
    put_in_place(work, final)


def disk(final: Path, act: Callable[[], None]) -> None:
    """What a disk refuses, in one line."""
    try:
        act()
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise CheckpointError(f"cannot save {final}: {error.strerror or error}{where}") from error


def put_in_place(work: Path, final: Path) -> None:
    """Rename and commit. An older checkpoint of this step keeps its marker, so it counts until it is superseded."""
    aside = None
    if (final / MARKER).exists():
        aside = final.with_name(f"{final.name}.replaced-{time.time_ns()}")
        final.rename(aside)
    else:
        discard(final)
    try:
        work.rename(final)
        sync_folder(final.parent)
        commit(final)
    except BaseException:
        discard(final)
        if aside:
            aside.rename(final)
        raise


def load(
    root: Path, state: dict[str, Any], *, refused: Callable[[Path, str], None], step: int | None = None
) -> Manifest | None:
    """Load the newest intact checkpoint (or the one of `step`) into `state`; None where there is none.

    Tensors are filled in place. A section of `state` that is None is filled with whatever was saved, and one
    that is not in `state` is not read (weights alone, say). A damaged checkpoint is reported to `refused`
    and the one before it is taken.
    """
    found = from_lead(lambda: find(root, refused, step))
    if found is None:
        return None
    folder, manifest = found
    together(lambda: shards.read(folder, state))
    return manifest


def find(root: Path, refused: Callable[[Path, str], None], step: int | None = None) -> tuple[Path, Manifest] | None:
    """The newest intact checkpoint, or the one of `step`."""
    reasons: list[str] = []
    for folder in folders(root):
        if step is not None and step_of(folder) != step:
            continue
        try:
            return folder, verify(folder)
        except CheckpointError as error:
            refused(folder, str(error))
            if step is not None or (folder / MARKER).exists():  # one that was never finished is not a loss
                reasons.append(str(error))
    if reasons:
        raise CheckpointError(f"no usable checkpoint in {root}: {'; '.join(reasons)}")
    if step is not None:
        there = ", ".join(str(step_of(folder)) for folder in committed(root)) or "none"
        raise CheckpointError(f"{root} has no checkpoint of step {step}; steps there: {there}")
    return None


def folders(root: Path) -> list[Path]:
    """Step folders, committed or not, newest first; one set aside by a save that died comes after its successor."""
    found = [path for path in root.glob("step-*") if FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (step_of(path), not path.suffix, path.suffix), reverse=True)


def committed(root: Path) -> list[Path]:
    """The folder of every step that was saved to the end, newest first. `verify` says whether it still is intact."""
    by_step: dict[int, Path] = {}
    for folder in folders(root):
        if (folder / MARKER).exists():
            by_step.setdefault(step_of(folder), folder)
    return list(by_step.values())


def prune(root: Path, keep: int, saved: Path | None = None) -> None:
    """Remove all but the newest `keep` checkpoints (0: none) and what crashed saves left behind.

    `saved`, just written, stays and is known to be good; without it, the newest intact checkpoint is looked for
    and stays, however old it is.
    """
    checkpoints = committed(root)
    kept = checkpoints[: keep or None]
    if saved:
        kept.append(saved)
    elif not any(intact(folder) for folder in kept):
        kept += next(([folder] for folder in checkpoints[len(kept) :] if intact(folder)), [])
    for folder in folders(root):
        unfinished = not (folder / MARKER).exists()
        newest = not checkpoints or step_of(folder) > step_of(checkpoints[0])
        if folder not in kept and not (unfinished and newest):
            discard(folder)
    for path in root.glob(".step-*"):
        match = LEFTOVER.fullmatch(path.name)
        if match and not is_other_process(int(match[1])):
            discard(path)


def intact(folder: Path) -> bool:
    try:
        verify(folder)
    except CheckpointError:
        return False
    return True


def discard(folder: Path) -> None:
    """The marker goes first: half a folder must not look committed. What cannot be removed is tried again next time."""
    try:
        (folder / MARKER).unlink(missing_ok=True)
    except OSError:
        return
    shutil.rmtree(folder, ignore_errors=True)


def is_other_process(number: int) -> bool:
    if number == os.getpid():
        return False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it lives, under another user
    return True
