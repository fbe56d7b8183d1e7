"""Claims: one owner, freed by the kernel when the last process that has it is gone; leases of other machines."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmworks.record import claims
from lmworks.record.claims import Claim, is_held
from lmworks.record.heartbeat import own_heartbeat

FORK = multiprocessing.get_context("fork")


def hold(folder: Path, ready: object, child: bool) -> None:
    claim = Claim.take(folder)
    assert claim is not None
    pid = os.fork() if child else 0
    if child and not pid:
        time.sleep(60)
    ready.send(pid)  # type: ignore[attr-defined]
    time.sleep(60)


def owner(folder: Path, child: bool = False) -> tuple[int, int]:
    """A process that has the claim, and the trial that it started."""
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=hold, args=(folder, there, child), daemon=True)
    process.start()
    assert process.pid is not None and here.poll(20)
    return process.pid, here.recv()


def test_one_at_a_time(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    claim = Claim.take(tmp_path)
    assert claim is not None and is_held(tmp_path) and Claim.take(tmp_path) is None
    assert claim.renew()
    claim.release()
    assert not is_held(tmp_path)
    again = Claim.take(tmp_path)
    assert again is not None
    again.release()


def test_a_killed_owner_frees_it_at_once(tmp_path: Path) -> None:
    pid, _ = owner(tmp_path)
    assert Claim.take(tmp_path) is None and is_held(tmp_path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    claim = Claim.take(tmp_path)
    assert claim is not None
    claim.release()


def test_the_trial_of_a_killed_worker_keeps_the_claim_until_it_ends(tmp_path: Path) -> None:
    worker, trial = owner(tmp_path, child=True)
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    assert is_held(tmp_path) and Claim.take(tmp_path) is None
    os.kill(trial, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while (claim := Claim.take(tmp_path)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert claim is not None
    claim.release()


def test_a_look_does_not_refuse_who_can_wait_a_moment(tmp_path: Path) -> None:
    (tmp_path / "claim").touch()
    look = os.open(tmp_path / "claim", os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)  # as `is_held` does
    assert Claim.take(tmp_path) is None
    threading.Timer(0.1, os.close, [look]).start()
    claim = Claim.take_soon(tmp_path)
    assert claim is not None
    assert Claim.take_soon(tmp_path) is None
    claim.release()


def of_another_machine(folder: Path, age_s: float) -> None:
    """As a machine leaves it whose locks are not seen here."""
    name = {**json.loads(own_heartbeat(0).first()), "host": "another", "token": "theirs"}
    (folder / "claim").write_text(json.dumps(name))
    then = time.time() - age_s
    os.utime(folder / "claim", (then, then))


def test_a_lease_of_another_machine_counts_until_it_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "SETTLE_S", 0.05)
    of_another_machine(tmp_path, age_s=60)
    assert is_held(tmp_path) and Claim.take(tmp_path) is None
    of_another_machine(tmp_path, age_s=200)
    assert not is_held(tmp_path)
    claim = Claim.take(tmp_path)
    assert claim is not None and is_held(tmp_path)
    of_another_machine(tmp_path, age_s=0)  # it was only slow, and has taken its claim back
    monkeypatch.setattr(claims, "RENEW_S", 0.0)
    assert not claim.renew()
    claim.release()
    assert json.loads((tmp_path / "claim").read_text())["token"] == "theirs"


def test_of_two_machines_that_find_a_void_claim_one_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_another_machine(tmp_path, age_s=200)
    clock = {**vars(time), "sleep": lambda _: of_another_machine(tmp_path, age_s=0)}
    monkeypatch.setattr(claims, "time", SimpleNamespace(**clock))  # of this module alone
    assert Claim.take(tmp_path) is None


def test_without_locks_the_named_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "SETTLE_S", 0.0)
    monkeypatch.setattr(claims, "try_lock", lambda *_: None)
    claim = Claim.take(tmp_path)
    assert claim is not None and Claim.take(tmp_path) is None and is_held(tmp_path)
    claim.release()
    process = FORK.Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    name = {**json.loads(own_heartbeat(0).first()), "pid": process.pid, "host": socket.gethostname(), "token": "its"}
    name["started"] = claims.read_owner(name).started
    (tmp_path / "claim").write_text(json.dumps(name | {"started": -1}))  # another process had that pid
    assert not is_held(tmp_path)
    process.kill()


def test_renewing_keeps_the_time_of_the_file_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "RENEW_S", 0.02)
    claim = Claim.take(tmp_path)
    assert claim is not None
    os.utime(tmp_path / "claim", (0, 0))
    with claim.renewing():
        deadline = time.monotonic() + 10
        while (tmp_path / "claim").stat().st_mtime < 1 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert (tmp_path / "claim").stat().st_mtime > 1
    claim.release()
