"""Verdicts from reports: who is the cause where ranks of several groups wait for one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmworks.record.hang import Call, Group, Report, Verdict, attempts, find_cause, read_reports
from lmworks.record.heartbeat import Heartbeat, read_heartbeats

ALL = Group("world", (0, 1, 2, 3))
GROUPS = {"gloo:0": ALL, "gloo:1": Group("dp", (0, 2)), "gloo:2": Group("dp", (1, 3)), "gloo:3": Group("pp", (0, 1))}


def call(number: int, group: str = "gloo:0", op: str = "all_reduce", **fields: Any) -> Call:
    return Call(group, op, number, **{"elements": 8, "dtype": "float", "done": False, "age_s": 3.0, **fields})


def done(number: int, group: str = "gloo:0", **fields: Any) -> Call:
    return call(number, group, done=True, **fields)


def report(rank: int, *calls: Call, phase: str = "backward", waits: bool = False, **states: str) -> Report:
    seen = {int(name.removeprefix("rank_")): state for name, state in states.items()}
    return Report(rank, "a", 100 + rank, phase, 17, waits, calls, GROUPS, seen, "stacks")


def verdict(*reports: Report, world: int = 4, beats: dict[int, Heartbeat] | None = None) -> Verdict:
    return find_cause(world, {one.rank: one for one in reports}, beats or {})


def test_late_rank() -> None:
    waiting = [report(rank, done(411), call(412)) for rank in (0, 1, 3)]
    found = verdict(*waiting, report(2, done(411), phase="forward"))
    assert (found.kind, found.ranks) == ("late", (2,))
    assert found.text == (
        "ranks 0, 1, 3 wait in all_reduce #412 of group world (backward of step 17); "
        "rank 2 is in forward of step 17 and never came: rank 2 is the cause"
    )


def test_cause_is_followed_across_groups() -> None:
    found = verdict(
        report(0, call(5, "gloo:1")),  # waits for 2
        report(1, done(7, "gloo:2"), call(9)),  # waits for 0 and 2
        report(2, phase="data"),
        report(3, done(7, "gloo:2"), call(9)),
    )
    assert (found.kind, found.ranks) == ("late", (2,))
    assert "rank 0 waits in all_reduce #5 of group dp (ranks 0, 2)" in found.text


def test_mismatch_of_op_size_or_dtype() -> None:
    others = [report(rank, call(4)) for rank in (0, 2, 3)]
    cases = {
        "rank 1 entered all_gather where the others entered all_reduce": call(4, op="all_gather"),
        "rank 1 entered all_reduce with 9 elements where the others have 8 elements": call(4, elements=9),
        "rank 1 entered all_reduce with half where the others have float": call(4, dtype="half"),
    }
    for text, odd in cases.items():
        found = verdict(*others, report(1, odd))
        assert (found.kind, found.ranks) == ("mismatch", (1,))
        assert found.text == f"{text} (#4 of group world, in backward of step 17): rank 1 is the cause"


def test_two_rank_mismatch_has_no_single_cause() -> None:
    """Nobody is there to say which of them is right."""
    cases = {
        "rank 0 entered all_gather and rank 1 entered all_reduce": call(4, op="all_gather"),
        "rank 0 entered all_reduce with 9 elements and rank 1 entered all_reduce with 8 elements": call(4, elements=9),
    }
    for text, odd in cases.items():
        found = verdict(report(0, odd), report(1, call(4)))
        assert (found.kind, found.ranks) == ("mismatch", (0, 1))
        assert found.text == f"{text} (#4 of group world, in backward of step 17): either may be the cause"


def test_earliest_mismatch_is_reported() -> None:
    """What follows a mismatch is often its consequence."""
    found = verdict(
        report(0, call(9), call(4, "gloo:3")),
        report(1, call(9, elements=9), call(4, "gloo:3", op="all_gather")),
        report(2, call(9)),
    )
    assert (found.kind, found.ranks) == ("mismatch", (0, 1))
    assert "(#4 of group pp (ranks 0, 1)," in found.text


def test_uneven_all_to_all_is_no_mismatch() -> None:
    found = verdict(*(report(rank, call(4, op="all_to_all", elements=rank)) for rank in range(4)))
    assert found.kind == "stuck" and "look at the network" in found.text


@pytest.mark.parametrize(
    ("state", "kind", "text"),
    [
        ("stopped", "stopped", "rank 3 is stopped (by SIGSTOP or a debugger), last seen in optimizer of step 16"),
        ("gone", "gone", "rank 3 is gone: its process has ended, last seen in optimizer of step 16"),
        ("running", "silent", "rank 3 is alive but does not answer, last seen in optimizer of step 16"),
        ("unknown", "silent", "rank 3 does not answer, and neither does its host, last seen in optimizer of step 16"),
    ],
)
def test_silent_rank_is_classified_by_process_state(state: str, kind: str, text: str) -> None:
    beat = Heartbeat(3, "b", 7, 1, 0.0, "optimizer", 16)
    found = verdict(*(report(rank, call(4), rank_3=state) for rank in range(3)), beats={3: beat})
    assert (found.kind, found.ranks) == (kind, (3,))
    assert found.text.endswith(f"; {text}: rank 3 is the cause")


def test_known_states_override_unknown() -> None:
    found = verdict(report(0, call(4), rank_3="stopped"), report(1, call(4), rank_3="unknown"), report(2, call(4)))
    assert found.kind == "stopped"


def test_missing_sender_is_cause() -> None:
    recv = call(1, op="recv 1<-2", peer=2)
    found = verdict(report(0, call(9)), report(1, recv), report(2, phase="forward"), report(3, call(9)))
    assert (found.kind, found.ranks) == ("late", (2,))


def test_unrecorded_message_is_to_pipeline_neighbour() -> None:
    found = verdict(report(0, waits=True), report(1, phase="forward"), report(2, call(9)), report(3, call(9)))
    assert (found.kind, found.ranks) == ("late", (1,))
    assert "rank 0 waits in a message to or from a neighbour" in found.text


def test_group_order_deadlock() -> None:
    found = verdict(report(0, call(5)), report(1, call(2, "gloo:3")), world=2)
    assert (found.kind, found.ranks) == ("circle", (0, 1))


def test_reports_and_heartbeats_round_trip(tmp_path: Path) -> None:
    folder = tmp_path / "hangs" / "attempt-12"
    folder.mkdir(parents=True)
    written = report(2, call(3, peer=1), rank_1="gone")
    (folder / "rank-2.json").write_text(written.to_json())
    assert attempts(tmp_path) == {12: folder}
    assert read_reports(folder) == {2: written}
    beat = Heartbeat(2, "b", 7, 1, 12.5, "save.write", 16, attempt=2)
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch" / "rank-2.life").write_bytes(beat.first() + beat.second(12.5, "save.write", 16))
    (tmp_path / "watch" / "rank-3.life").write_bytes(b'{"rank": 3')
    old = Heartbeat(5, "b", 9, 1, 3.0, "data", 4, attempt=0)
    (tmp_path / "watch" / "rank-5.life").write_bytes(old.first() + old.second(3.0, "data", 4))
    assert read_heartbeats(tmp_path) == {2: beat}  # of an attempt with more ranks, say
    assert read_heartbeats(tmp_path, 0) == {5: old}
