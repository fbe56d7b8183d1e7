"""What a drill's fleet stands on, where it needs more than processes: certificates, Redis, a small disk, a clock."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from ..spec import LMWorksError
from .leftovers import disk_name, environment

DISK_BYTES = 2 * 2**20
FILLER = "filler"


def run(*words: str) -> None:
    ended = subprocess.run(words, capture_output=True, text=True, env=environment(), check=False)
    if ended.returncode:
        raise LMWorksError(f"{words[0]} failed: {ended.stderr.strip()[-300:]}")


def needed(program: str, package: str) -> None:
    if shutil.which(program) is None:
        raise LMWorksError(f"this drill needs {program}: apt-get install {package}")


def write_authority(folder: Path) -> Path:
    """An authority of this drill's own; its certificate."""
    needed("openssl", "openssl")
    if not (folder / "ca.pem").exists():
        key, made = str(folder / "ca.key"), str(folder / "ca.pem")
        run("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-days", "30", "-subj", "/CN=drill", "-keyout", key, "-out", made)  # fmt: skip
    return folder / "ca.pem"


def write_certificate(folder: Path, name: str, days: int) -> None:
    """Of one server on this machine. `days` below 0: it has ended."""
    key, request, new = (str(folder / f"{name}.{end}") for end in ("key", "csr", "pem.new"))
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    if not Path(key).exists():
        run("openssl", "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-subj", "/CN=localhost", "-addext", names, "-keyout", key, "-out", request)  # fmt: skip
    run("openssl", "x509", "-req", "-days", str(days), "-in", request, "-CA", str(folder / "ca.pem"), "-CAkey",
        str(folder / "ca.key"), "-CAcreateserial", "-copy_extensions", "copy", "-out", new)  # fmt: skip
    Path(new).replace(folder / f"{name}.pem")


def start_redis(folder: Path, port: int) -> None:
    """As its configuration file says, which the runbook's command starts again."""
    needed("redis-server", "redis-server")
    (folder / "redis.conf").write_text(
        f"port {port}\nbind 127.0.0.1\ndaemonize yes\nsave \"\"\ndir {folder}\npidfile {folder}/redis.pid\n"
        f"logfile {folder}/redis.log\nset-proc-title no\n", encoding="utf-8",
    )  # fmt: skip
    run("redis-server", str(folder / "redis.conf"))
    end = time.monotonic() + 10
    while not (folder / "redis.pid").exists() and time.monotonic() < end:
        time.sleep(0.05)


def redis_pid(folder: Path) -> int:
    return int((folder / "redis.pid").read_text(encoding="utf-8"))


def stop_redis(folder: Path) -> None:
    with suppress(OSError, ValueError):
        os.kill(redis_pid(folder), signal.SIGKILL)


def mount_disk(path: Path) -> None:
    """A disk of 2 MiB in memory: needs the right to mount."""
    path.mkdir(parents=True, exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", disk_name(), str(path))


def unmount_disk(path: Path) -> None:
    if path.is_mount():
        subprocess.run(["umount", "--lazy", str(path)], capture_output=True, check=False)


def fill_disk(path: Path) -> None:
    with suppress(OSError), (path / FILLER).open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()


def preloaded(folder: Path, name: str) -> Path:
    """A library for LD_PRELOAD, compiled here: `clock_skew`, `allocation_limit`."""
    needed("cc", "gcc")
    source, library = folder / f"{name}.c", folder / f"{name}.so"
    source.write_text((files(__package__) / f"{name}.c").read_text(encoding="utf-8"), encoding="utf-8")
    run("cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl")
    return library
