"""Runs that end before their last step: by KL, or where only the reward of training prompts rises; and the samples that
a run keeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from lmworks.align.early_stop import EarlyStop
from lmworks.align.online_trainer import HeldOutReward, OnlineTrainer
from lmworks.align.rollouts import Rollout, load_round
from lmworks.align.samples import samples_of
from lmworks.record import read_metrics
from lmworks.record.event_text import describe_event
from lmworks.record.samples import has_samples, read_samples, spread
from lmworks.spec import SpecError
from lmworks.train.checkpoint_manager import CheckpointManager
from lmworks.train.evaluate import Evaluation
from post_training import make_spec
from tiny import differences, saved, write_spec


def reasons(stop: EarlyStop, rounds: list[tuple[float, float]]) -> list[str]:
    """After each evaluation: the rewards of a training round and of held-out prompts."""
    found = []
    for training, held_out in rounds:
        stop.record_step({"reward/mean": training, "kl_answer": 1.0})
        stop.record_step({"loss": 0.5})  # the second step of the round
        stop.record_evaluation(held_out)
        found.append(stop.reason)
    return found


@pytest.mark.parametrize(
    ("rounds", "ends"),
    [
        ([(0.1, 0.1), (0.2, 0.2), (0.3, 0.2), (0.4, 0.1)], [False, False, False, True]),
        ([(0.1, 0.1), (0.2, 0.2), (0.3, 0.1), (0.4, 0.3)], [False] * 4),  # it has risen again
        ([(0.3, 0.3), (0.2, 0.2), (0.1, 0.1), (0.3, 0.1)], [False] * 4),  # neither rises: not learning is no hacking
        ([(0.3, 0.3), (0.2, 0.2), (0.1, 0.1), (0.31, 0.1)], [False, False, False, True]),
        ([(0.1, 0.3), (0.2, math.nan), (0.3, math.nan), (0.4, 0.2)], [False] * 4),  # nan says nothing
    ],
)
def test_a_held_out_reward_that_does_not_follow_ends_a_run(rounds: list[tuple[float, float]], ends: list[bool]) -> None:
    assert reasons(EarlyStop(0.0, 2), rounds) == ["held_out" if one else "" for one in ends]
    assert not any(reasons(EarlyStop(0.0, 0), rounds))
    assert reasons(EarlyStop(0.9, 0), rounds) == ["kl"] * 4


def test_the_training_reward_is_a_mean_since_the_last_evaluation() -> None:
    stop = EarlyStop(0.0, 1)
    for training, held_out in (([0.2, 0.6], 0.5), ([0.1, 0.6], 0.4)):
        for reward in training:
            stop.record_step({"reward/mean": reward})
        stop.record_evaluation(held_out)
    assert stop.state.training_at_best == pytest.approx(0.4) and stop.state.training == pytest.approx(0.35)
    assert stop.reason == ""


class Memorizing(OnlineTrainer):
    """What it learns does not carry over to held-out prompts."""

    def measure_held_out(self) -> Evaluation:
        return HeldOutReward(-0.125, 4, {"reward/mean": 0.125}, "answer")


def test_a_run_that_ended_early_is_saved_and_stays_so(tmp_path: Path) -> None:
    spec = make_spec(
        tmp_path, "grpo", "optim.steps=40", "optim.lr=5e-3", "optim.schedule=constant", "align.samples=8",
        "data.global_batch=32", "data.micro_batch=8", "checkpoint.every=3", "log.eval_every=2", "align.held_out_stop=2",
    )  # fmt: skip
    whole = Memorizing(spec, tmp_path / "whole", quiet=True)
    whole.run()
    assert 6 <= whole.step < 40 and whole.step % 2 == 0
    (event,) = [one for one in whole.folder.events() if one["kind"] == "early_stop"]
    assert event["reason"] == "held_out" and event["best"] == 0.125 and event["evaluations"] >= 2
    assert event["training"] > event["training_at_best"]
    assert describe_event(event).startswith("ended early: the reward of held-out prompts has not risen above 0.125 for")
    assert saved(tmp_path / "whole", whole.step)
    again = Memorizing.resume(tmp_path / "whole", quiet=True)
    again.run()
    assert again.step == whole.step and read_metrics(tmp_path / "whole" / "metrics.jsonl")[-1]["attempt"] == 0
    # One that is resumed in between ends at the same step, with the same weights.
    short = spec.replace(optim=spec.optim.replace(steps=5))
    Memorizing(short, tmp_path / "short", quiet=True).run()
    (tmp_path / "short" / "spec.toml").write_text((tmp_path / "whole" / "spec.toml").read_text())
    resumed = Memorizing.resume(tmp_path / "short", quiet=True)
    resumed.run()
    assert resumed.step == whole.step
    assert not differences(saved(tmp_path / "whole", whole.step), saved(tmp_path / "short", whole.step))


def test_a_checkpoint_from_before_it_was_saved_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(tmp_path, "grpo", "optim.schedule=constant")
    short = spec.replace(optim=spec.optim.replace(steps=2))
    meta = CheckpointManager.meta

    def older_meta(manager: CheckpointManager, cursor: int) -> dict[str, Any]:
        found = meta(manager, cursor)
        del found["align"]["early_stop"]
        return found

    with monkeypatch.context() as older:
        older.setattr(CheckpointManager, "meta", older_meta)
        OnlineTrainer(short, tmp_path / "run", quiet=True).run()
    write_spec(spec, tmp_path / "run" / "spec.toml")
    resumed = OnlineTrainer.resume(tmp_path / "run", quiet=True)
    resumed.run()
    assert resumed.step == spec.optim.steps > 2


def test_it_needs_evaluations(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"align\.held_out_stop compares rewards of evaluations: set log\.eval_every"):
        make_spec(tmp_path, "grpo", "align.held_out_stop=2")


# --- samples ------------------------------------------------------------------------------------------------


def test_a_run_keeps_samples_of_its_rounds(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "grpo", "optim.steps=4", "checkpoint.every=0")  # two steps a round
    OnlineTrainer(spec, tmp_path / "run", quiet=True).run()
    rounds = read_samples(tmp_path / "run" / "samples.jsonl")
    assert [(line["round"], line["step"]) for line in rounds] == [(0, 1), (1, 3)]
    for line in rounds:
        rollouts = load_round(tmp_path / "run" / "rollouts" / f"round-{line['round']:06d}.npz")
        rewards = [one["reward"] for one in line["answers"]]
        assert len(rewards) == 4 and rewards == sorted(rewards, reverse=True)
        assert rewards[0] == max(one.reward for one in rollouts) and rewards[-1] == min(one.reward for one in rollouts)
        for one in line["answers"]:
            (found,) = {
                (r.ended, len(r.token_ids)) for r in rollouts if (r.text, r.reward) == (one["answer"], one["reward"])
            }
            assert found == (one["ended"], one["tokens"])
            assert one["prompt"].endswith("=") and list(one["rewards"].values()) == [one["reward"]]


def test_answers_without_a_reward_are_never_the_best() -> None:
    rollouts = [Rollout(0, [65], [66], [-1.0], f"{index}", True) for index in range(6)]
    rollouts[4].reward = -2.0
    found = samples_of(rollouts, 0, 0, bytes)  # type: ignore[arg-type]
    assert found[0]["answer"] == "4" and [one["reward"] for one in found] == [-2.0, None, None, None]
    assert len({one["answer"] for one in found}) == 4


def test_about_a_hundred_rounds_have_samples() -> None:
    for rounds in (1, 7, 100, 999, 12_345):
        kept = [number for number in range(rounds) if has_samples(number, rounds)]
        assert kept[0] == 0 and kept[-1] == rounds - 1
        assert min(rounds, 100) <= len(kept) <= 125
    assert [one["n"] for one in spread([{"n": n} for n in range(10)], 4)] == [0, 3, 6, 9]
