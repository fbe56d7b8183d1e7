"""Claims: one process at a time works on a trial or a task, whoever is killed, on whichever machine.

A claim is a kernel lock on the file `claim` of a folder. The kernel releases it when the last process that has the file
open is gone: a worker hands it to the trial that it starts, so a trial whose worker was killed keeps its claim until it
has ended itself. Some file systems have no locks, or locks that other machines do not see. So the owner also writes its
name into the file and renews its time every few seconds: a claim of another machine that was not renewed for `LEASE_S`
is void.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from ..spec import LMWorksError
from .folder import try_lock
from .heartbeat import own_heartbeat, process_state, read_owner

NAME = "claim"
LEASE_S = 120.0  # longer than a network file system caches the time of a file
RENEW_S = 10.0
LOOK_S = 0.4  # longer than a look at a claim takes
SETTLE_S = 2.0  # in which another machine that found the same claim void may have written its name


class Claim:
    """`Claim.take(folder)` until `release`; None where another process has it."""

    def __init__(self, path: Path, descriptor: int, owner: dict[str, Any]) -> None:
        self.path, self.descriptor, self.owner = path, descriptor, owner
        self.renewed = time.monotonic()

    @classmethod
    def take(cls, folder: Path, lease_s: float = LEASE_S) -> Self | None:
        path = folder / NAME
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise LMWorksError(f"cannot claim {folder}: {error.strerror}") from None
        locked = try_lock(descriptor, fcntl.LOCK_EX)
        before = read(descriptor)
        foreign = before.get("host", socket.gethostname()) != socket.gethostname()
        if locked is False or is_valid(before, descriptor, folder, locked is True, lease_s):
            os.close(descriptor)
            return None
        owner = {**json.loads(own_heartbeat(0).first()), "token": uuid.uuid4().hex}
        claim = cls(path, descriptor, owner)
        claim.write(owner)
        if foreign or locked is None:
            time.sleep(SETTLE_S)
            if not claim.is_own():
                os.close(descriptor)
                return None
        return claim

    @classmethod
    def take_soon(cls, folder: Path) -> Self | None:
        """As `take`, but not refused because somebody looks at the claim just now (`is_held`), or is letting it go."""
        deadline = time.monotonic() + LOOK_S
        while (claim := cls.take(folder)) is None and time.monotonic() < deadline:
            time.sleep(LOOK_S / 20)
        return claim

    def write(self, owner: Mapping[str, Any]) -> None:
        text = json.dumps(owner).encode()
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, text, 0)
        os.fsync(self.descriptor)

    def is_own(self) -> bool:
        """Whether no other machine has taken it, after a lease that this process could not renew in time."""
        return bool(read(self.descriptor).get("token") == self.owner["token"])

    def renew(self) -> bool:
        """Called often; false where the claim was lost."""
        if time.monotonic() - self.renewed < RENEW_S:
            return True
        self.renewed = time.monotonic()
        if not self.is_own():
            return False
        os.utime(self.descriptor)
        return True

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """Renewed by a thread: for a process that does other things, and does not fork."""
        done = threading.Event()

        def renew() -> None:
            while not done.wait(RENEW_S / 2):
                self.renew()

        thread = threading.Thread(target=renew, name="lmworks-claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def release(self) -> None:
        if self.is_own():
            self.write({})
        os.close(self.descriptor)


def is_held(folder: Path, lease_s: float = LEASE_S) -> bool:
    """Whether a process, this one too, has the claim of `folder`."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        locked = try_lock(descriptor, fcntl.LOCK_SH)
        return locked is False or is_valid(read(descriptor), descriptor, folder, locked is True, lease_s)
    finally:
        os.close(descriptor)


def is_valid(owner: Mapping[str, Any], descriptor: int, folder: Path, free: bool, lease_s: float) -> bool:
    """Whether the named owner still has the claim, though (`free`) its lock could be taken from this machine."""
    if not owner:
        return False
    if owner.get("host") == socket.gethostname():
        return not free and process_state(read_owner(owner)) != "gone"
    return clock(folder) - os.fstat(descriptor).st_mtime < lease_s


def clock(folder: Path) -> float:
    """The time of the file system, which stamps the files: clocks of machines differ."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as file:
        return os.fstat(file.fileno()).st_mtime


def read(descriptor: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
