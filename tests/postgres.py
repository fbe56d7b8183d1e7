"""A real PostgreSQL server on a free port of this machine, in a folder of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

USER = "postgres"  # the server refuses to run as root; Debian's package makes this user


def program(name: str) -> str | None:
    """Debian keeps the programs of each version in a folder that is not on the PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return shutil.which(name) or next((str(one / name) for one in folders if (one / name).exists()), None)


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of an empty database."""
    initdb, server = program("initdb"), program("postgres")
    if not initdb or not server:
        pytest.skip("needs PostgreSQL (Debian: apt-get install postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="lmworks-postgres-"))
    user = USER if os.getuid() == 0 else None
    if user:
        shutil.chown(folder, user)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [initdb, "-D", str(folder / "data"), "-A", "trust", "-U", "lmworks", "--no-sync", "-E", "UTF8"]
    subprocess.run(words, user=user, check=True, capture_output=True, cwd=folder)
    settings = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": "", "fsync": "off"}
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [server, "-D", str(folder / "data"), *options], user=user, cwd=folder, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 60
        while "ready to accept connections" not in (said := (folder / "log").read_text()):
            assert process.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.05)
        yield f"postgresql://lmworks@127.0.0.1:{port}/postgres"
    finally:
        process.send_signal(signal.SIGINT)  # SIGTERM would wait for clients
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
