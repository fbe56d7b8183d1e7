"""Predicted against measured: a figure outside its range is marked and explained, on the terminal and in the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmworks.cli import demo
from lmworks.record import MetricsWriter, RunFolder, read_metrics
from lmworks.report.predicted_vs_measured import busy_note, compare
from lmworks.report.run_report import write_report

QUIET = {"step_s": 0.1, "interval": [0.085, 0.13], "tokens_per_s": 1000.0, "quiet": True, "noise": 1.0}
BUSY = {"step_s": 0.1, "interval": [0.065, 1.04], "tokens_per_s": 1000.0, "quiet": False, "noise": 8.0}


@pytest.fixture
def run_of(make_run: Callable[..., RunFolder]) -> Callable[..., RunFolder]:
    def make(said: dict[str, Any], *seconds: float) -> RunFolder:
        folder = make_run(steps=0, end=None)
        folder.prediction_path.write_text(json.dumps(said))
        with MetricsWriter(folder.metrics_path, 0) as metrics:
            for step, taken in enumerate(seconds, 1):
                metrics.write(step, {"loss": 1.0, "step_s": taken, "tokens_per_s": 100 / taken, "memory_bytes": 1})
        return folder

    return make


def why(folder: RunFolder) -> str:
    step, speed = (row for row in compare(folder, read_metrics(folder.metrics_path)) if row.name != "memory_bytes")
    assert step.outside == speed.outside == bool(step.why) and not speed.why  # once is enough
    return step.why


@pytest.mark.parametrize(
    ("said", "seconds", "text"),
    [
        (QUIET, [0.12] * 30, ""),
        (QUIET, [0.09, 0.095] * 15, ""),
        (BUSY, [0.07] * 30, ""),  # the load has gone
        (BUSY, [0.9] * 30, ""),  # it has not
        (QUIET, [0.84] * 30, "8.40 × predicted, outside 0.85 to 1.30 ×: the machine was slower than when it"),
        # a tenth of the steps on either side may be outliers
        (QUIET, [0.1] * 3 + [0.2] * 24 + [0.9] * 3, "2.00 × predicted, outside 0.85 to 1.30 ×: the machine was slower"),
        (QUIET, [0.1, 0.2, 0.3] * 10, "steps took 100 ms to 300 ms: other work ran beside the training"),
        (QUIET, [0.05] * 30, "0.50 × predicted, outside 0.85 to 1.30 ×: the machine was faster than when it"),
        (BUSY, [1.5] * 30, "outside 0.65 to 10.40 ×: the machine was busier still than when runs took 8.0 × what"),
        (BUSY, [0.01] * 30, "rates that were measured on a busy machine were too low; `lmworks plan hardware --probe`"),
        ({**QUIET, "quiet": None}, [0.2] * 30, "the rates are of its kind, not of this machine: `lmworks plan"),
        ({"step_s": 0.1, "tokens_per_s": 1000.0}, [0.9] * 30, ""),  # a run of before there were ranges
    ],
)  # fmt: skip
def test_out_of_range_is_explained(
    run_of: Callable[..., RunFolder], said: dict[str, Any], seconds: list[float], text: str
) -> None:
    found = why(run_of(said, *seconds))
    assert text in found and bool(text) == bool(found)


def test_token_rate_range_follows_step_time(run_of: Callable[..., RunFolder]) -> None:
    folder = run_of(QUIET, *[0.1] * 3)
    rows = {row.name: row for row in compare(folder, read_metrics(folder.metrics_path))}
    assert rows["tokens_per_s"].range == pytest.approx((1000 / 1.3, 1000 / 0.85))
    assert rows["step_s"].cells == ["100 ms", "100 ms", "1.00", "85 ms to 130 ms"]


def test_bytes_of_a_hand_over(make_run: Callable[..., RunFolder]) -> None:
    """Of the rounds, which are not all steps; nothing is said of weights that are shared."""
    folder = make_run(steps=0, end=None)
    folder.prediction_path.write_text(json.dumps({"hand_over_bytes": 4096, "hand_over_received_bytes": 0}))
    with MetricsWriter(folder.metrics_path, 0) as metrics:
        for step in range(4):
            metrics.write(step, {"loss": 1.0, **({} if step % 2 else {"hand_over_bytes": 8192.0})})
    (row,) = compare(folder, read_metrics(folder.metrics_path))
    assert (row.label, *row.cells) == ("weights handed to the engine", "4 KiB", "8 KiB", "2.00", "–")


def test_a_figure_that_should_be_zero_is_shown_where_it_is_not(make_run: Callable[..., RunFolder]) -> None:
    folder = make_run(steps=0, end=None)
    folder.prediction_path.write_text(json.dumps({"hand_over_bytes": 0, "hand_over_received_bytes": 0}))
    with MetricsWriter(folder.metrics_path, 0) as metrics:
        metrics.write(1, {"loss": 1.0, "hand_over_bytes": 0.0, "hand_over_received_bytes": 4096.0})
    (row,) = compare(folder, read_metrics(folder.metrics_path))
    assert (row.name, *row.cells) == ("hand_over_received_bytes", "0 B", "4 KiB", "–", "–")
    assert not row.outside and "of a hand-over, from other ranks" in write_report(folder).read_text()


def test_busy_machine_note(run_of: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_of(BUSY, *[0.8] * 30)
    demo.compare(folder)
    out = capsys.readouterr().out
    assert "runs took 8.0 × what they take alone" in out and "65 ms to 1.04 s" in out and "8.00" in out
    page = write_report(folder).read_text()
    assert "runs took 8.0 × what they take alone" in page and "65 ms to 1.04 s" in page
    assert 'class="number outside"' not in page and 'class="note outside"' not in page
    assert busy_note(QUIET) == busy_note({}) == ""


def test_out_of_range_ratio_is_coloured(
    run_of: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_of(QUIET, *[0.84] * 30)
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(demo.typer, "secho", lambda text, fg: told.append((text, fg)))
    demo.compare(folder)
    assert "8.40" in capsys.readouterr().out
    ((text, colour),) = told
    assert text.startswith("step time: measured 8.40 × predicted, outside 0.85 to 1.30 ×: the machine was slower")
    assert colour == "yellow"
    page = write_report(folder).read_text()
    assert '<td class="number outside">8.40</td>' in page
    assert '<p class="note outside">step time: measured 8.40 × predicted' in page


def test_old_predictions_are_readable(make_run: Callable[..., RunFolder], tmp_path: Path) -> None:
    folder = make_run()
    assert compare(folder, read_metrics(folder.metrics_path)) == []
    assert "Predicted against measured" not in write_report(folder).read_text()
