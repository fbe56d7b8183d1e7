"""One file for Perfetto: ranks are processes, and the tracks say what the JSON of the command says."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from typed import lmworks

DATA = Path(__file__).parent / "data"


def written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *names: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The command's JSON, and the events of the file."""
    path = tmp_path / "new" / "job.json.gz"
    files = [str(DATA / f"{name}.json.gz") for name in names]
    code, out, err = lmworks(capsys, "profile", "trace", *files, "--perfetto", str(path), "--json")
    assert code == 0, err
    return json.loads(out), json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def tracks(events: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(process, thread) → its slices, as Perfetto names them."""
    meta = [event for event in events if event["ph"] == "M"]
    processes = {one["pid"]: one["args"]["name"] for one in meta if one["name"] == "process_name"}
    threads = {(one["pid"], one["tid"]): one["args"]["name"] for one in meta if one["name"] == "thread_name"}
    found: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[processes[event["pid"]], threads[event["pid"], event["tid"]]].append(event)
    return found


def test_steps_activity_and_verdict_are_those_of_the_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    facts, events = written(capsys, tmp_path, "fsdp2_gloo_rank0", "fsdp2_gloo_rank1")
    found = tracks(events)
    for row in facts["steps"]:
        process = f"rank {row['rank']}, cpu"
        (step,) = found[process, "steps"]
        assert step["name"] == f"step {row['step']}" and step["args"]["compute_s"] == row["compute_s"]
        assert step["dur"] / 1e6 == pytest.approx(row["seconds"])
        sums: defaultdict[str, float] = defaultdict(float)
        for part in found[process, "activity"]:
            sums[part["name"]] += part["dur"] / 1e6
        assert sums["compute"] == pytest.approx(row["compute_s"])
        assert sums["exposed communication"] == pytest.approx(row["exposed_comm_s"])
        assert sums["idle"] == pytest.approx(row["idle_s"])
    (verdict,) = found["LMWorks", "verdict"]
    assert verdict["name"].split()[0] == facts["verdict"] and verdict["args"]["evidence"] == facts["evidence"]
    assert sum(len(own) for (_, name), own in found.items() if name.startswith("thread")) == 2 * 2665


def test_slices_of_a_track_nest_and_launches_point_to_kernels(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Perfetto drops slices that overlap without one holding the other."""
    _, events = written(capsys, tmp_path, "ddp_nccl")
    for where, own in tracks(events).items():
        ends: list[float] = []
        for one in sorted(own, key=lambda one: (one["ts"], -one["dur"])):
            while ends and ends[-1] <= one["ts"] + 1e-3:
                ends.pop()
            assert not ends or one["ts"] + one["dur"] <= ends[-1] + 1e-3, (where, one)
            ends.append(one["ts"] + one["dur"])
    starts = {one["id"]: one for one in events if one["ph"] == "s"}
    finishes = {one["id"]: one for one in events if one["ph"] == "f"}
    assert len(starts) > 1000 and starts.keys() == finishes.keys()
    assert all(starts[key]["ts"] <= finishes[key]["ts"] for key in starts)
    assert min(one["ts"] for one in events if "ts" in one) == 0


def test_a_place_where_it_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trace, place = str(DATA / "event_sync.json.gz"), str(tmp_path / "file" / "job.json")
    code, out, err = lmworks(capsys, "profile", "trace", trace, "--perfetto", place)
    assert code == 2 and "verdict:" in out and err.count("\n") == 1 and f"--perfetto {place}" in err
