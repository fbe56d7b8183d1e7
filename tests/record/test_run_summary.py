"""One run's figures, and how it stands."""

import json

from lmworks.record import MetricsWriter, read_metrics
from lmworks.record.run_summary import summarize, wall_seconds
from lmworks.report import predicted_vs_measured


def test_summary_equals_metrics(make_run):
    folder = make_run(total=9)
    summary = summarize(folder)
    assert (summary.steps, summary.total_steps) == (4, 9)
    assert (summary.loss, summary.val_loss) == (2.0, 4.0)
    assert (summary.best_val_loss, summary.best_val_step) == (3.5, 2)
    assert summary.tokens == 4096
    assert summary.tokens_per_s == 250.0
    assert summary.step_s == 0.25
    assert summary.train_s == 1.0
    assert summary.memory_bytes == 4 * 2**20
    assert summary.mfu is None
    assert summary.params == folder.spec().model.params
    assert summary.attempts == 1


def test_a_replayed_step_counts_once(make_run):
    folder = make_run()
    with MetricsWriter(folder.metrics_path, 1) as metrics:
        metrics.write(4, {"loss": 1.25, "tokens": 1000})
    summary = summarize(folder)
    assert (summary.loss, summary.tokens, summary.attempts) == (1.25, 3 * 1024 + 1000, 2)


def test_status(make_run):
    assert summarize(make_run("a", end="finish")).status == "finished"
    assert summarize(make_run("b", end="interrupt")).status == "interrupted"
    assert summarize(make_run("c", end="fail")).status == "failed"
    killed = make_run("d", end=None)
    assert summarize(killed).status == "interrupted"
    with killed.locked():
        assert summarize(killed).status == "running"
    resumed = make_run("e", end="finish")
    resumed.event("resume", 4, attempt=1)
    assert summarize(resumed).status == "interrupted"
    resumed.event("save", 4)
    resumed.event("finish", 4)
    assert summarize(resumed).status == "finished"


def test_run_without_steps(make_run):
    folder = make_run(steps=0, end=None)
    folder.events_path.unlink()
    summary = summarize(folder)
    assert (summary.status, summary.steps, summary.loss, summary.tokens) == ("new", 0, None, 0)
    assert summary.started.endswith("+00:00")


def test_wall_time_leaves_out_the_pause_before_a_resume():
    def at(minute, kind):
        return {"time": f"2026-01-01T10:{minute:02}:00+00:00", "kind": kind}

    events = [at(0, "start"), at(2, "save"), at(3, "interrupt"), at(40, "resume"), at(44, "finish")]
    assert wall_seconds(events) == 7 * 60
    assert wall_seconds(events[:1]) is None


def test_prediction_against_measurement(make_run):
    folder = make_run()
    predicted = {"params": 1000, "memory_bytes": 8 * 2**20, "step_s": 0.125, "tokens_per_s": None}
    parts = {"step_parts": {"optimizer": 0.1, "loss": 1}, "machine": "a name"}
    folder.prediction_path.write_text(json.dumps({**predicted, **parts}))
    rows = {row.name: row for row in predicted_vs_measured.compare(folder, read_metrics(folder.metrics_path))}
    assert list(rows) == ["memory_bytes", "step_s"], "what was predicted and is measured under the same name"
    assert (rows["memory_bytes"].measured, rows["memory_bytes"].ratio) == (4 * 2**20, 0.5)
    assert (rows["step_s"].measured, rows["step_s"].ratio) == (0.25, 2.0)
