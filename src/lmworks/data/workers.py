"""A pool of processes for parts: it dies with its parent, and says so when one of its members is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from ..spec.errors import DataError

T = TypeVar("T")


class InlineExecutor(Executor):
    """One worker: do it here and now, without a process."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextmanager
def worker_pool(workers: int) -> Iterator[Executor]:
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
    """A parent that is killed with -9 cannot shut its pool down; its workers would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
