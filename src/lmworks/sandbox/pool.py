"""Programs over a bounded number of supervisors, side by side."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from .isolation import choose
from .limits import Limits
from .program import Program, SandboxResult
from .worker import Worker


class Sandbox:
    """Supervisors that are kept for many batches. Threads may share one."""

    def __init__(self, workers: int | None = None, isolation: str = "auto") -> None:
        self.isolation = choose(isolation)
        self.size = workers or len(os.sched_getaffinity(0))
        self.idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()  # None: one that may be started
        for _ in range(self.size):
            self.idle.put(None)

    def run(self, program: Program, limits: Limits = Limits()) -> SandboxResult:
        worker = self.idle.get() or Worker(self.isolation)
        keep: Worker | None = None
        try:
            result = worker.run(program, limits)
            keep = worker
            return result
        finally:
            if keep is None:
                worker.close()
            self.idle.put(keep)

    def run_all(self, programs: Iterable[Program], limits: Limits = Limits()) -> list[SandboxResult]:
        """In the order of `programs`, as many at once as there are workers."""
        with ThreadPoolExecutor(self.size, thread_name_prefix="sandbox") as threads:
            return list(threads.map(lambda program: self.run(program, limits), programs))

    def close(self) -> None:
        for _ in range(self.size):
            if worker := self.idle.get():
                worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def run_program(
    program: str | Sequence[str],
    *,
    stdin: str | bytes = b"",
    files: Mapping[str, str] | None = None,
    limits: Limits = Limits(),
    isolation: str = "auto",
) -> SandboxResult:
    """Python source, or a command with its arguments. What the program does is in the result, whatever it does;
    SandboxError is raised if it could not be run."""
    with Sandbox(workers=1, isolation=isolation) as sandbox:
        return sandbox.run(Program(program, stdin, files or {}), limits)


def run_programs(
    programs: Iterable[str | Program],
    *,
    limits: Limits = Limits(),
    workers: int | None = None,
    isolation: str = "auto",
) -> list[SandboxResult]:
    """Many, `workers` at once (as many as there are cores): a reward of hundreds of answers."""
    wanted = [one if isinstance(one, Program) else Program(one) for one in programs]
    with Sandbox(min(workers or len(os.sched_getaffinity(0)), max(1, len(wanted))), isolation) as sandbox:
        return sandbox.run_all(wanted, limits)
