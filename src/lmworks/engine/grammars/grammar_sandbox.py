"""Grammar sandbox: untrusted grammars are compiled in a separate process first, within limits of time and memory.

llguidance bounds the work of its parser, but not that of making a lexer: `{"multipleOf": 9999991}` takes minutes, and
regexes of a few thousand characters gigabytes. Nobody can interrupt it, and without memory it ends the process. So what
a stranger sends is compiled here first, within a `Budget`. Which tokens there are hardly matters to it: the trial has
one for each byte. The process forks for every grammar, so that one that is too complex costs no new start.
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
NICENESS = 5  # whoever serves tokens on the same cores comes first
WALL = 30.0  # seconds of the clock for one of processor time: what waits for something else does not wait for ever


@dataclass(frozen=True)
class Budget:
    """What compiling a grammar may take."""

    seconds: float  # of processor time
    bytes: int  # of memory


FULL = Budget(2.0, 2**30)
FIRST = Budget(0.1, 2**28)  # enough for nearly all that is honest


class TooComplex(SpecError):
    """A grammar takes more than its budget."""


class GrammarSandbox:
    """One grammar at a time; thread-safe. The process is reused."""

    def __init__(self, limits: Mapping[str, Any]) -> None:
        self.limits, self.lock = limits, threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def check(self, grammar: str, budget: Budget = FULL) -> int:
        """Bytes of memory that it took; raises TooComplex where it takes more than the budget."""
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
            # In a session of its own: Ctrl-C is for others. What it says as it dies is for nobody.
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True
            )
            weakref.finalize(self, end, self.process)
            if answer(self.process) != READY:
                raise LMWorksError(f"the grammar sandbox process exited at start: {' '.join(command[:3])}")
        return self.process


def answer(process: subprocess.Popen[str], line: str | None = None) -> str:
    """What it answers, to a line if there is one; empty: it has ended."""
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
        if not found:  # an answer that nobody waited for would be taken for the next
            end(process)
    return found.rstrip("\n")


def end(process: subprocess.Popen[str]) -> None:
    """With what it has forked."""
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
    """Of the process from now on; a signal of either clock ends it."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        pages = int(statm.read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + size,) * 2)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * WALL)


def peak() -> int:
    """Bytes of memory, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
