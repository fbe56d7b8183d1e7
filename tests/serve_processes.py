"""Real servers of a tiny model: `lmworks serve`'s API and engine in forks of their own, killed with SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from forked_python import fork_programs

TINY = (
    *("engine.device=cpu", "engine.dtype=fp32", "engine.block=16", "engine.blocks=256", "engine.context=512"),
    *("engine.max_seqs=16", "engine.max_batch_tokens=256"),
)


@dataclass
class ServeProcess:
    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """kill -9 of the API and of its engine's process, which are one group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait_ready(self, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, "the server ended"
            try:
                with urllib.request.urlopen(self.url.removesuffix("/v1") + "/ready", timeout=2) as answer:
                    assert json.load(answer)["status"] == "ok"
                    return
            except OSError:
                time.sleep(0.05)
        raise TimeoutError("the server was not ready in time")


def start_server(model: Path, template: Path, log: Path, *options: str) -> ServeProcess:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        "-m",
        "lmworks",
        "serve",
        f"tiny={model}",
        "--port",
        str(port),
        "--chat-template",
        str(template),
        *TINY,
        *options,
    ]
    with log.open("wb") as written, pytest.MonkeyPatch.context() as patch:
        fork_programs(patch)
        process = subprocess.Popen(
            [sys.executable, *words],
            stderr=written,
            stdout=written,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    return ServeProcess(f"http://127.0.0.1:{port}/v1", process)
