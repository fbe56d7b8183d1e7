"""Calls side by side, in threads that a hanging call cannot keep a process from ending."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
MAX_THREADS = 64
PATIENCE_S = 300.0  # without any call ending: those that were begun are given up


def call_all(calls: Sequence[Callable[[], T]], patience_s: float = PATIENCE_S) -> list[T | BaseException]:
    """The result of each call, or its error, in their order."""
    found: list[T | BaseException] = [TimeoutError(f"no answer in {patience_s:g} seconds")] * len(calls)
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    ended: queue.SimpleQueue[tuple[int, T | BaseException]] = queue.SimpleQueue()
    for number in range(len(calls)):
        waiting.put(number)

    def work() -> None:
        while True:
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                ended.put((number, calls[number]()))
            except BaseException as error:
                ended.put((number, error))

    threads = min(len(calls), MAX_THREADS, 4 * (os.cpu_count() or 1))
    left = len(calls)
    while left:
        for _ in range(threads):
            threading.Thread(target=work, name="environment", daemon=True).start()
        try:
            while left:
                number, result = ended.get(timeout=patience_s)
                found[number], left = result, left - 1
        except queue.Empty:  # every thread hangs: go on with others, if there is anything left that was not begun
            if waiting.empty():
                break
    return found
