"""A real Redis or Valkey server on a free port of this machine, without a file."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from contextlib import suppress

import pytest


class RedisProcess:
    def __init__(self) -> None:
        self.program = shutil.which("valkey-server") or shutil.which("redis-server")
        if self.program is None:
            pytest.skip("needs Redis or Valkey (Debian: apt-get install redis-server)")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        words = [str(self.program), "--port", str(self.port), "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as there:
                there.sendall(b"PING\r\n")
                if there.recv(16) == b"+PONG\r\n":
                    return
            time.sleep(0.02)
        raise TimeoutError("Redis did not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
