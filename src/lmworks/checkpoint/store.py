"""Checkpoints that are committed, not just written.

A save goes to a hidden folder beside its place, is synced and sealed, renamed, and only then marked as committed. A
process killed at any point leaves the checkpoints that were there, and at most a leftover that the next save sweeps
away. Every rank writes and hashes its own file in the same folder; rank 0 makes, seals and commits it, and whatever
fails on one rank is raised by all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..parallel.world import collective_error, is_rank_zero, run_on_rank_zero
from ..record import phase
from ..spec import CheckpointError
from ..spec.errors import NoSuchCheckpoint
from .format.digest import write_file
from .format.folders import Keep, committed, discard, folders, prune, put_in_place, work_folder
from .format.index import Index, read_index, verify
from .format.manifest import (
    INDEX,
    MARKER,
    Files,
    Manifest,
    read_manifest,
    seal,
    shard_name,
    step_of,
)
from .format.remote import download, steps_there
from .format.validation import DamagedError
from .load_state import MismatchError, read
from .rank_errors import first_reason
from .save_plan import Plan, contents, make

T = TypeVar("T")


def save(
    root: Path, step: int, state: dict[str, Any], meta: dict[str, Any], keep: Keep | int = 0, hash: str = "sha256"
) -> Path:
    """Write `root/step-000100` and return it; then remove what `keep` does not keep (a number: the newest so many).

    A checkpoint of the same step is replaced, since after a resume the new one is the truth, but stays
    beside it until the new one is committed. If anything fails, what was there before is there again.
    """
    final = root / f"step-{step:06d}"
    phase.enter("save.stage")
    plan = make(state)
    work = run_on_rank_zero(lambda: make_room(root, final))
    try:
        phase.enter("save.write")
        entries = write_all(work, final, plan, state, hash)
        phase.enter("save.seal")
        run_on_rank_zero(lambda: disk(final, lambda: seal(work, step, meta, entries, str(torch.__version__), hash)))
        phase.enter("save.commit")
        run_on_rank_zero(lambda: disk(final, lambda: put_in_place(work, final)))
    finally:
        if is_rank_zero():
            discard(work)
    phase.enter("save.prune")
    run_on_rank_zero(lambda: prune(root, keep, saved=final))
    return final


def make_room(root: Path, final: Path) -> Path:
    work = work_folder(final, os.getpid(), 0)
    discard(work)  # of an earlier process with our number, as happens in containers
    disk(final, lambda: work.mkdir(parents=True))
    return work


def write_all(work: Path, final: Path, plan: Plan, state: dict[str, Any], hash: str) -> Files:
    """Every rank's files; returns the entries of all of them, on the lead."""
    mine: Files = {}

    def try_to() -> str | None:
        try:
            mine.update(write(work, plan, state, hash))
        except OSError as error:
            return told(error)
        return None

    if found := first_reason(try_to):
        reason, rank = found
        raise collective_error(CheckpointError(f"cannot save {final}: {reason}{f' on rank {rank}' if rank else ''}"))
    if not dist.is_initialized():
        return mine
    everyone: list[Any] | None = [None] * dist.get_world_size() if is_rank_zero() else None
    dist.gather_object(mine, everyone)
    return {name: entry for files in everyone or () for name, entry in files.items()}


