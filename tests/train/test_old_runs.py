"""Runs and checkpoints that earlier code wrote (tests/old_runs) are resumed and read by the code of today."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from layouts import on_ranks
from lmworks.cli.main import main
from lmworks.record import RunFolder, read_metrics
from lmworks.spec import SpecError
from lmworks.train import Trainer
from tiny import events, resume, saved

OLD = Path(__file__).parent.parent / "old_runs"
EXPECTED: dict[str, Any] = json.loads((OLD / "expected.json").read_text())
RUNS = pytest.mark.parametrize("name", EXPECTED)
FIGURES = ("loss", "lr", "grad_norm", "tokens", "val_loss")


@pytest.fixture(autouse=True)
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the current folder: `data` and every run."""
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def hashes(run: Path, step: int) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
        for name, tensor in saved(run, step).items()
    }


def resumed(rank: int, run: Path) -> None:
    Trainer.resume(run, quiet=True).run()


@RUNS
def test_old_checkpoint_loads_bitwise(name: str) -> None:
    assert hashes(Path(name), 4) == EXPECTED[name]["saved"]


@RUNS
def test_old_run_resumes_bitwise(name: str) -> None:
    """Figures of the steps after the stop, within what another processor may round otherwise."""
    run = Path(name)
    on_ranks(2, resumed, run) if name == "experts" else resume(run)
    assert [event["step"] for event in events(run, "resume")] == [4]
    steps = read_metrics(RunFolder(run).metrics_path)
    assert [line["step"] for line in steps] == [line["step"] for line in EXPECTED[name]["steps"]]
    for line, known in zip(steps, EXPECTED[name]["steps"], strict=True):
        figures = {key: known[key] for key in FIGURES if known[key] is not None}  # not every step is evaluated
        assert {key: line[key] for key in figures} == pytest.approx(figures, rel=1e-5)


def test_one_rank_resumes_two_rank_checkpoint() -> None:
    """The layout is changed in spec.toml, as a user may."""
    run = Path("experts")
    text = RunFolder(run).spec_path.read_text()
    for old, new in (("dp_shard = 2", "dp_shard = 1"), ("ep = 2", "ep = 1")):
        assert old in text
        text = text.replace(old, new)
    RunFolder(run).spec_path.write_text(text)
    resume(run)
    assert hashes(run, 4) == EXPECTED["experts"]["saved"]
    last = read_metrics(RunFolder(run).metrics_path)[-1]
    assert last["loss"] == pytest.approx(EXPECTED["experts"]["steps"][-1]["loss"], rel=1e-5)


def test_a_retired_key_that_was_used_names_what_to_write() -> None:
    """Old specs have `async_tp = false`; a run that had it true is resumed without it, which computes the same."""
    spec = RunFolder(Path("dense")).spec_path
    text = spec.read_text()
    assert "async_tp = false" in text
    spec.write_text(text.replace("async_tp = false", "async_tp = true"))
    with pytest.raises(SpecError, match=r"use parallel\.async_tp = false, which computes the same"):
        resume(Path("dense"))
    spec.write_text(text)
    resume(Path("dense"))


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with mock.patch.object(sys, "argv", ["lmworks", *arguments]), contextlib.suppress(SystemExit):
        main()
    out = capsys.readouterr()
    assert not out.err
    return out.out


@RUNS
def test_eval_generate_and_report_read_old_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(answer(capsys, "eval", name, "--json"))["step"] == 4
    (sample,) = json.loads(answer(capsys, "generate", name, "--prompt", "def", "--max-tokens", "5", "--json"))
    assert len(sample["tokens"]) == 5
    answer(capsys, "report", name)
    page = (Path(name) / "report.html").read_text()
    assert f"{EXPECTED[name]['steps'][4]['loss']:.4f}" in page and "Predicted against measured" in page
