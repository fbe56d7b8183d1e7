"""`lmworks fleet up` for a benchmark: servers and gateway as processes of this machine, waited for and ended."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.fleet.up import ready
from lmworks.spec import dump_toml

MODEL = "served"  # what the servers call it
PATIENCE_S = 180.0


@dataclass(frozen=True)
class LocalFleet:
    gateway: str
    servers: tuple[str, ...]

    def forget_prefixes(self) -> None:
        for server in self.servers:
            with urllib.request.urlopen(urllib.request.Request(f"{server}/reset_prefix_cache", method="POST")):
                pass


@contextmanager
def fleet_up(
    source: str,
    servers: int,
    options: Sequence[str],
    gateway: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    port: int = 8700,
) -> Iterator[LocalFleet]:
    """`gateway`: sections of its file."""
    model = {"name": MODEL, "source": source, "servers": servers, "options": list(options)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = {"name": "benchmark", "port": port, "models": [model], "gateway": dict(gateway)}
        (folder / "fleet.toml").write_text(dump_toml(table))
        command = ["fleet", "up", str(folder / "fleet.toml"), "--folder", str(folder / "run")]
        process = subprocess.Popen(
            [sys.executable, "-m", "lmworks", *command], env={**os.environ, **(environment or {})},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            urls = [f"http://127.0.0.1:{port + number}" for number in range(servers + 1)]
            await_ready(urls, folder / "run" / "logs")
            yield LocalFleet(urls[0], tuple(urls[1:]))
        finally:
            process.terminate()
            process.wait(120)


def await_ready(urls: Sequence[str], logs: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while not all(map(ready, urls)):
        if time.monotonic() > end:
            tails = [f"{log.name}:\n{log.read_text()[-1500:]}" for log in sorted(logs.glob("*.log"))]
            raise SystemExit("\n".join(["the fleet did not come up", *tails]))
        time.sleep(0.2)
