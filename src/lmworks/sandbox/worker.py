"""The caller's end of one supervisor."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path

from .confine import Isolation, interpreter
from .limits import Limits
from .program import Program, SandboxError, SandboxResult
from .python_program import MAIN
from .supervisor import receive, send

HERE = Path(__file__).parent
# Both packages without their __init__, which loads what the caller needs: a supervisor has to start quickly.
START = f"""
import sys, types
for name, path in (("lmworks", {str(HERE.parent)!r}), ("lmworks.sandbox", {str(HERE)!r})):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from lmworks.sandbox.supervisor import main
main()
"""
GRACE_S = 60.0  # beyond a program's wall seconds, on a busy machine


class Worker:
    def __init__(self, isolation: Isolation) -> None:
        self.channel, theirs = socket.socketpair()
        how = json.dumps(asdict(isolation))
        with theirs:
            self.process = subprocess.Popen(
                [interpreter(), "-S", "-c", START, str(theirs.fileno()), str(os.getpid()), how],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={
                    "LANG": "C.UTF-8",
                    "PYTHONHASHSEED": "0",
                    "MALLOC_ARENA_MAX": "1",
                    "TMPDIR": tempfile.gettempdir(),
                },
                cwd="/",
                start_new_session=True,  # Ctrl-C is for the caller
            )

    def run(self, program: Program, limits: Limits) -> SandboxResult:
        """SandboxError: the program could not be started, or the supervisor is gone; it is not used again then."""
        files = {name: text.encode(errors="replace") for name, text in program.files.items()}
        stdin = program.stdin.encode(errors="replace") if isinstance(program.stdin, str) else program.stdin
        if isinstance(program.code, str):
            files[MAIN] = program.code.encode(errors="replace")
        job = {
            "code": program.code if isinstance(program.code, str) else list(program.code),
            "stdin": base64.b64encode(stdin).decode(),
            "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
            "limits": asdict(limits),
        }
        self.channel.settimeout(limits.wall_seconds + GRACE_S)
        try:
            send(self.channel, job)
            answer = receive(self.channel)
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            answer = None
        if answer is None:
            self.close()
            raise SandboxError(f"the supervisor of the sandbox was lost (exit code {self.process.returncode})")
        if "error" in answer:
            raise SandboxError(answer["error"])
        streams = {name: base64.b64decode(answer[name]) for name in ("stdout", "stderr")}
        return SandboxResult(**{**answer, **streams})

    def close(self) -> None:
        self.channel.close()  # it ends by itself, with what runs in it
        try:
            self.process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
