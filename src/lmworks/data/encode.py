"""One part of a source → tokens on disk, by a pool of worker processes.

A part leaves `part-000007.bin` (tokens) and, written last, `part-000007.npz` (a line for each document). If the
second exists, the first is complete, so a killed run continues after its last finished part.
"""

from __future__ import annotations

import functools
import hashlib
import io
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..spec.errors import DataError
from ..spec.files import write_whole
from .index import dtype_for
from .sources import Document, Part, Reading, documents_of
from .tokenizer import ByteTokenizer, Tokenizer, read_tokenizer


@dataclass(frozen=True)
class Job:
    number: int
    part: Part
    reading: Reading
    tokenizer: str  # "bytes" or the path of a tokenizer.json
    eot: int
    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / f"part-{self.number:06d}.bin"

    @property
    def done(self) -> Path:
        return self.folder / f"part-{self.number:06d}.npz"


@dataclass(frozen=True)
class Encoded:
    """The documents of one finished part, in order."""

    digests: NDArray[np.uint64]  # (documents, 2): 128 bits of the content
    tokens: NDArray[np.int64]  # (documents,) with end-of-text
    text_bytes: NDArray[np.int64]  # (documents,)
    empty: int
    unreadable: tuple[str, ...]


def content_digest(text: str) -> bytes:
    """128 bits: a billion documents collide with a chance of 1e-21, and the split follows from the same bits."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()


def as_digests(raw: list[bytes]) -> NDArray[np.uint64]:
    return np.frombuffer(b"".join(raw), np.dtype("<u8")).reshape(-1, 2).astype(np.uint64)


def encode_part(job: Job) -> int:
    """Tokenize one part, unless that is done already; returns the number of the part."""
    if job.done.exists():
        return job.number
    tokenizer = open_tokenizer(job.tokenizer, job.eot)
    dtype = dtype_for(tokenizer.vocab_size)
    digests: list[bytes] = []
    tokens: list[int] = []
    text_bytes: list[int] = []
    empty = 0
    unreadable: list[str] = []
    with open(job.bin, "wb") as file:
        for document in documents_of(job.part, job.reading):
            if document.skipped:
                unreadable.append(document.skipped)
            elif not document.text.strip():
                empty += 1
            else:
                ids = np.array([*encode_document(tokenizer, document), tokenizer.eot], dtype)
                file.write(ids.tobytes())
                digests.append(content_digest(document.text))
                tokens.append(len(ids))
                text_bytes.append(len(document.text.encode("utf-8")))
        file.flush()
        os.fsync(file.fileno())
    table = io.BytesIO()
    np.savez(
        table,
        digests=as_digests(digests),
        tokens=np.array(tokens, np.int64),
        text_bytes=np.array(text_bytes, np.int64),
        empty=np.array(empty),
        unreadable=np.array(unreadable, np.str_),
    )
    write_whole(job.done, table.getvalue())
    return job.number


def encode_document(tokenizer: Tokenizer, document: Document) -> list[int]:
    if not document.pieces:
        return tokenizer.encode(document.text)
    ids = []
    for name, text in document.pieces:
        mark = tokenizer.token_id(name)
        if mark is None or mark >= tokenizer.vocab_size:
            raise DataError(f"--repositories: the tokenizer has no token {name}; bpe:N+code has one")
        ids += [mark, *tokenizer.encode(text)]
    return ids


def read_encoded(job: Job) -> Encoded:
    with np.load(job.done) as table:
        return Encoded(
            digests=table["digests"],
            tokens=table["tokens"],
            text_bytes=table["text_bytes"],
            empty=int(table["empty"]),
            unreadable=tuple(str(name) for name in table["unreadable"]),
        )


@functools.lru_cache(maxsize=1)
def open_tokenizer(name: str, eot: int) -> Tokenizer:
    return ByteTokenizer() if name == "bytes" else read_tokenizer(Path(name), eot)


# --- worker processes ------------------------------------------------------------------------------------


T = TypeVar("T")


class InlineExecutor(Executor):
    """One worker: do it here and now, without a process."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextmanager
def worker_pool(workers: int) -> Iterator[Executor]:
    """Processes that end with their parent. One that is killed (out of memory) is reported as that."""
    if workers == 1:
        yield InlineExecutor()
        return
    # Forking starts in milliseconds and asks nothing of the caller's __main__; elsewhere it is not safe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=init_worker)
    try:
        yield pool
    except BrokenProcessPool:
        raise DataError(
            "a worker process was killed (out of memory?); run again with fewer --workers: finished parts are kept"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def map_as_completed(pool: Executor, work: Callable[..., T], jobs: list[Any]) -> Iterator[T]:
    """Results as they come. Inline, a job runs only when its result is asked for, so progress is true there too."""
    if isinstance(pool, InlineExecutor):
        yield from map(work, jobs)
        return
    for future in as_completed([pool.submit(work, job) for job in jobs]):
        yield future.result()


def init_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=die_with_parent, daemon=True).start()


def die_with_parent() -> None:
    """A parent that is killed with -9 cannot shut its pool down; its workers would wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def available_cores() -> int:
    """Of this process: a container may have fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
