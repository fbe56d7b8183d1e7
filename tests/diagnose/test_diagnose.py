"""What is left of a hang can be read later, by people and programs; a run without one is told apart."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.diagnose.hang import diagnose
from lmworks.record import RunFolder
from lmworks.record.hang import Call, Group, Report, find_cause
from lmworks.record.heartbeat import Heartbeat, own_heartbeat
from lmworks.spec import RunSpec, SpecError


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", RunSpec.from_dict({"parallel": {"dp": 2}}))


def hang(run: RunFolder, attempt: int, step: int) -> None:
    """Rank 0 waits; rank 1 left nothing but a sign of life, and stacks at a signal."""
    folder = run.path / "hangs" / f"attempt-{attempt}"
    folder.mkdir(parents=True)
    call = Call("gloo:0", "all_reduce", 8, 4, "float", False, 31.5)
    groups = {"gloo:0": Group("world", (0, 1))}
    report = Report(0, "a", 1, "backward", step, False, (call,), groups, {1: "stopped"}, "File train.py, line 7")
    (folder / "rank-0.json").write_text(report.to_json())
    (folder / "rank-1.stacks").write_text("File model.py, line 9")
    leave_life(run, Heartbeat(1, "a", 2**22 + 1, 1, 1000.0, "forward", step, attempt))
    verdict = find_cause(2, {0: report}, {})
    (folder / "verdict.json").write_text(json.dumps(verdict.to_dict()))


def leave_life(run: RunFolder, beat: Heartbeat) -> None:
    path = run.path / "watch" / f"rank-{beat.rank}.life"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(beat.first() + beat.second(beat.time, beat.phase, beat.step))


def test_the_last_hang_and_any_other_can_be_asked_for(run: RunFolder) -> None:
    hang(run, 0, 5)
    hang(run, 3, 17)
    last = diagnose(run)
    assert last.attempt == 3 and last.verdict is not None and last.verdict.ranks == (1,)
    assert [(one.rank, one.place, one.waits_in, one.for_s) for one in last.ranks] == [
        (0, "backward of step 17", "all_reduce #8 of group world", 31.5),
        (1, "forward of step 17", None, None),
    ]
    assert [one.state for one in last.ranks] == ["reported", "stopped"]  # then, whatever it is now
    assert [one.stacks for one in last.ranks] == ["File train.py, line 7", "File model.py, line 9"]
    assert [one.place for one in diagnose(run, 0).ranks] == ["backward of step 5"]  # rank 1 has moved on since
    with pytest.raises(SpecError, match="no reports of a hang of attempt 1; it has of 0, 3"):
        diagnose(run, 1)


def test_without_a_verdict_one_is_made_from_the_reports(run: RunFolder) -> None:
    hang(run, 0, 5)
    (run.path / "hangs" / "attempt-0" / "verdict.json").unlink()
    found = diagnose(run).verdict
    assert found is not None and found.text.endswith("last seen in forward of step 5: rank 1 is the cause")


def test_of_a_run_without_a_hang_it_tells_where_the_ranks_are(run: RunFolder) -> None:
    assert diagnose(run).ranks == ()
    leave_life(run, own_heartbeat(0))
    (one,) = diagnose(run).ranks
    assert (one.state, one.host, one.waits_in) == ("running", os.uname().nodename, None)


def test_on_the_command_line(run: RunFolder) -> None:
    ask = CliRunner()
    assert "no hang is on record" in ask.invoke(app, ["diagnose", str(run.path)]).output
    hang(run, 0, 17)
    told = ask.invoke(app, ["diagnose", str(run.path), "--stacks"]).output
    assert told.startswith("attempt 0: rank 0 waits in all_reduce #8 of group world (backward of step 17); rank 1 is")
    assert "rank 1\nFile model.py, line 9" in told and "forward of step 17" in told
    data = json.loads(ask.invoke(app, ["diagnose", str(run.path), "--json"]).output)
    assert data["verdict"]["kind"] == "stopped" and data["ranks"][0]["for_s"] == 31.5


def test_a_run_that_was_started_again_tells_what_had_stopped_it(run: RunFolder) -> None:
    hang(run, 0, 17)
    with run.locked():
        leave_life(run, own_heartbeat(0))
        found = diagnose(run)
        told = CliRunner().invoke(app, ["diagnose", str(run.path)]).output
    assert found.verdict is None and found.ranks[0].state == "running"
    assert list(found.earlier) == [0] and "rank 1" in found.earlier[0]
    assert told.startswith("attempt 0 ended so: rank 0 waits in all_reduce #8") and "(more with --attempt 0)" in told
