"""The output folder of `prepare`: one writer at a time, and leftovers of an earlier run."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..spec.errors import DataError
from ..spec.files import sync_folder
from .index import INDEX_FILE, TOKENIZER_FILE, Index, read_index
from .store import TokenData

WORK_FOLDER, LOCK_FILE = ".work", ".lock"
RESULT_FOLDER = "result"  # in the work folder of a request


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
    """The index, if it is of this request and every shard matches it; None: the folder must be made again."""
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
    """Keep what an interrupted run of the same request left; remove what another one did not finish."""
    work = out / WORK_FOLDER / name
    work.mkdir(parents=True, exist_ok=True)
    for stale in work.parent.iterdir():
        if stale != work:
            shutil.rmtree(stale)
    return work


def begin_result(work: Path) -> Path:
    """An empty folder for the result; what a killed run left in it is made again from the finished parts."""
    result = work / RESULT_FOLDER
    if result.exists():
        shutil.rmtree(result)
    result.mkdir()
    return result


def swap_in(result: Path, out: Path) -> None:
    """A complete result takes the place of what `out` held. Killed in between, `out` has no index: not finished.

    Files are renamed and unlinked, never overwritten: a job that has an old one mapped can still read it.
    """
    (out / INDEX_FILE).unlink(missing_ok=True)
    sync_folder(out)
    new = {path.name for path in result.iterdir()}
    for name in sorted(new - {INDEX_FILE}):
        (result / name).replace(out / name)
    for old in (out / TOKENIZER_FILE, *out.glob("train-[0-9]*"), *out.glob("val-[0-9]*")):
        if old.name not in new:
            old.unlink(missing_ok=True)
    sync_folder(out)
    (result / INDEX_FILE).replace(out / INDEX_FILE)
    sync_folder(out)


def end_work(out: Path) -> None:
    shutil.rmtree(out / WORK_FOLDER)
