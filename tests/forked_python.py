"""`python -m module …`, `python -c code …` and `python file …` as forks of this process, which has PyTorch imported:
0.1 s instead of 6.

Some tests still start real ones: that a module imports all it needs is not seen here.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import subprocess
import sys
import traceback
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

NEW = "lmworks.engine.grammars.grammar_sandbox"  # it limits its memory, of which a fork has more


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A `Popen` that forks where this interpreter would be started anew."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, *rest: Any) -> None:  # fmt: skip
        words = [args] if isinstance(args, str) else [str(word) for word in args]
        program = [word for word in words[1:2] if word != "-u"] + words[2:]
        if (
            words[0] != sys.executable
            or NEW in program
            or (program[0].startswith("-") and program[0] not in ("-m", "-c"))
        ):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)  # type: ignore[misc]
            return
        pipes, start_new_session = rest[3:9], rest[-2]
        begins, begun = os.pipe()
        pid = os.fork()
        if pid == 0:
            run_program(program, (pipes[0], pipes[3], pipes[5]), pass_fds, cwd, env, start_new_session)
        os.close(begun)
        os.read(begins, 1)  # until the child has let go of it: then its session is its own, and can be signalled
        os.close(begins)
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def fork_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", ForkedPopen)
    monkeypatch.setattr(subprocess_handler, "Popen", ForkedPopen)


def run_program(words: list[str], files: tuple[int, int, int], kept: Any, cwd: Any, env: Any, session: bool) -> None:
    """In the forked process, which ends here. Its program finds what a new one would: arguments, files, signals."""
    code = 255
    try:
        if session:
            os.setsid()
        for number, descriptor in enumerate(files):
            if descriptor not in (-1, number):
                os.dup2(descriptor, number)
        # Closed, their numbers would be given out again, and objects of this process that still have them would close
        # the files of others when they are collected.
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in kept:
                os.dup2(nothing, descriptor)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        if cwd is not None:
            os.chdir(cwd)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        asyncio.set_event_loop_policy(None)  # an event loop of this process has lost its files
        # They stay open when these objects are replaced, in a fork of this fork.
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, mode, 1 if number == 2 else -1, closefd=False) for number, mode in enumerate("rww")
        )
        code = exit_code(words)
    finally:
        for file in (sys.stdout, sys.stderr):
            file.flush()
        os._exit(code)


def exit_code(words: list[str]) -> int:
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            package = hasattr(sys.modules.get(words[1]), "__path__")
            sys.modules.pop(words[1] + ".__main__" * package, None)  # else runpy warns that it runs a second time
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
