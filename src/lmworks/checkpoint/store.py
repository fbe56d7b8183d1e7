"""Saving and loading of checkpoints, with an atomic commit.

A save is written to a hidden folder, synced, given a manifest, renamed, and only then marked as committed. A process
that is killed at any point leaves the earlier checkpoints, and at most a leftover that the next save removes. Every
rank writes and hashes its own file in the same folder; rank 0 creates and commits the folder. An error of one rank is
raised by all.
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
from .format.folders import RetentionPolicy, committed, discard, folders, prune, rename_and_commit, work_folder
from .format.index import Index, read_index, verify
from .format.manifest import (
    MARKER,
    DamagedError,
    Files,
    Manifest,
    os_error_text,
    read_manifest,
    step_of,
    write_files,
    write_manifest,
)
from .format.remote import download, remote_steps
from .load_state import MismatchError, first_failure, read
from .save_plan import RankPlan, file_contents, make_plan

T = TypeVar("T")


def save(
    root: Path,
    step: int,
    state: dict[str, Any],
    meta: dict[str, Any],
    keep: RetentionPolicy | int = 0,
    hash: str = "sha256",
) -> Path:
    """Write `root/step-000100` and return it; then apply `keep` (a number: of newest ones).

    A checkpoint of the same step is replaced, since after a resume the new one is valid, but stays beside it until the
    new one is committed. If anything fails, the old one is restored.
    """
    final = root / f"step-{step:06d}"
    phase.enter("save.stage")
    plan = make_plan(state)
    work = run_on_rank_zero(lambda: make_work_folder(final))
    try:
        phase.enter("save.write")
        entries = write_all(work, final, plan, state, hash)
        phase.enter("save.seal")
        run_on_rank_zero(
            lambda: as_checkpoint_error(
                final, lambda: write_manifest(work, step, meta, entries, str(torch.__version__), hash)
            )
        )
        phase.enter("save.commit")
        run_on_rank_zero(lambda: as_checkpoint_error(final, lambda: rename_and_commit(work, final)))
    finally:
        if is_rank_zero():
            discard(work)
    phase.enter("save.prune")
    run_on_rank_zero(lambda: prune(root, keep, saved=final))
    return final


def make_work_folder(final: Path) -> Path:
    work = work_folder(final, os.getpid(), 0)
    discard(work)  # of an earlier process with the same pid, as happens in containers
    as_checkpoint_error(final, lambda: work.mkdir(parents=True))
    return work


def write_all(work: Path, final: Path, plan: RankPlan, state: dict[str, Any], hash: str) -> Files:
    """The files of every rank; returns all entries on rank 0."""
    mine: Files = {}

    def try_to() -> str | None:
        try:
            mine.update(write(work, plan, state, hash))
        except OSError as error:
            return os_error_text(error)
        return None

    if found := first_failure(try_to):
        reason, rank = found
        raise collective_error(CheckpointError(f"cannot save {final}: {reason}{f' on rank {rank}' if rank else ''}"))
    if not dist.is_initialized():
        return mine
    everyone: list[Any] | None = [None] * dist.get_world_size() if is_rank_zero() else None
    dist.gather_object(mine, everyone)
    return {name: entry for files in everyone or () for name, entry in files.items()}


def write(work: Path, plan: RankPlan, state: dict[str, Any], hash: str) -> Files:
    """This rank's file; on rank 0 also the index of all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return write_files(work, rank, file_contents(plan, state), plan.index if is_rank_zero() else b"", hash)


def as_checkpoint_error(final: Path, act: Callable[[], T]) -> T:
    """Run `act`; an OSError becomes a one-line CheckpointError."""
    try:
        return act()
    except OSError as error:
        raise CheckpointError(f"cannot save {final}: {os_error_text(error)}") from error


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
    """Load the newest intact checkpoint (or the one of `step`) into `state`; None without one.

    Tensors are filled in place. A section of `state` that is None is created as it was saved; one that is not in
    `state` is not read (to load only weights). A damaged checkpoint is reported to `refused` and the one before it is
    tried; after those in `root`, the copies in `remote`. Bytes are verified as they are read, so `state` is valid only
    once this has returned.

    `check` gets the manifest before anything is read, on rank 0: it raises DamagedError to try an older checkpoint, and
    any other error to stop. What it accepts is of this run, so tensors of other names or shapes than in `state` are
    damage, too. `accept` does the same with the loaded state, on every rank.
    """
    reasons: list[str] = []
    for folder, address in candidates(root, step, remote):
        phase.enter("load.find")
        try:
            manifest, index = open_checkpoint(folder, address, check)
            filled = dict(state)
            phase.enter("load.read")
            read(folder, manifest, index, filled)
            if accept is not None:
                with prefix_folder(folder):
                    accept(filled)
        except (DamagedError, MismatchError) as error:
            if check is None and isinstance(error, MismatchError):
                raise
            reason = str(error)
            skipped = run_on_rank_zero(partial(report_refused, folder, reason, refused))
            if skipped or step is not None:
                reasons.append(reason)
            continue
        state.update(filled)
        return manifest
    raise_none_usable(root, reasons, step)
    return None


def candidates(root: Path, step: int | None, remote: str) -> Iterator[tuple[Path, str]]:
    """Folders, best first: local ones, then remote ones that must be downloaded, with their URL."""
    phase.enter("load.find")
    for folder in run_on_rank_zero(lambda: [path for path in folders(root) if step in (None, step_of(path))]):
        yield folder, ""
    if remote:
        for there in run_on_rank_zero(lambda: [found for found in remote_steps(remote) if step in (None, found)]):
            yield root / f"step-{there:06d}", remote


def report_refused(folder: Path, reason: str, refused: Callable[[Path, str], None]) -> bool:
    """Returns whether it was committed; an unfinished one is no loss."""
    refused(folder, reason)
    return (folder / MARKER).exists()


def open_checkpoint(folder: Path, remote: str, check: Callable[[Manifest], None] | None) -> tuple[Manifest, Index]:
    """Manifest and index, read by rank 0 for all ranks."""

    def look() -> tuple[Manifest, Index] | str:
        try:
            if remote:
                download(remote, folder)
            manifest = read_manifest(folder)
            if check is not None:
                with prefix_folder(folder):
                    check(manifest)
            return manifest, read_index(folder, manifest)
        except DamagedError as error:
            return str(error)

    found = run_on_rank_zero(look)
    if isinstance(found, str):
        raise DamagedError(found)
    return found


@contextmanager
def prefix_folder(folder: Path) -> Iterator[None]:
    """Add the folder to the messages of DamagedErrors."""
    try:
        yield
    except DamagedError as error:
        raise DamagedError(f"{folder}: {error}") from None


def raise_none_usable(root: Path, reasons: list[str], step: int | None) -> None:
    if reasons:
        raise collective_error(CheckpointError(f"no usable checkpoint in {root}: {'; '.join(reasons)}"))
    if step is not None:
        there = ", ".join(str(step_of(folder)) for folder in committed(root)) or "none"
        raise collective_error(NoSuchCheckpoint(f"{root} has no checkpoint of step {step}; steps there: {there}"))


def find(root: Path, refused: Callable[[Path, str], None], step: int | None = None) -> tuple[Path, Manifest] | None:
    """The newest intact checkpoint, or the one of `step`, fully verified. For one process."""
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
    raise_none_usable(root, reasons, step)
    return None
