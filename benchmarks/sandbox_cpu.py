"""Programs per second in the sandbox, beside an interpreter that is started anew for each without any isolation.

python benchmarks/sandbox_cpu.py
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from common import write_result

from lmworks.sandbox import Program, Sandbox, SandboxError
from lmworks.sandbox.confine import interpreter
from lmworks.sandbox.isolation import KINDS

PROGRAM = "def add(a, b):\n    return a + b\nassert add(2, 3) == 5\nprint('passed')\n"
SECONDS = 3.0
ROUNDS = 3


def rate(workers: int, batch: Callable[[int], None]) -> float:
    """Of the best of some rounds, each as long as it takes to be sure."""
    count, best = 4 * workers, 0.0
    for _ in range(ROUNDS):
        started = time.perf_counter()
        batch(count)
        best = max(best, count / (time.perf_counter() - started))
        count = max(count, int(best * SECONDS / ROUNDS))
    return round(best, 1)


def plain(workers: int, *options: str) -> float:
    def one(_: int) -> None:
        subprocess.run([interpreter(), *options, "-c", PROGRAM], check=True, stdout=subprocess.DEVNULL)

    with ThreadPoolExecutor(workers) as threads:
        return rate(workers, lambda count: list(threads.map(one, range(count))) and None)


def sandboxed(kind: str, workers: int, program: Program) -> float:
    with Sandbox(workers, kind) as sandbox:
        return rate(workers, lambda count: check(sandbox.run_all([program] * count)))


def check(results: list) -> None:
    assert all(result.stdout == b"passed\n" for result in results)


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    rows = []
    for workers in sorted({1, cores}):
        row: dict[str, object] = {"workers": workers}
        row["python -c"] = plain(workers)
        row["python -I -S -c"] = plain(workers, "-I", "-S")
        for kind in KINDS:
            try:
                row[kind] = sandboxed(kind, workers, Program(PROGRAM))
            except SandboxError as error:
                row[kind] = str(error)
        row["namespaces, python -S started anew"] = sandboxed(
            "auto", workers, Program(["python3", "-S", "-c", PROGRAM])
        )
        rows.append(row)
        print(row)
    print(write_result("sandbox_cpu", {"programs per second": rows}))


if __name__ == "__main__":
    main()
