"""Bad steps of online methods: batches that are skipped at the beginning of a round, rewinds, and the critic's own loss
scale and health after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmworks.align.online_trainer import OnlineTrainer
from lmworks.align.post_trainer import trainer_class
from lmworks.align.rollouts import load_round
from lmworks.checkpoint.format.manifest import read_committed
from lmworks.record import read_metrics
from lmworks.spec import RunSpec
from lmworks.train.restart import FAILED_TWICE
from post_training import make_spec
from tiny import differences, saved
from typed import lmworks
from variations import with_slow


def online(spec: RunSpec, run: Path, skipped: range = range(0)) -> OnlineTrainer:
    """A run with two steps a round; batches `skipped` have crashed it before."""
    trainer = trainer_class(spec)(spec, run, quiet=True)
    assert isinstance(trainer, OnlineTrainer)
    for cursor in skipped:
        trainer.folder.event("skip", 1, from_cursor=cursor, to_cursor=cursor + 1, reason=FAILED_TWICE)
    return trainer


def spoil(trainer: OnlineTrainer, cursors: set[int]) -> None:
    """The loss of these batches is NaN."""
    update: Any = trainer.forward_backward

    def forward_backward(*given: Any) -> Any:
        sums = update(*given)
        if trainer.cursor in cursors:
            sums[0] = float("nan")
        return sums

    trainer.forward_backward = forward_backward  # type: ignore[method-assign]


def rows_of(run: Path) -> list[dict[str, Any]]:
    return read_metrics(run / "metrics.jsonl")


def test_a_round_whose_first_batch_is_skipped_begins_with_the_next(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "grpo", "optim.steps=4", "checkpoint.every=0")
    trainer = online(spec, tmp_path / "run", skipped=range(2, 3))
    trainer.run()
    rows = rows_of(tmp_path / "run")
    assert [("reward/mean" in row) for row in rows] == [True, False, True, True]  # rounds of 2, 1 and 1 steps
    assert trainer.cursor == 5


def test_the_metrics_of_a_round_come_with_the_first_step_that_is_taken(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "grpo", "optim.steps=4", "checkpoint.every=0", "health.nonfinite=skip")
    trainer = online(spec, tmp_path / "run")
    spoil(trainer, {2})
    trainer.run()
    rows = rows_of(tmp_path / "run")
    assert [("reward/mean" in row) for row in rows] == [True, False, True, True]


@pytest.mark.parametrize(
    "option", with_slow(["align.dynamic_sampling=0", "align.dynamic_sampling=1"], ["align.dynamic_sampling=0"])
)
def test_the_event_of_a_bad_step_and_data_window_name_the_prompts_of_its_round(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last of two steps of round 1: its answers are those of the kept round."""
    run = tmp_path / "run"
    spec = make_spec(tmp_path, "grpo", "optim.steps=4", "checkpoint.every=0", "health.nonfinite=skip", option)
    trainer = online(spec, run)
    spoil(trainer, {3})
    trainer.run()
    decode = trainer.batches.tokenizer.decode
    sampled = {decode(rollout.prompt_ids) for rollout in load_round(run / "rollouts/round-000001.npz")}
    (event,) = [one for one in trainer.folder.events() if one["kind"] == "fault"]
    draws = 1 + spec.align.dynamic_sampling
    first, last = event["data"]["samples"]
    assert (first, last) == (4 * draws, 8 * draws - 1)
    code, out, _ = lmworks(capsys, "data", "window", str(run), "--cursor", str(event["cursor"]), "--json")
    rows = json.loads(out)["rows"]
    assert code == 0 and sorted(row["sample"] for row in rows) == list(range(first, last + 1))
    named = {row["text"] for row in rows}
    assert sampled <= named and (draws > 1 or sampled == named)


def test_after_a_rewind_a_round_is_sampled_from_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    """The first batch of round 2 is bad: the run goes back to step 3 and on with the second half of round 2."""
    spec = make_spec(
        tmp_path, "grpo", "optim.steps=5", "checkpoint.every=1", "checkpoint.keep=0", "optim.lr=0.1", "optim.warmup=0",
        "health.nonfinite=rewind", "health.rewind_steps=2",
    )  # fmt: skip
    trainer = online(spec, tmp_path / "run")
    spoil(trainer, {4})
    trainer.run()
    (event,) = [one for one in trainer.folder.events() if one["kind"] == "rewind"]
    assert (event["from_step"], event["to_step"]) == (4, 3)
    again = rows_of(tmp_path / "run")[3]  # step 4, taken a second time
    assert again["sampler_diff/max"] < 1e-5 and "reward/mean" in again


def test_answers_are_kept_for_checkpoints_after_skipped_batches(tmp_path: Path) -> None:
    """Step 4 is at cursor 11, inside of round 5: far from where it would be without the skipped batches."""
    spec = make_spec(
        tmp_path, "grpo", "optim.steps=22", "align.max_tokens=2", "checkpoint.every=4", "checkpoint.keep=0",
    )  # fmt: skip
    online(spec, tmp_path / "run", skipped=range(7)).run()
    kept = {int(path.stem.split("-")[1]) for path in (tmp_path / "run" / "rollouts").iterdir()}
    assert 5 in kept and 3 not in kept
    OnlineTrainer.resume(tmp_path / "run", step=4, quiet=True).run()


@pytest.mark.parametrize("stop", with_slow([1, 2], [2]))
def test_the_loss_scale_and_health_of_the_critic_are_saved(stop: int, tmp_path: Path) -> None:
    """fp16 with a scale that grows after every second step: a resumed run ends as one that never stopped."""
    spec = make_spec(
        tmp_path, "ppo", "checkpoint.every=1", "checkpoint.keep=0", "optim.steps=4", "optim.schedule=constant",
        "optim.warmup=0", "precision.dtype=fp16", "precision.loss_scale=1024", "precision.loss_scale_window=2",
    )  # fmt: skip
    online(spec, tmp_path / "whole").run()
    online(spec.replace(optim=spec.optim.replace(steps=stop)), tmp_path / "short").run()
    (tmp_path / "short" / "spec.toml").write_text((tmp_path / "whole" / "spec.toml").read_text())
    OnlineTrainer.resume(tmp_path / "short", quiet=True).run()
    states = [saved(tmp_path / name, 4, "critic", "critic_optim") for name in ("whole", "short")]
    assert not differences(*states)
    metas = [read_committed(tmp_path / name / "checkpoints/step-000004").meta for name in ("whole", "short")]
    assert metas[0]["align"]["critic"] == metas[1]["align"]["critic"]
    assert metas[0]["align"]["critic"]["loss_scale"]["scale"] == 4096
    assert len(metas[0]["align"]["critic"]["health"]["losses"]) == 4
