"""Run an `lmworks` command in a forked process, which can get signals and resource limits.

A fork starts at once: PyTorch is already imported.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import lmworks.cli.main  # noqa: F401  # which else every forked process would load
from lmworks.__main__ import command


class Forked:
    """`lmworks …arguments` in a session of its own, or another `program` with them; `first` is called there before it.
    Used as a `Popen`.
    """

    def __init__(
        self,
        *arguments: str | Path,
        first: Callable[[], object] = lambda: None,
        program: Callable[[], object] = command,
    ) -> None:
        self.files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115  # standard output and error
        argv = ["lmworks", *map(str, arguments)]
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=be_command, args=(argv, self.files, first, program))
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid
        atexit.register(self.process.kill)  # else the one that a failed test left behind is waited for

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def communicate(self, timeout: float = 60) -> tuple[str, str]:
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"still there after {timeout:g} s"
        out, err = (file.seek(0) or file.read() for file in self.files)
        return out, err


def be_command(
    argv: list[str], files: list[IO[str]], first: Callable[[], object], program: Callable[[], object]
) -> None:
    os.setsid()
    for descriptor, file in enumerate(files, 1):
        os.dup2(file.fileno(), descriptor)
    sys.argv, sys.stdout, sys.stderr = argv, os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    first()
    program()
