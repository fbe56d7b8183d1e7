"""The post-training part of report.html: the run's own numbers, by method, and what the model wrote, as text."""

from __future__ import annotations

import pytest
from test_report import Page

from lmworks.cli.runs import run_columns
from lmworks.record import MetricsWriter
from lmworks.record.jsonl import LineWriter
from lmworks.record.run_summary import summarize
from lmworks.report.post_training import calibration_error, reliability
from lmworks.report.run_report import write_report
from typed import lmworks

ONLINE = {
    "align": {"method": "grpo", "rewards": ["exact", "dir/own.py:brief"], "beta": 0.1, "kl_stop": 9.0, "max_tokens": 16}
}
EVIL = '<img src=x onerror="alert(1)"></td><script>alert(2)</script>'


def write_metrics(folder, rows):
    with MetricsWriter(folder.metrics_path, 0) as metrics:
        for step, row in enumerate(rows, 1):
            metrics.write(step, {"loss": 0.5, "step_s": 1.0, **row})
    return folder


def lines_of(page, *names):
    """The chart that has exactly these lines."""
    (found,) = [lines for lines in page.charts() if [line["name"] for line in lines] == list(names)]
    return [line["points"] for line in found]


@pytest.fixture
def online(make_run):
    first = {
        "reward/mean": 0.5, "reward/std": 0.1, "reward/equal_groups": 0.25, "reward/exact": 0.3,
        "reward/dir/own.py:brief": 0.2, "kl_answer": 2.0, "completion/mean_length": 10.0, "completion/max_length": 16.0,
        "completion/ended": 0.75, "completion/clipped": 0.25, "generate_s": 1.25, "reward_s": 0.75,
        "hand_over_s": 1.0, "sleep_wake_s": 0.5, "score_s": 0.5,
    }  # fmt: skip
    each = {"entropy": 1.5, "clip_ratio/low_mean": 0.01, "clip_ratio/high_mean": 0.02, "sampler_diff/mean": 1e-6}
    each |= {"forward_backward_s": 1.0, "optimizer_s": 0.25}
    rows = [{**first, **each}, {**each, "val_loss": -0.4, "val_reward/mean": 0.4}] * 2
    return write_metrics(make_run(steps=0, **ONLINE), rows)


def test_an_online_run_shows_what_reveals_reward_hacking(online):
    page = Page(write_report(online).read_text())
    mean, own, exact, held_out = lines_of(page, "mean", "own.py:brief", "exact", "held-out prompts")
    assert mean == [[1, "0.5"], [3, "0.5"]] and own == [[1, "0.2"], [3, "0.2"]] and exact == [[1, "0.3"], [3, "0.3"]]
    assert held_out == [[2, "0.4"], [4, "0.4"]]
    assert lines_of(page, "mean of a round", "limit") == [[[1, "2"], [3, "2"]], [[1, "9"], [3, "9"]]]
    assert lines_of(page, "policy")[0] == [[step, "1.5"] for step in (1, 2, 3, 4)]
    assert lines_of(page, "mean", "longest") == [[[1, "10"], [3, "10"]], [[1, "16"], [3, "16"]]]
    ended, cut, equal = lines_of(page, "ended by itself", "cut at align.max_tokens", "groups of equal rewards")
    assert (ended[0], cut[0], equal[0]) == ([1, "0.75"], [1, "0.25"], [1, "0.25"])
    assert lines_of(page, "below", "above")[1][0] == [1, "0.02"]
    assert "reward|0.5000|last round; 0.5000 in the first|" in page.text
    assert "held-out reward|0.4000|best 0.4000 at step 2|" in page.text and "validation loss" not in page.text
    loss = page.charts()[0]
    assert [line["points"] for line in loss if line["name"] == "validation"] == [[]]  # it is a reward


def test_pngs_of_an_online_run_draw_rewards_as_rewards(online, plots, monkeypatch):
    pytest.importorskip("matplotlib")
    curves = {}

    def save(figure, path):
        (axes,) = figure.axes
        curves[path.name] = {line.get_label(): line.get_ydata().tolist() for line in axes.lines}
        return path

    monkeypatch.setattr("lmworks.report.plots.save", save)
    write_report(online)
    assert curves["reward.png"] == {"training": [0.5, 0.5], "held-out prompts": [0.4, 0.4]}
    assert list(curves["loss.png"].values()) == [[0.5] * 4]  # no evaluation among them


def test_the_summary_of_an_online_run_has_its_rewards(online, capsys):
    summary = summarize(online)
    assert (summary.val_loss, summary.best_val_step, summary.reward, summary.val_reward) == (None, None, 0.5, 0.4)
    shown = lmworks(capsys, "runs", "show", str(online.path))[1]
    assert "loss 0.5000, reward 0.5000, held-out reward 0.4000" in shown
    assert run_columns(summary.to_dict())["validation"] == "reward 0.4000"


def test_the_time_of_a_round_by_phase(online):
    """Of 6.5 s: 2 generation, 1.5 moving weights and memory, 0.5 scoring, 2.5 in two updates."""
    text = Page(write_report(online).read_text()).text
    for share in ("generation and rewards 30.8%", "sleep, wake, hand-over 23.1%", "scoring 7.7%", "update 38.5%"):
        assert share in text


