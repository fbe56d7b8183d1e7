"""The checkpoint folders of a run: listing, atomic rename and commit, retention."""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from ...spec import CheckpointError
from ...spec.files import sync_folder
from .index import verify
from .manifest import FOLDER, MARKER, commit, step_of

LEFTOVER = re.compile(r"\.step-[0-9]+\.tmp-([0-9]+)-[0-9]+")


def work_folder(final: Path, process: int, number: int) -> Path:
    """Where the `number`-th save of a process is written before it is renamed to `final`."""
    return final.with_name(f".{final.name}.tmp-{process}-{number}")


def rename_and_commit(work: Path, final: Path) -> None:
    """An older checkpoint of this step keeps its marker, so it is valid until the new one is committed."""
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


def folders(root: Path) -> list[Path]:
    """Step folders, committed or not, newest first; one replaced by a save that died comes after its successor."""
    found = [path for path in root.glob("step-*") if FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (step_of(path), not path.suffix, path.suffix), reverse=True)


def committed(root: Path) -> list[Path]:
    """The folder of every committed step, newest first; `verify` checks whether it is intact."""
    by_step: dict[int, Path] = {}
    for folder in folders(root):
        if (folder / MARKER).exists():
            by_step.setdefault(step_of(folder), folder)
    return list(by_step.values())


def newest_step(root: Path) -> int:
    """Of the committed checkpoints; 0 without any."""
    return max(map(step_of, committed(root)), default=0)


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints are kept."""

    newest: int = 0  # number of newest ones (0: all)
    every: int = 0  # and every multiple of this step, forever (0: none)


def prune(root: Path, keep: RetentionPolicy | int, saved: Path | None = None) -> None:
    """Delete the checkpoints that `keep` (or a number of newest) does not retain, and leftovers of crashed saves."""
    for folder in prunable(root, RetentionPolicy(keep) if isinstance(keep, int) else keep, saved):
        discard(folder)


def prunable(root: Path, keep: RetentionPolicy, saved: Path | None = None) -> list[Path]:
    """What `prune` deletes.

    `saved`, just written, is good and kept; without it, the newest intact checkpoint is searched for and kept, however
    old. If none is intact, all are kept: they may be damaged in different places.
    """
    checkpoints = committed(root)
    kept = checkpoints[: keep.newest or None]
    if saved:
        kept.append(saved)
    elif not any(intact(folder) for folder in kept):
        older = checkpoints[len(kept) :]
        kept += next(([folder] for folder in older if intact(folder)), older)
    kept += [folder for folder in checkpoints if keep.every and step_of(folder) % keep.every == 0]
    found = []
    for folder in folders(root):
        unfinished = not (folder / MARKER).exists()
        newest = not checkpoints or step_of(folder) > step_of(checkpoints[0])
        if folder not in kept and not (unfinished and newest):
            found.append(folder)
    for path in root.glob(".step-*"):
        match = LEFTOVER.fullmatch(path.name)
        if match and not is_other_process(int(match[1])):
            found.append(path)
    return found


def set_aside(root: Path, step: int, place: Path) -> list[int]:
    """Move every checkpoint after `step` to `place`, where a resume does not look; returns their steps.

    Newest first: a run that is killed in between is left at an earlier step of the same history.
    """
    later = [folder for folder in folders(root) if step_of(folder) > step]
    try:
        for folder in later:
            place.mkdir(exist_ok=True)
            folder.rename(place / folder.name)
            sync_folder(place)
            sync_folder(root)
    except OSError as error:
        raise CheckpointError(f"cannot move checkpoints after step {step} to {place}: {error.strerror}") from None
    return sorted({step_of(folder) for folder in later})


def remove_leftovers(root: Path) -> None:
    """Remove leftovers of crashed saves. For the process that has locked the run, before its first save.

    `prune` identifies them by pid, which may have been reused; in a container it always is.
    """
    for path in root.glob(".step-*"):
        if LEFTOVER.fullmatch(path.name):
            discard(path)


def intact(folder: Path) -> bool:
    try:
        verify(folder)
    except CheckpointError:
        return False
    return True


def discard(folder: Path) -> None:
    """The marker goes first: a partial folder must not look committed. Failures are retried next time."""
    try:
        if folder.is_symlink():  # its target is not ours
            folder.unlink()
            return
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
        pass  # it runs under another user
    return True
