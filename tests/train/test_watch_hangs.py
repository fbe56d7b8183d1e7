"""A rank that hangs is named, in one sentence, by the others: who, where, and in which collective they wait for it."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from lmworks.parallel import world
from lmworks.parallel.local_ranks import RankFailed, init_gloo_group, on_ranks
from lmworks.parallel.mesh import Mesh
from lmworks.parallel.store_mailbox import StoreMailbox
from lmworks.parallel.world import init_distributed, root_cause
from lmworks.plan.memory import host
from lmworks.record import RunFolder, phase
from lmworks.record.hang import read_reports
from lmworks.spec import ParallelSpec, WatchSpec
from lmworks.train.watch import run_watchdog
from tiny import events

TIMEOUT_S = 2.0
NO_HANG_S = 60.0  # where all comes in time, if on a busy machine not in two seconds
Fault = Callable[[int, Mesh], None]


def take_steps(rank: int, run: Path, layout: dict[str, int], fault: Fault, timeout_s: float = TIMEOUT_S) -> str:
    """Steps as a trainer takes them, as far as a watchdog can see; the fault comes in the forward pass of step 3."""
    mesh = init_distributed(ParallelSpec(**layout), torch.device("cpu"), timeout_s)
    assert mesh is not None
    with run_watchdog(WatchSpec(timeout_s=timeout_s), RunFolder(run), 0, mesh) as watchdog:
        try:
            for step in range(1, 6):
                phase.enter("forward", step)
                if step == 3:
                    fault(rank, mesh)
                phase.enter("backward")
                dist.all_reduce(torch.ones(8), group=mesh.group("dp"))
                phase.enter("reduce")
                dist.all_reduce(torch.ones(4))
        except Exception as error:
            return str(root_cause(error, watchdog))
    return "done"


def hang(tmp_path: Path, fault: Fault, **layout: int) -> dict[str, Any]:
    """The verdict; no rank outlives it."""
    with pytest.raises(RankFailed, match="died without an error message"):
        on_ranks(ParallelSpec(**layout).world, take_steps, tmp_path, layout, fault, timeout=60)
    (event,) = events(tmp_path, "hang")
    (fail,) = events(tmp_path, "fail")
    verdict: dict[str, Any] = json.loads((tmp_path / event["reports"] / "verdict.json").read_text())
    assert event["ranks"] == verdict["ranks"] and event["cause"] == verdict["kind"]
    assert fail["error"] == f"a collective took more than 2 s: {verdict['text']}"
    return verdict


def stop_itself(rank: int, mesh: Mesh) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def stop_the_store(rank: int, mesh: Mesh) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    board = StoreMailbox("test", rank, 2)
    for number in range(2**30):
        board.put(number, "")


def sleep_in_forward(rank: int, mesh: Mesh) -> None:
    if rank == 2:
        threading.Event().wait()


def gather_instead(rank: int, mesh: Mesh) -> None:
    if rank == 1:
        dist.all_gather_into_tensor(torch.zeros(8 * mesh.size("dp")), torch.ones(8), group=mesh.group("dp"))


def never_send(rank: int, mesh: Mesh) -> None:
    if rank == 0:
        dist.recv(torch.ones(4), src=1)
    threading.Event().wait()


def test_stopped_rank_is_named_by_process_state(tmp_path: Path) -> None:
    verdict = hang(tmp_path, stop_itself, dp=2)
    assert verdict["text"] == (
        "rank 0 waits in all_reduce #7 of group world (backward of step 3); rank 1 is stopped "
        "(by SIGSTOP or a debugger), last seen in forward of step 3: rank 1 is the cause"
    )
    assert (verdict["kind"], verdict["ranks"]) == ("stopped", [1])


def test_rank_waiting_for_stopped_store_is_detected(tmp_path: Path) -> None:
    verdict = hang(tmp_path, stop_the_store, dp=2)
    assert (verdict["kind"], verdict["ranks"]) == ("stopped", [0])


def test_late_rank_is_found_across_groups(tmp_path: Path) -> None:
    """Of dp=2 × tp=2, rank 0 waits for rank 2, and ranks 1 and 3, done with their own group, wait for those two."""
    verdict = hang(tmp_path, sleep_in_forward, dp=2, tp=2)
    waiting = verdict["text"].split("; ")
    assert "rank 0 waits in all_reduce #3 of group dp (ranks 0, 2) (backward of step 3)" in waiting
    assert any(part.startswith("ranks 1, 3 wait in all_reduce #") and "group world" in part for part in waiting)
    assert waiting[-1] == "rank 2 is in forward of step 3 and never came: rank 2 is the cause"
    reports = read_reports(tmp_path / "hangs" / "attempt-0")
    assert set(reports) == {0, 1, 2, 3}
    assert "sleep_in_forward" in reports[2].stacks and "take_steps" in reports[0].stacks


def test_mismatched_collective_is_named(tmp_path: Path) -> None:
    def both(rank: int) -> str:
        return take_steps(rank, tmp_path, {"dp": 3}, gather_instead)

    try:
        said = on_ranks(3, both, timeout=60)
    except RankFailed:  # gloo may find that the sizes do not fit, or wait
        said = [event["error"] for event in events(tmp_path, "fail")]
    assert said
    assert all("rank 1 entered all_gather where the others entered all_reduce" in text for text in said), said


def test_missing_send_is_detected(tmp_path: Path) -> None:
    verdict = hang(tmp_path, never_send, dp=2)
    assert "rank 0 waits in a message to or from a neighbour (forward of step 3)" in verdict["text"]
    assert verdict["text"].endswith("rank 1 is in forward of step 3 and never came: rank 1 is the cause")


def die(rank: int, mesh: Mesh) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


LOST = "rank 1 is gone: its process has ended, last seen in forward of step 3: rank 1 is the cause"


def lose_rank_1(run: Path, fault: Fault) -> str:
    """What rank 0 says of it."""
    said = run / "said"

    def on_two(server: socket.socket, rank: int) -> None:
        init_gloo_group(server, 2, rank)
        said.write_text(take_steps(rank, run, {"dp": 2}, fault, NO_HANG_S))

    context = mp.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as server:
        ranks = [context.Process(target=on_two, args=(server, rank), daemon=True) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL]
    return said.read_text()


def test_dead_rank_is_named_at_once(tmp_path: Path) -> None:
    """Its neighbour finds the connection closed, and looks at the processes; no alarm is raised, no hang recorded."""
    assert lose_rank_1(tmp_path, die) == f"{LOST}; the run can be resumed"
    assert not (tmp_path / "hangs").exists()


def test_oom_killed_rank_is_named_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter of the control group, here a file of ours, has grown since the watchdog was started."""
    monkeypatch.setattr(host, "PROC", tmp_path)
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 3\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/\n")

    def die_of_oom(rank: int, mesh: Mesh) -> None:
        if rank == 1:
            counter.write_text("oom_kill 4\n")
        die(rank, mesh)

    assert lose_rank_1(tmp_path, die_of_oom) == (
        f"{LOST}; it probably ran out of memory: the kernel's OOM killer ended a process here meanwhile; "
        "the run can be resumed"
    )