def test_a_round_that_others_sample_is_waited_for(make_run):
    """Generation overlaps with updates: what counts is the time that the trainer waited."""
    row = {"generate_s": 30.0, "hand_over_s": 1.0, "rollout_wait_s": 2.0, "forward_backward_s": 1.0}
    row |= {"staleness/mean": 0.5, "staleness/max": 1.0}
    page = Page(write_report(write_metrics(make_run(steps=0, **ONLINE), [row, row])).read_text())
    assert "generation and rewards 50.0%" in page.text and "sleep, wake, hand-over 25.0%" in page.text
    assert lines_of(page, "mean", "largest")[0] == [[1, "0.5"], [2, "0.5"]]


def test_samples_are_shown_as_text(online):
    with LineWriter(online.samples_path) as lines:
        for number in range(20):
            answer = {"prompt": "1+1=", "answer": f"{EVIL} {number}", "reward": None if number else 0.5}
            answer |= {"rewards": {"exact": float("nan"), "dir/own.py:brief": 0.25}, "tokens": 7, "ended": False}
            lines.append({"round": number, "step": number + 1, "answers": [answer]})
        lines.append({"round": 19, "step": 20, "answers": [{**answer, "answer": "sampled\x00 \u202eagain"}]})
    text = write_report(online).read_text()
    page = Page(text)
    assert EVIL not in text and f"{EVIL} 0" in page.text
    assert [tag for tag, _ in page.tags].count("script") == 1 and "img" not in [tag for tag, _ in page.tags]
    assert (
        "|sampled\\x00 \\u202eagain|" in page.text and f"{EVIL} 19" not in page.text
    )  # the last line of a round counts
    shown = [number for number in range(20) if f"|{number}|{number + 1}|1+1=|" in page.text]
    assert shown == [0, 4, 8, 11, 15, 19]
    assert "|exact nan, own.py:brief 0.25|7, cut|0.5|" in page.text


def test_preferences_have_margins_and_accuracies(make_run):
    row = {"rewards/margins": 0.5, "rewards/accuracies": 0.75, "rewards/chosen": 1.0, "rewards/rejected": 0.5}
    folder = write_metrics(
        make_run(steps=0, align={"method": "dpo"}), [row, {**row, "val_rewards/margins": 0.25, "val_loss": 0.6}]
    )
    page = Page(write_report(folder).read_text())
    assert lines_of(page, "training", "held-out") == [[[1, "0.5"], [2, "0.5"]], [[2, "0.25"]]]
    assert lines_of(page, "chosen", "rejected")[0] == [[1, "1"], [2, "1"]]
    assert "Samples" not in page.text and "Brier" not in page.text


@pytest.mark.parametrize("online", [False, True])
def test_distillation_shows_how_close_student_and_teacher_are(online, make_run):
    """Held-out answers too, also where the student writes them: their loss is the divergence, not a reward."""
    row = {"divergence": 0.5, "top1_agreement": 0.75, "nll": 1.5}
    if online:
        row |= {"sampler_diff/mean": 1e-6, "completion/mean_length": 10.0}
    held_out = {"val_loss": 0.6, "val_divergence": 0.625, "val_top1_agreement": 0.25, "val_nll": 1.75}
    align = {"method": "distill", "teacher": "teacher", "on_policy": online, "max_tokens": 16}
    folder = write_metrics(make_run(steps=0, align=align), [row, {**row, **held_out}])
    page = Page(write_report(folder).read_text())
    assert [line["points"] for line in page.charts()[0] if line["name"] == "validation"] == [[[2, "0.6"]]]
    both = [lines for lines in page.charts() if [line["name"] for line in lines] == ["training", "held-out"]]
    assert [[line["points"] for line in lines] for lines in both] == [
        [[[1, "0.5"], [2, "0.5"]], [[2, "0.625"]]],
        [[[1, "0.75"], [2, "0.75"]], [[2, "0.25"]]],
        [[[1, "1.5"], [2, "1.5"]], [[2, "1.75"]]],
    ]
    assert "Negative log-likelihood of the answers" in page.text and "chosen" not in page.text
    assert ("Length of answers" in page.text) == online


def test_a_reward_model_shows_its_calibration(make_run):
    bins = {f"val_calibration/{name}_{bin}": None for name in ("confidence", "accuracy") for bin in range(5)}
    bins |= {f"val_calibration/share_{bin}": 0.0 for bin in range(5)}
    for bin, confidence, accuracy, share in ((0, 0.55, 0.5, 0.4), (4, 0.95, 0.8, 0.6)):
        bins |= {f"val_calibration/confidence_{bin}": confidence, f"val_calibration/accuracy_{bin}": accuracy}
        bins |= {f"val_calibration/share_{bin}": share}
    rows = [{"rewards/brier": 0.25}, {"rewards/brier": 0.2, "val_rewards/brier": 0.22, **bins}]
    folder = write_metrics(make_run(steps=0, align={"method": "reward"}), rows)
    page = Page(write_report(folder).read_text())
    assert lines_of(page, "calibrated", "held-out pairs")[1] == [[0.55, "0.5"], [0.95, "0.8"]]
    assert "Expected calibration error of the last evaluation: 0.110." in page.text  # 0.4 · 0.05 + 0.6 · 0.15
    assert lines_of(page, "training", "held-out") == [[[1, "0.25"], [2, "0.2"]], [[2, "0.22"]]]
    assert reliability([]) == [] and calibration_error([]) is None


def test_pretraining_has_no_such_part(make_run):
    assert "Post-training" not in Page(write_report(make_run()).read_text()).text
