"""`curate`: sources → shards of clean documents and a data card, resumable, the same whatever the number of workers."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.encode import available_cores, worker_pool
from ..data.progress import Progress, silent
from ..data.sources import CURATED_FILE, fingerprint_of
from ..spec.errors import DataError, LMWorksError, SpecError
from ..spec.files import check_writable, read_json_object, sync_folder, write_whole
from .assemble import check_format, move_shards, remove_tree
from .card import CARD_HTML, CARD_JSON, card_of, page_of
from .heap import return_large_buffers
from .pipeline import Pipeline
from .run import WORK_FOLDER, Run, all_parts, open_run, work

REQUEST_FILE = "pipeline.json"  # what the folder is made by: there from the first moment
LOCK_FILE = ".lock"
FAILED = "failed"  # in the work folder: why a worker gave up, so that the others do too
POLL_S = 0.5


@dataclass(frozen=True)
class Curated:
    folder: Path
    index: Mapping[str, Any]
    up_to_date: bool  # it was, and nothing was done

    def summary(self) -> dict[str, Any]:
        """What the command prints with --json."""
        return {"folder": str(self.folder), "up_to_date": self.up_to_date} | {
            key: self.index[key] for key in ("read", "kept", "dropped", "stages")
        }


Start = Callable[[Pipeline, Run, int, Progress], None]
"""Starts so many workers, and returns when the run is finished."""


def curate(pipeline: Pipeline, workers: int = 0, progress: Progress = silent, start: Start | None = None) -> Curated:
    """`workers` = 0 means one a core; it never changes the result. `start`: on other machines (`ray.in_ray`)."""
    if workers < 0:
        raise SpecError(f"--workers {workers} is out of range: it must be at least 0 (0: one a core)")
    try:
        run = begin(pipeline)
        if isinstance(run, Curated):
            return run
        count = min(workers or available_cores(), max(1, len(run.parts)))
        if start:
            start(pipeline, run, workers or available_cores(), progress)
        elif count == 1:
            join(pipeline, progress)
        else:
            in_processes(pipeline, run, count, progress)
        return Curated(pipeline.out, read_index(pipeline.out), up_to_date=False)
    except OSError as error:
        where = error.filename or pipeline.out
        what = f"cannot curate into {pipeline.out}: {where}: {error.strerror or error}"
        raise DataError(f"{what}; run again to continue") from None


def begin(pipeline: Pipeline) -> Run | Curated:
    """Refuse a folder of something else; find one that is ready; or else plan the run."""
    out = pipeline.out
    if out.exists() and not out.is_dir():
        raise SpecError(f"--out {out} is a file; name a folder for the documents")
    check_writable(out, "--out")
    check_format(pipeline.output.format)
    for stage in pipeline.stages:
        stage.require()
    request = pipeline.request()
    parts = None
    if not (out / WORK_FOLDER / "plan.json").exists():  # before anything is made: a source may not be there
        parts = [part for source in pipeline.sources for part in all_parts(source, pipeline.reading.reading(), out)]
    check_own(out)
    with exclusive(out):
        check_request(out, request)
        if (out / CURATED_FILE).exists():
            index = read_index(out)
            check_sources(out, index, fingerprint_of(parts or open_run(pipeline).parts))
            verify_shards(out, index)
            return Curated(out, index, up_to_date=True)
        write_whole(out / REQUEST_FILE, json.dumps(request, indent=1))
        (out / WORK_FOLDER).mkdir(exist_ok=True)
        (out / WORK_FOLDER / FAILED).unlink(missing_ok=True)
        return open_run(pipeline)


def join(pipeline: Pipeline, progress: Progress = silent) -> None:
    """Work on a run that has begun, beside other processes of this or other machines, until it is finished."""
    return_large_buffers()
    run, failed = open_run(pipeline, check=False), pipeline.out / WORK_FOLDER / FAILED

    def notify(step: str, done: int, total: int) -> None:
        if failed.exists():
            raise DataError(failed.read_text(encoding="utf-8"))
        progress(step, done, total)

    try:
        work(run, notify, lambda: (pipeline.out / CURATED_FILE).exists())
        with exclusive(pipeline.out):
            finish(run)
    except LMWorksError as error:
        if not failed.exists():
            write_whole(failed, str(error))
        raise
    except FileNotFoundError:  # another one has finished the run, and removed what this one was about to look at
        if not (pipeline.out / CURATED_FILE).exists():
            raise


def in_processes(pipeline: Pipeline, run: Run, count: int, progress: Progress) -> None:
    with worker_pool(count) as pool:
        waiting = {pool.submit(join, pipeline) for _ in range(count)}
        while waiting:
            ended, waiting = wait(waiting, POLL_S)
            show(run, progress)
            for future in ended:
                future.result()


def show(run: Run, progress: Progress) -> None:
    try:
        for step in run.steps():
            done = len(step.done())
            if done < len(step.tasks):
                progress(step.title, done, len(step.tasks))
                return
    except FileNotFoundError:  # removed at the end
        pass


def finish(run: Run) -> None:
    """Shards, card, and last the index. Killed in between, the next worker does the rest."""
    out = run.pipeline.out
    if (out / CURATED_FILE).exists():
        return
    *_, last = run.steps()
    shards = [last.record(number) for number in range(len(last.tasks))]
    card = card_of(run)
    if not card["read"]["documents"]:
        raise DataError(f"no document in {', '.join(run.pipeline.sources)}: they are empty")
    files = fingerprint_of(run.parts)
    index = {
        "request": run.pipeline.request(),
        "sources_sha256": digest_of(files),
        **{key: card[key] for key in ("read", "kept", "dropped", "dedup_rate")},
        "stages": {
            name: {key: stage[key] for key in ("kept", "dropped", "changed")} for name, stage in card["stages"].items()
        },
        "shards": shards,
    }
    move_shards([last.folder / f"{number:06d}" / "files" for number in range(len(last.tasks))], out)
    write_whole(out / CARD_JSON, json.dumps(card, indent=1, ensure_ascii=False) + "\n")
    write_whole(out / CARD_HTML, page_of(card))
    sync_folder(out)
    write_whole(out / CURATED_FILE, json.dumps(index, indent=1, ensure_ascii=False) + "\n")
    remove_tree(out / WORK_FOLDER)


def digest_of(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


# --- the folder -------------------------------------------------------------------------------------------


@contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """One process at a time plans or finishes; the system gives the lock back even after kill -9."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / LOCK_FILE, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_own(out: Path) -> None:
    ours = (out / LOCK_FILE).exists() or (out / REQUEST_FILE).exists()
    if not ours and out.is_dir() and any(out.iterdir()):
        raise DataError(f"{out} is not empty and was not made by `lmworks data curate`; choose another --out")


def check_request(out: Path, request: Mapping[str, Any]) -> None:
    if not (out / REQUEST_FILE).exists():
        return
    before = read_json_object(out / REQUEST_FILE, DataError)
    if before != json.loads(json.dumps(request)):
        keys = [key for key in request if before.get(key) != json.loads(json.dumps(request[key]))]
        raise SpecError(
            f"{out} belongs to another pipeline: {', '.join(keys)} differ (see {out / REQUEST_FILE}); choose another "
            "--out, or remove the folder"
        )


def check_sources(out: Path, index: Mapping[str, Any], files: list[str]) -> None:
    if index["sources_sha256"] != digest_of(files):
        raise SpecError(
            f"{out} was made when the files of its sources were others (names, sizes or times); choose another --out, "
            "or remove the folder to make it again"
        )


def verify_shards(out: Path, index: Mapping[str, Any]) -> None:
    for shard in index["shards"]:
        path = out / shard["file"]
        if not path.exists() or os.stat(path).st_size != shard["bytes"] or sha256_of(path) != shard["sha256"]:
            raise DataError(f"{path} is missing or damaged; remove {out} and run again")


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_index(out: Path) -> dict[str, Any]:
    return read_json_object(out / CURATED_FILE, DataError)