class Pausing:
    """A clock, of a machine that stands still for ten seconds whenever somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 10


def test_watchdog_rechecks_after_suspend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends closes its connections first, and is gone a moment later."""
    monkeypatch.setattr(world, "time", Pausing())
    seen = iter([None, "rank 1 is gone"])
    monitor = SimpleNamespace(dead_ranks=lambda: next(seen))
    assert world.wait_for_error(dist.HashStore(), monitor) == world.RankError("rank 1 is gone", 1, world.UNKNOWN_RANK)
    assert world.wait_for_error(dist.HashStore(), None) is None


def test_finished_run_leaves_no_heartbeats(tmp_path: Path) -> None:
    assert on_ranks(2, take_steps, tmp_path, {"dp": 2}, lambda rank, mesh: None, NO_HANG_S) == ["done", "done"]
    assert not list(tmp_path.iterdir())


def test_no_deprecated_function_sets_the_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A FutureWarning of every rank, where PyTorch has `set_timeout`."""
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(dist.distributed_c10d, "_pg_map", {"group": None})
    monkeypatch.setattr(dist, "set_timeout", lambda *arguments: seen.append(arguments), raising=False)
    world.set_group_timeouts(timedelta(seconds=3))
    assert seen == [(timedelta(seconds=3), "group")]


def limits(rank: int) -> set[int]:
    """Of collectives in the groups of every axis, in milliseconds, as PyTorch has them on record."""
    mesh = init_distributed(ParallelSpec(dp=2, tp=2), torch.device("cpu"), timeout_s=10)
    assert mesh is not None
    for axis in ("world", "dp", "tp"):
        dist.all_reduce(torch.ones(1), group=mesh.group(axis))
    trace = json.loads(c10d._dump_fr_trace_json(includeCollectives=True))  # type: ignore[attr-defined]
    return {entry["timeout_ms"] for entry in trace["entries"][-3:]}


def test_subgroup_timeouts_equal_world_timeout() -> None:
    assert on_ranks(4, limits) == [{30_000}] * 4
