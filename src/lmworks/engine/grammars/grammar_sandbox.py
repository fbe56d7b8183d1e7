"""Grammar sandbox: untrusted grammars are compiled in a separate process first, within limits of time and memory.

llguidance bounds the work of its parser, but not that of building a lexer: `{"multipleOf": 9999991}` takes minutes, and
regexes of a few thousand characters gigabytes. It cannot be interrupted, and out of memory it aborts the process. So
every grammar is compiled here first, within a `Budget`. The vocabulary hardly matters for that: the sandbox has one
token for each byte. The process forks for every grammar, so that one that is too complex costs no restart.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from ...spec import LMWorksError, SpecError

READY, FAILED = "ready", "failed"
NICENESS = 5  # below the engine on the same cores
WALL = 30.0  # wall-clock limit per second of processor time


@dataclass(frozen=True)
class Budget:
    """Limits of compiling a grammar."""

    seconds: float  # of processor time
    bytes: int  # of memory


FULL = Budget(2.0, 2**30)
FIRST = Budget(0.1, 2**28)  # enough for nearly all benign grammars


class TooComplex(SpecError):
    """A grammar takes more than its budget."""


class GrammarSandbox:
    """One grammar at a time; thread-safe. The process is reused."""

    def __init__(self, limits: Mapping[str, Any]) -> None:
        self.limits, self.lock = limits, threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def check(self, grammar: str, budget: Budget = FULL) -> int:
        """Bytes of memory that compiling took; raises TooComplex beyond the budget."""
        with self.lock:
            said = answer(self.running(), json.dumps([grammar, *astuple(budget)]))
        if said == FAILED:
            raise TooComplex(
                "the grammar is too complex (compiling it takes more than "
                f"{budget.seconds:g} s or {budget.bytes / 2**30:g} GiB)"
            )
        if not said.isdecimal():
            raise LMWorksError("the grammar sandbox process was lost: send the request again")
        return int(said)

    def running(self) -> subprocess.Popen[str]:
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, "-m", __name__, json.dumps(dict(self.limits))]
            pipe = subprocess.PIPE
            # In a session of its own, without Ctrl-C; its stderr is discarded.
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True
            )
            weakref.finalize(self, end, self.process)
            if answer(self.process) != READY:
                raise LMWorksError(f"the grammar sandbox process exited at start: {' '.join(command[:3])}")
        return self.process


def answer(process: subprocess.Popen[str], line: str | None = None) -> str:
    """Send a line, if given, and return the reply; empty: the process has exited."""
    assert process.stdin is not None
    assert process.stdout is not None
    found = ""
    try:
        with suppress(OSError):
            if line is not None:
                process.stdin.write(line + "\n")
                process.stdin.flush()
            found = process.stdout.readline()
    finally:
        if not found:  # a late reply would be taken for the next one
            end(process)
    return found.rstrip("\n")


def end(process: subprocess.Popen[str]) -> None:
    """Kill the process and its children."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):
            pipe.close()


# --- the process ----------------------------------------------------------------------------------------------


def main() -> None:
    import llguidance

    limits = llguidance.LLParserLimits(**json.loads(sys.argv[1]))
    tokenizer = llguidance.LLTokenizer("byte")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    print(READY, flush=True)
    for line in sys.stdin:
        grammar, seconds, size = json.loads(line)
        if (child := os.fork()) == 0:
            try:
                limit(seconds, size)
                before = peak()
                llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
                print(peak() - before, flush=True)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if status:
            print(FAILED, flush=True)


def limit(seconds: float, size: int) -> None:
    """Limit this process from now on; the signal of either timer kills it."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        pages = int(statm.read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + size,) * 2)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * WALL)


def peak() -> int:
    """Peak memory so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