def write(work: Path, plan: Plan, state: dict[str, Any], hash: str) -> Files:
    """This rank's file, and with the lead's the index of them all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    files = {shard_name(rank): {**write_file(work / shard_name(rank), contents(plan, state), hash), "rank": rank}}
    if is_rank_zero():
        files[INDEX] = {**write_file(work / INDEX, [memoryview(plan.index)], hash), "rank": rank}
    return files


def disk(final: Path, act: Callable[[], T]) -> T:
    """What a disk refuses, in one line."""
    try:
        return act()
    except OSError as error:
        raise CheckpointError(f"cannot save {final}: {told(error)}") from error


def told(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}"


def load(
    root: Path,
    state: dict[str, Any],
    *,
    refused: Callable[[Path, str], None],
    step: int | None = None,
    remote: str = "",
    check: Callable[[Manifest], None] | None = None,
    accept: Callable[[dict[str, Any]], None] | None = None,
) -> Manifest | None:
    """Load the newest intact checkpoint (or the one of `step`) into `state`; None where there is none.

    Tensors are filled in place. A section of `state` that is None is filled with whatever was saved, and one
    that is not in `state` is not read (weights alone, say). A damaged checkpoint is reported to `refused`
    and the one before it is taken; where none is left in `root`, those copied to `remote` are. Bytes are verified as
    they are read, so what is in `state` counts only once this has returned.

    `check` looks at the manifest before anything is read, on the lead: it raises DamagedError where an older checkpoint
    may do, and another error where that would not help. What it lets pass is of this run, so tensors of other names or
    shapes than `state` has are damage, too. `accept` does the same with what was read, alike on every rank.
    """
    reasons: list[str] = []
    for folder, address in candidates(root, step, remote):
        phase.enter("load.find")
        try:
            manifest, index = opened(folder, address, check)
            filled = dict(state)
            phase.enter("load.read")
            read(folder, manifest, index, filled)
            if accept is not None:
                with of_folder(folder):
                    accept(filled)
        except (DamagedError, MismatchError) as error:
            if check is None and isinstance(error, MismatchError):
                raise
            reason = str(error)
            skipped = run_on_rank_zero(partial(refuse, folder, reason, refused))
            if skipped or step is not None:
                reasons.append(reason)
            continue
        state.update(filled)
        return manifest
    refuse_nothing_left(root, reasons, step)
    return None


def candidates(root: Path, step: int | None, remote: str) -> Iterator[tuple[Path, str]]:
    """Folders, best first: those that are here, then those that must first be brought here, with their address."""
    phase.enter("load.find")
    for folder in run_on_rank_zero(lambda: [path for path in folders(root) if step in (None, step_of(path))]):
        yield folder, ""
    if remote:
        for there in run_on_rank_zero(lambda: [found for found in steps_there(remote) if step in (None, found)]):
            yield root / f"step-{there:06d}", remote


def refuse(folder: Path, reason: str, refused: Callable[[Path, str], None]) -> bool:
    """Whether that is a loss: one that was never finished is not."""
    refused(folder, reason)
    return (folder / MARKER).exists()


def opened(folder: Path, remote: str, check: Callable[[Manifest], None] | None) -> tuple[Manifest, Index]:
    """Manifest and index, read by the lead for all."""

    def look() -> tuple[Manifest, Index] | str:
        try:
            if remote:
                download(remote, folder)
            manifest = read_manifest(folder)
            if check is not None:
                with of_folder(folder):
                    check(manifest)
            return manifest, read_index(folder, manifest)
        except DamagedError as error:
            return str(error)

    found = run_on_rank_zero(look)
    if isinstance(found, str):
        raise DamagedError(found)
    return found


@contextmanager
def of_folder(folder: Path) -> Iterator[None]:
    """Whoever looks at what a checkpoint holds need not know where it lies."""
    try:
        yield
    except DamagedError as error:
        raise DamagedError(f"{folder}: {error}") from None


def refuse_nothing_left(root: Path, reasons: list[str], step: int | None) -> None:
    if reasons:
        raise collective_error(CheckpointError(f"no usable checkpoint in {root}: {'; '.join(reasons)}"))
    if step is not None:
        there = ", ".join(str(step_of(folder)) for folder in committed(root)) or "none"
        raise collective_error(NoSuchCheckpoint(f"{root} has no checkpoint of step {step}; steps there: {there}"))


def find(root: Path, refused: Callable[[Path, str], None], step: int | None = None) -> tuple[Path, Manifest] | None:
    """The newest intact checkpoint, or the one of `step`, having read every byte of it. For one process."""
    reasons: list[str] = []
    for folder in folders(root):
        if step is not None and step_of(folder) != step:
            continue
        try:
            return folder, verify(folder)
        except CheckpointError as error:
            refused(folder, str(error))
            if step is not None or (folder / MARKER).exists():
                reasons.append(str(error))
    refuse_nothing_left(root, reasons, step)
    return None
