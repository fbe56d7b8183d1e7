"""Whether a grammar can be compiled with little work: tried in a process of its own, which may die of it.

llguidance bounds the work of its parser, but not that of making a lexer: `{"multipleOf": 9999991}` takes minutes, and
regexes of a few thousand characters gigabytes. Nobody can interrupt it, and without memory it ends the process. So what
a stranger sends is compiled here first, within SECONDS of processor time and BYTES of memory. Which tokens there are
hardly matters to it: the trial has one for each byte.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..spec import LMWorksError, SpecError

SECONDS, BYTES = 2.0, 2**30
READY, DONE = "ready\n", "done\n"


class Trial:
    """One grammar at a time; safe to call from several threads. The process stays for the next, until it dies."""

    def __init__(self, limits: Mapping[str, Any]) -> None:
        self.limits, self.lock = limits, threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def check(self, grammar: str) -> None:
        """Raises SpecError where it takes too much."""
        with self.lock:
            process = self.running()
            if not told(process, json.dumps(grammar), DONE):
                raise SpecError(
                    "the answer's shape cannot be used: it is too complex (to compile it takes more than "
                    f"{SECONDS:g} s or {BYTES / 2**30:g} GiB)"
                )

    def running(self) -> subprocess.Popen[str]:
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, "-m", __name__, json.dumps(dict(self.limits))]
            pipe = subprocess.PIPE
            # In a session of its own: Ctrl-C is for others. What it says as it dies is for nobody.
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True
            )
            weakref.finalize(self, end, self.process)
            if not told(self.process, None, READY):
                raise LMWorksError(f"the process that tries grammars ended at once: {' '.join(command[:3])}")
        return self.process


def told(process: subprocess.Popen[str], line: str | None, answer: str) -> bool:
    """Whether it answers so, to a line if there is one; else it has ended."""
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
        if found != answer:  # an answer that nobody waited for would be taken for the next
            end(process)
    return found == answer


def end(process: subprocess.Popen[str]) -> None:
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
    size = Path("/proc/self/statm")
    if size.exists():
        pages = int(size.read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES,) * 2)
    print(READY, end="", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # whose signal ends a process
        llguidance.LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(DONE, end="", flush=True)


if __name__ == "__main__":
    main()
