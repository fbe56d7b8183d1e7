"""The folders of a run's checkpoints: which there are, putting one in its place, removing those that are not kept."""

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


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay."""

    newest: int = 0  # so many of them (0: all)
    every: int = 0  # and those of every so many steps, for ever (0: none)


def prune(root: Path, keep: Keep | int, saved: Path | None = None) -> None:
    """Remove the checkpoints that `keep` (or the newest so many) leaves out, and what crashed saves left behind."""
    for folder in surplus(root, Keep(keep) if isinstance(keep, int) else keep, saved):
        discard(folder)


def surplus(root: Path, keep: Keep, saved: Path | None = None) -> list[Path]:
    """What `prune` removes.

    `saved`, just written, stays and is known to be good; without it, the newest intact checkpoint is looked for
    and stays, however old it is. Where none is intact all of them stay: what one has lost another may still hold.
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
    """Move every checkpoint after `step` to `place`, where no resume finds it; returns their steps.

    The newest first: killed in between, what is left is a run that stands earlier on the same line.
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


def sweep(root: Path) -> None:
    """Remove what saves that died have left. For whoever holds the run, before its first save.

    `prune` knows them by their process, whose number may be that of another by now: in a container, every time.
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
    """The marker goes first: half a folder must not look committed. What cannot be removed is tried again next time."""
    try:
        if folder.is_symlink():  # what it points to is somebody else's
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
        pass  # it lives, under another user
    return True
