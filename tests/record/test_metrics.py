"""metrics.jsonl: what was written is what is read, whatever happened to the writer."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest

from lmworks.record import MetricsWriter, read_metrics
from lmworks.spec import LMWorksError


def write(path, attempt, steps):
    with MetricsWriter(path, attempt) as metrics:
        for step, loss in steps:
            metrics.write(step, {"loss": loss})


def test_one_line_per_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    before = datetime.now(UTC)
    write(path, 0, [(1, 5.5), (2, 5.25)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    times = [datetime.fromisoformat(line.pop("time")) for line in lines]
    assert lines == [{"step": 1, "attempt": 0, "loss": 5.5}, {"step": 2, "attempt": 0, "loss": 5.25}]
    assert before - timedelta(milliseconds=1) <= times[0] <= times[1] <= datetime.now(UTC)


def test_lines_are_flushed(tmp_path):
    metrics = MetricsWriter(tmp_path / "metrics.jsonl", 0)
    metrics.write(1, {"loss": 5.5})
    (line,) = read_metrics(metrics.path)
    assert (line["step"], line["attempt"], line["loss"]) == (1, 0, 5.5)


def test_highest_attempt_wins(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)])
    write(path, 1, [(3, 30.0)])
    write(path, 2, [(2, 200.0), (3, 300.0)])
    assert [(m["step"], m["attempt"], m["loss"]) for m in read_metrics(path)] == [
        (1, 0, 1.0),
        (2, 2, 200.0),
        (3, 2, 300.0),
        (4, 0, 4.0),
    ]


def test_rewound_steps_are_ignored(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, [(1, 1.0), (2, 2.0), (3, 3.0)])
    write(path, 1, [(3, 30.0), (4, 40.0), (5, 50.0), (4, 41.0)])
    assert [(m["step"], m["loss"]) for m in read_metrics(path)] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 41.0)]
    with MetricsWriter(path, 1) as metrics:
        metrics.write(2, {"loss": 22.0})  # what attempt 0 has of step 3 is not true any more either
    assert [(m["step"], m["loss"]) for m in read_metrics(path)] == [(1, 1.0), (2, 22.0)]


def test_nonfinite_numbers_are_valid_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path, 0) as metrics:
        metrics.write(1, {"loss": float("nan"), "grad_norm": float("-inf"), "lr": 0.1})
    line = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert line["loss"] is None
    assert line["grad_norm"] is None
    assert line["lr"] == 0.1
    assert line["nonfinite"] == {"loss": "nan", "grad_norm": "-inf"}


@pytest.mark.parametrize("torn", [b'{"step":3,"att', b"{", b'{"step":3,"note":"\xc3', b"x" * 10_000])
def test_torn_last_line_is_ignored(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, [(1, 1.0), (2, 2.0)])
    with path.open("ab") as file:
        file.write(torn)
    assert [m["step"] for m in read_metrics(path)] == [1, 2]
    write(path, 1, [(3, 3.0), (4, 4.0)])
    assert [(m["step"], m["attempt"]) for m in read_metrics(path)] == [(1, 0), (2, 0), (3, 1), (4, 1)]
    for line in path.read_bytes().splitlines():
        json.loads(line)


def test_last_line_without_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"attempt":0,"loss":1.0}')
    assert [m["step"] for m in read_metrics(path)] == [1]
    write(path, 1, [(2, 2.0)])
    assert [(m["step"], m["loss"]) for m in read_metrics(path)] == [(1, 1.0), (2, 2.0)]


def test_damage_reports_file_and_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, [(1, 1.0), (2, 2.0), (3, 3.0)])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:9] + "\n" + lines[2])
    with pytest.raises(LMWorksError, match=r"metrics\.jsonl, line 2 is damaged"):
        read_metrics(path)


def test_line_without_step_is_damage(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"loss":1.0}\n')
    with pytest.raises(LMWorksError, match=r"metrics\.jsonl, line 1 .*'step'"):
        read_metrics(path)


def test_no_file_is_no_steps(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_full_disk_is_one_line_error(tmp_path):
    full = tmp_path / "metrics.jsonl"
    full.symlink_to("/dev/full")
    with MetricsWriter(full, 0) as metrics, pytest.raises(LMWorksError, match=r"metrics\.jsonl: No space left"):
        metrics.write(1, {"loss": 1.0})


WRITER = """
import sys
from pathlib import Path
from lmworks.record import MetricsWriter
with MetricsWriter(Path(sys.argv[1]), int(sys.argv[2])) as metrics:
    step = 0
    while True:
        step += 1
        metrics.write(step, {"loss": 1 / step, "padding": "x" * 20_000})
        if step == 3:
            print("under way", flush=True)
"""


def test_kill_while_writing_then_append(tmp_path):
    """Whatever the kill leaves, no step between the first and the last is lost or damaged."""
    path = tmp_path / "metrics.jsonl"
    for attempt in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, path, str(attempt)], stdout=subprocess.PIPE)
        writer.stdout.readline()
        time.sleep(0.02 + 0.011 * attempt)
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
    write(path, 3, [(1, 7.0)])
    steps = read_metrics(path)
    assert [m["step"] for m in steps] == list(range(1, len(steps) + 1))
    assert len(steps) >= 3
    assert steps[0]["loss"] == 7.0
    assert all(m["loss"] == 1 / m["step"] for m in steps[1:])
