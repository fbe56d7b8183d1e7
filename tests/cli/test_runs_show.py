"""`lmworks runs show`: what a person, a program and a slide get of one run."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import typed
from lmworks.record import MetricsWriter, RunFolder
from lmworks.record.jsonl import LineWriter
from lmworks.spec import RunSpec

Lmworks = Callable[..., tuple[int, str, str]]
ZERO = datetime(2026, 11, 15, 12, tzinfo=UTC)


@pytest.fixture
def lmworks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lmworks:
    monkeypatch.chdir(tmp_path)
    return lambda *words: typed.lmworks(capsys, *words)


@pytest.fixture
def killed(tmp_path: Path) -> RunFolder:
    """Steps of 1 s; a save of 0.5 s after step 2; killed after step 4; started again after 10 s; done at step 6."""
    table = {"name": "small", "model": {"preset": "tiny"}, "optim": {"steps": 6, "warmup": 0}}
    folder = RunFolder.create(tmp_path / "runs" / "small", RunSpec.from_dict({**table, "checkpoint": {"every": 2}}))

    def write(file: Path, at: float, **fields: object) -> None:
        with LineWriter(file) as lines:
            lines.append({"time": (ZERO + timedelta(seconds=at)).isoformat(timespec="milliseconds"), **fields})

    def event(at: float, kind: str, step: int, **fields: object) -> None:
        write(folder.events_path, at, kind=kind, step=step, **fields)

    def step(at: float, number: int, attempt: int, saved: float = 0.0) -> None:
        run_columns = {"step_s": 1.0, "checkpoint_s": saved, "tokens": 100, "tokens_per_s": 100.0, "loss": 2.0}
        write(folder.metrics_path, at, step=number, attempt=attempt, **run_columns)

    event(0, "start", 0, attempt=0)
    step(1, 1, 0)
    step(2, 2, 0)
    event(2.5, "save", 2, seconds=0.5, path="step-000002")
    step(3.5, 3, 0, saved=0.5)
    event(3.75, "spike", 4, reason="spike_loss", zscore=12.34567, data={"cursor": 3})
    step(4.5, 4, 0)
    event(13.5, "resume", 2, attempt=1)
    for number in (3, 4, 5, 6):
        step(12.5 + number, number, 1)
    event(18.5, "finish", 6)
    return folder


def test_a_program_gets_all_of_it(killed: RunFolder, lmworks: Lmworks) -> None:
    code, out, _ = lmworks("runs", "show", "small", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["run"]["status"] == "finished"
    spent = {cause: seconds for cause, seconds in found["time"]["seconds"].items() if seconds}
    assert spent == {"useful": 6, "save": 0.5, "restart": 10, "replay": 2}
    assert (found["time"]["wall_s"], found["time"]["lost_s"], found["time"]["failures"]) == (18.5, 12.5, 1)
    assert found["time"]["ettr"] == pytest.approx(6 / 18.5)
    assert found["time"]["goodput_tokens_per_s"] == pytest.approx(600 / 18.5)
    assert [(a["begin"], a["end"], a["ended"]) for a in found["attempts"]] == [
        (0, 4.5, "killed"),
        (13.5, 18.5, "finish"),
    ]
    assert [event["kind"] for event in found["events"]] == ["spike"]
    saves = found["interval"]
    assert (saves["mtbf_s"], saves["stall_s"], saves["restart_s"], saves["steps"]) == (8.5, 0.5, 10, 2)
    assert saves["young_s"] == pytest.approx(8.5**0.5)
    assert saves["best_steps"] == 3


def test_a_person_gets_tables(killed: RunFolder, lmworks: Lmworks) -> None:
    code, out, _ = lmworks("runs", "show", "runs/small", "--mtbf", "1")
    assert code == 0
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.split()}
    assert out.startswith("small: finished, 6 of 6 steps\n")
    assert rows["restart"][1:4] == ["10", "s", "54.1%"]
    assert rows["replay"][1:4] == ["2", "s", "10.8%"]
    assert "ETTR 32.4%" in out
    assert "goodput 32.4 tokens/s (100 in a median step)" in out
    assert rows["best"][1:4] == ["60", "60", "s"]  # √(2 · 0.5 · 3600)
    assert "a stop comes every 3600 s (given)" in out
    assert "reason spike_loss, zscore 12.35" in out


def test_a_run_without_stops_says_what_is_missing(killed: RunFolder, lmworks: Lmworks) -> None:
    killed.events_path.unlink()
    killed.metrics_path.unlink()
    killed.event("start", 0, attempt=0)
    killed.event("interrupt", 0)
    _, out, _ = lmworks("runs", "show", "small")
    assert "How often to save is not known without a stop; give one with --mtbf HOURS." in out
    _, out, _ = lmworks("runs", "show", "small", "--mtbf", "1")
    assert "How often to save is not known without a save." in out


def test_the_newest_statistics_of_layers(killed: RunFolder, lmworks: Lmworks) -> None:
    with MetricsWriter(killed.stats_path, 1) as lines:
        lines.write(2, {"parts": {"0": {"act_rms": 7.0}}})
        lines.write(4, {"parts": {"embed": {"grad_norm": 0.25}, "0": {"act_rms": 1.5, "grad_norm": 0.125}}})
    _, out, _ = lmworks("runs", "show", "small")
    table = [line.split() for line in out[out.index("Layers at step 4") :].splitlines() if line.strip()]
    assert table[1] == ["part", "grad_norm", "act_rms"]
    assert table[3:] == [["embed", "0.25", "-"], ["0", "0.125", "1.5"]]
    assert json.loads(lmworks("runs", "show", "small", "--json")[1])["layers"]["step"] == 4


def test_a_picture(killed: RunFolder, lmworks: Lmworks) -> None:
    pytest.importorskip("matplotlib")
    _, out, _ = lmworks("runs", "show", "small", "--plot")
    assert out.endswith("time: runs/small/plots/goodput.png\n")
    assert (killed.plots / "goodput.png").read_bytes().startswith(b"\x89PNG")


def test_bad_usage(killed: RunFolder, lmworks: Lmworks) -> None:
    missing = "lmworks: error: nothing is not a run folder: it does not exist\n"
    assert lmworks("runs", "show", "nothing") == (2, "", missing)
    code, _, error = lmworks("runs", "show", "small", "--mtbf", "-1")
    assert (code, error) == (2, "lmworks: error: --mtbf -1: give hours between two failures, more than 0\n")
    assert lmworks("runs", "show")[0] == 2


def test_a_list_is_what_it_was(killed: RunFolder, lmworks: Lmworks) -> None:
    """Whatever is not a command is a folder or an option of the list."""
    _, listed, _ = lmworks("runs", "--json")
    assert lmworks("runs", "runs", "--json")[1] == listed == lmworks("runs", "ls", "--json")[1]
    assert json.loads(listed)[0]["name"] == "small"
    assert "no runs at nowhere: it does not exist" in lmworks("runs", "nowhere")[2]
    (killed.path.parent / "show").mkdir()
    assert lmworks("runs", "runs/show", "--json")[1] == "[]\n"
    assert "show" in lmworks("runs", "--help")[1]
