"""Checkpoints that are committed, not just written: Torch Distributed Checkpoint inside, a manifest around it.

A save goes to a hidden folder beside its place, is synced and sealed, renamed, and only then marked as
committed. A process killed at any point leaves the checkpoints that were there, and at most a leftover that
the next save sweeps away. Every rank writes its shards into the same folder; rank 0 makes, seals and commits it, and
whatever fails on one rank is raised by all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...parallel.world import from_lead, is_lead, together
from ...record.checkpoint.folders import committed, discard, folders, prune, put_in_place
from ...record.checkpoint.manifest import MARKER, Manifest, seal, step_of, verify
from ...spec import CheckpointError
from . import shards


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
    seal(work, step, meta, str(torch.__version__))
    put_in_place(work, final)


def disk(final: Path, act: Callable[[], None]) -> None:
    """What a disk refuses, in one line."""
    try:
        act()
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise CheckpointError(f"cannot save {final}: {error.strerror or error}{where}") from error


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
