"""The output folder while it is being made: one writer at a time, and what an earlier run left in it."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..spec.errors import DataError
from .index import INDEX_FILE, TOKENIZER_FILE, Index, read_index
from .store import TokenData

WORK_FOLDER, LOCK_FILE = ".work", ".lock"


@contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """Wait until no other process prepares this folder; the system gives the lock back even after kill -9."""
    ours = (out / LOCK_FILE).exists() or (out / INDEX_FILE).exists()
    if not ours and out.is_dir() and any(out.iterdir()):
        raise DataError(f"{out} is not empty and was not made by `lmworks data prepare`; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    with open(out / LOCK_FILE, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def up_to_date(out: Path, fingerprint: str) -> Index | None:
    """The index, if it answers this very request and every shard is as it says; else the folder is made anew."""
    try:
        index = read_index(out)
        if index.fingerprint != fingerprint:
            return None
        for split in index.splits:
            TokenData.open(out, split, verify=True)
        return index
    except DataError:
        return None


def begin_work(out: Path, name: str) -> Path:
    """Keep what an interrupted run of the same request left; remove what belongs to another one."""
    (out / INDEX_FILE).unlink(missing_ok=True)
    (out / TOKENIZER_FILE).unlink(missing_ok=True)
    for split in ("train", "val"):
        for old in out.glob(f"{split}-[0-9]*"):
            old.unlink()  # not overwritten: a job that has it mapped goes on reading the old one
    work = out / WORK_FOLDER / name
    work.mkdir(parents=True, exist_ok=True)
    for stale in work.parent.iterdir():
        if stale != work:
            shutil.rmtree(stale)
    return work


def end_work(out: Path) -> None:
    shutil.rmtree(out / WORK_FOLDER)
