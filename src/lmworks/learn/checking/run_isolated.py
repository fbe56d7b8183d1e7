"""A function in a process of its own: whatever it does, this process and the files around it stay as they are.

    this process ── supervisor ── the function, and what it starts

The supervisor waits, and ends all that is below it. The function may write in its own folder alone (Landlock, where
the kernel has it). Both are forks: modules that are imported here are there.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...sandbox import landlock, linux
from ...sandbox.processes import descendants, kill_descendants, tasks_of_user

MEMORY_BYTES = 6 << 30  # of address space, beyond what is mapped at the start
FILE_BYTES = 1 << 30
OUTPUT_BYTES = 4000  # of what is printed
PROCESSES = 64  # that run at once: a check on two ranks has ten
TASKS = 16 * PROCESSES  # with their threads: what the kernel stops at before we have counted
COUNT_S = 0.05  # how often processes are counted


@dataclass(frozen=True)
class Outcome:
    result: Any  # None where there is none
    why: str  # "": it returned; else what ended it
    output: str
    seconds: float


def run_isolated(function: Callable[[], Any], folder: Path, seconds: float) -> Outcome:
    """What `function` returns (as JSON takes it), with `folder` as its working directory."""
    began = time.perf_counter()
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    caller, supervisor = os.getpid(), os.fork()
    if not supervisor:
        os.close(read_end)
        supervise(function, folder, seconds, write_end, caller)
    os.close(write_end)
    try:
        with os.fdopen(read_end, "rb") as pipe:
            answer = pipe.read()
    except BaseException:  # Ctrl-C: nothing is left behind
        os.kill(supervisor, signal.SIGTERM)
        raise
    finally:
        os.waitpid(supervisor, 0)
    content: dict[str, Any] = (
        json.loads(answer) if answer else {"result": None, "why": "it killed the process that watches it"}
    )
    seconds = time.perf_counter() - began
    return Outcome(content["result"], content["why"], end_of(folder / "output.txt"), seconds)


def end_of(file: Path) -> str:
    """The last of what was printed."""
    if not file.exists():
        return ""
    with file.open("rb") as printed:
        printed.seek(max(0, file.stat().st_size - OUTPUT_BYTES))
        return printed.read().decode(errors="replace")


def supervise(function: Callable[[], Any], folder: Path, seconds: float, answer: int, caller: int) -> None:
    """When the caller ends, however it does, so does all that is below, and the folder is removed."""
    code = 1

    def end(*_: object) -> None:
        if sys.platform == "linux":
            kill_descendants()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(code)

    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, end)
        os.setsid()
        if sys.platform == "linux":
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != caller:
                end()
        read_end, write_end = os.pipe()
        runner = os.fork()
        if not runner:
            os.close(read_end)
            os.close(answer)
            run_here(function, folder, write_end)
        os.close(write_end)
        content = {"result": None, **wait_for(runner, read_end, seconds)}
        if sys.platform == "linux":
            kill_descendants()
        else:
            os.kill(runner, signal.SIGKILL)
        os.write(answer, json.dumps(content).encode())
        code = 0
    finally:
        os._exit(code)


def wait_for(runner: int, pipe: int, seconds: float) -> dict[str, Any]:
    deadline, received = time.monotonic() + seconds, b""
    while True:
        ready, _, _ = select.select([pipe], [], [], min(COUNT_S, max(0.0, deadline - time.monotonic())))
        if sys.platform == "linux" and len(descendants(os.getpid())) > PROCESSES:
            return {"why": f"it had more than {PROCESSES} processes: is there a fork in a loop?"}
        if not ready and time.monotonic() >= deadline:
            return {"why": f"it did not end within {seconds:.0f} seconds: is there a loop without an end?"}
        if not ready:
            continue
        part = os.read(pipe, 1 << 16)
        received += part
        if b"\n" in received:  # the first line: a fork of the function may come back, too
            return {"why": "", "result": json.loads(received.partition(b"\n")[0])}
        if not part:
            break
    _, status = os.waitpid(runner, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return {"why": f"its process was ended by {name}" + (" (a crash in native code)" if name == "SIGSEGV" else "")}
    return {"why": f"it ended the process, with exit code {os.WEXITSTATUS(status)}"}


def run_here(function: Callable[[], Any], folder: Path, answer: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.disable()  # that of a test or a debugger would speak into the terminal
    os.chdir(folder)
    printed = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    limit(folder)
    code = 1
    try:
        result = json.dumps(function())
        sys.stdout.flush()
        with os.fdopen(answer, "wb") as pipe:
            pipe.write(result.encode() + b"\n")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def lower(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def limit(folder: Path) -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") if (
        sys.platform == "linux") else 0  # fmt: skip
    if mapped:
        # Counted with all other processes of this user: a fence far out; the supervisor counts exactly.
        lower(resource.RLIMIT_NPROC, tasks_of_user(os.getuid()) + TASKS)
        lower(resource.RLIMIT_AS, mapped + MEMORY_BYTES)
    lower(resource.RLIMIT_FSIZE, FILE_BYTES)
    lower(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux" and landlock.version() >= landlock.LEAST_VERSION:
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        landlock.restrict(landlock.make_ruleset(["/"], [str(folder), "/dev", "/proc/self"]))
