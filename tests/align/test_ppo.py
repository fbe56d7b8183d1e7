"""PPO: four models in one run. Advantages and the critic's gradients against plain functions, layouts against one rank,
resumed runs, a reward model in the loop."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from lmworks.align import gae, masked_whiten, ppo_value_loss
from lmworks.align.online_trainer import OnlineTrainer
from lmworks.align.post_trainer import trainer_class
from lmworks.align.ppo import set_token_advantages
from lmworks.align.rollouts import Rollout
from lmworks.align.rounds import summary
from lmworks.model import GPT
from lmworks.model.reward_stats import STATS, read_stats
from lmworks.prove.parity import parity
from lmworks.record import read_metrics
from lmworks.spec import AlignSpec, CheckpointError
from lmworks.spec.layouts import choose
from lmworks.train.export import export
from post_training import built_online, make_spec, table
from tiny import differences, saved
from variations import with_slow


def rollout(size: int, reward: float, ended: bool = True) -> Rollout:
    values = [0.1 * (index + 1) for index in range(size)]
    old, reference = [-1.0 - 0.1 * index for index in range(size)], [-1.2] * size
    return Rollout(
        0, [1, 2], [5] * size, old, "", ended, reward=reward, old_logps=old, ref_logps=reference, values=values
    )


PLAIN = AlignSpec(method="ppo", whiten_advantages=False, missing_eos_penalty=0.0)


def test_rewards_of_tokens_are_the_kl_penalty_and_the_score_at_the_end() -> None:
    """By hand: δ and A backwards, γ = 1, λ = 0.95."""
    one = rollout(3, reward=2.0)
    set_token_advantages([one], PLAIN, kl_coef=0.5)
    rewards = [-0.5 * 0.2, -0.5 * 0.1, -0.5 * 0.0 + 2.0]
    values = [0.1, 0.2, 0.3]
    third = rewards[2] - values[2]
    second = rewards[1] + values[2] - values[1] + 0.95 * third
    first = rewards[0] + values[1] - values[0] + 0.95 * second
    assert one.advantages == pytest.approx([first, second, third], rel=1e-5)
    assert one.returns == pytest.approx([first + 0.1, second + 0.2, third + 0.3], rel=1e-5)


def test_an_answer_without_an_end_is_penalised() -> None:
    ended, cut = rollout(2, 1.0), rollout(2, 1.0, ended=False)
    set_token_advantages([ended, cut], PLAIN.replace(missing_eos_penalty=1.5, lam=1.0), kl_coef=0.0)
    assert ended.returns == pytest.approx([1.0, 1.0]) and cut.returns == pytest.approx([-0.5, -0.5])


def test_an_answer_without_a_reward_takes_no_part() -> None:
    """Whatever the others earn: an environment that fails must not pay."""
    known, failed = [rollout(3, -3.0), rollout(2, -4.0)], rollout(4, math.nan)
    alone = [Rollout(**vars(one)) for one in known]
    spec = PLAIN.replace(whiten_advantages=True, whiten_rewards=True)
    set_token_advantages(alone, spec, 0.1)
    set_token_advantages([known[0], failed, known[1]], spec, 0.1)
    assert [one.advantages for one in known] == [one.advantages for one in alone]
    assert failed.advantages == [0.0] * 4 and failed.returns == failed.values
    set_token_advantages([failed], spec, 0.1)
    assert failed.advantages == [0.0] * 4


def test_advantages_are_whitened_over_the_round_and_rewards_keep_their_mean() -> None:
    rollouts = [rollout(3, 1.0), rollout(5, -2.0), rollout(1, 0.5)]
    plain = [Rollout(**vars(one)) for one in rollouts]
    set_token_advantages(plain, PLAIN, 0.1)
    set_token_advantages(rollouts, PLAIN.replace(whiten_advantages=True), 0.1)
    flat = torch.tensor([x for one in plain for x in one.advantages or ()])
    want = masked_whiten(flat, torch.ones(9))
    assert [x for one in rollouts for x in one.advantages or ()] == pytest.approx(want.tolist(), abs=1e-5)
    assert [one.returns for one in rollouts] == [one.returns for one in plain]  # returns are not whitened
    set_token_advantages(rollouts, PLAIN.replace(whiten_rewards=True), 0.1)
    assert [one.returns for one in rollouts] != [one.returns for one in plain]


def test_without_a_discount_gae_is_the_difference_of_the_return() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.3, 0.2, 0.1]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, torch.ones(1, 3))
    torch.testing.assert_close(advantages, 1 - values)


def test_the_gradients_of_the_critic_equal_those_of_plain_functions(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "ppo", "align.critic_head=normal", "data.global_batch=16", "align.value_clip=0.1")
    trainer = built_online(spec, tmp_path / "run")
    critic = trainer.critic
    assert critic is not None
    batches = trainer.batches_at(0)
    model = GPT(critic.spec.model, seed=spec.seed)
    sums = critic.forward_backward(batches, critic.count(batches))
    losses, tokens = [], 0
    for one in trainer.rounds.rollouts:
        values = model(torch.tensor([[*one.prompt_ids, *one.token_ids]]))[0]
        first = len(one.prompt_ids) - 1
        own = values[first : first + len(one.token_ids)].unsqueeze(0)
        assert own[0].tolist() == pytest.approx(one.values, abs=1e-5)  # what the round was scored with
        old, returns = torch.tensor([one.values]), torch.tensor([one.returns])
        losses.append(ppo_value_loss(own, old, returns, torch.ones_like(own), 0.1, denominator=1.0)[0])
        tokens += own.numel()
    want = torch.stack(losses).sum() / tokens
    want.backward()
    assert float(sums[0]) / tokens == pytest.approx(float(want.detach()), rel=1e-5)
    for shard in critic.parallel_model.shards:
        grad = dict(model.named_parameters())[shard.name].grad
        torch.testing.assert_close(shard.leaf.grad, grad, atol=1e-5, rtol=1e-3)


def test_a_new_head_gives_values_of_zero(tmp_path: Path) -> None:
    trainer = built_online(make_spec(tmp_path, "ppo"), tmp_path / "run")
    trainer.batches_at(0)
    assert {value for one in trainer.rounds.rollouts for value in one.values or ()} == {0.0}


@pytest.mark.parametrize("names", with_slow(["fsdp2", "tp2", "zero-1"], ["tp2", "zero-1"]))
def test_layouts_give_the_gradients_of_one_rank(names: str, tmp_path: Path) -> None:
    make_spec(tmp_path, "ppo")
    given = table(tmp_path / "ppo.jsonl", "ppo")
    given["align"] |= {"epochs": 5, "critic_head": "normal"}
    given["data"]["global_batch"] = 16
    with parity({**given, "optim": {"optimizer": "sgd", "lr": 0.1}}, quick=True) as proof:
        results = [proof.prove(layout) for layout in choose(names)]
    assert [result.failure for result in results if not result.ok] == []


@pytest.mark.parametrize("stop", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_ends_as_one_that_never_stopped(stop: int, tmp_path: Path) -> None:
    """Policy, critic, both optimizers and the adapted KL coefficient; a round has two steps."""
    spec = make_spec(
        tmp_path, "ppo", "checkpoint.every=1", "checkpoint.keep=0", "optim.steps=4", "optim.schedule=constant",
        "align.kl_horizon=20", "optim.warmup=0",
    )  # fmt: skip
    whole = trainer_class(spec)(spec, tmp_path / "whole", quiet=True)
    whole.run()
    short = spec.replace(optim=spec.optim.replace(steps=stop))
    trainer_class(short)(short, tmp_path / "short", quiet=True).run()
    (tmp_path / "short" / "spec.toml").write_text((tmp_path / "whole" / "spec.toml").read_text())
    OnlineTrainer.resume(tmp_path / "short", quiet=True).run()
    states = [saved(tmp_path / name, 4, "critic", "critic_optim") for name in ("whole", "short")]
    assert any(name.startswith("critic.") for name in states[0])
    assert any(name.startswith("critic_optim.") for name in states[0])
    assert not differences(*states)
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "short")]
    for key in ("loss", "value/loss", "kl_coef"):
        assert [row.get(key) for row in rows[0]] == [row.get(key) for row in rows[1]], key
    coefficients = [row["kl_coef"] for row in rows[0] if "kl_coef" in row]
    assert len(set(coefficients)) == 2  # it has adapted


def reward_model(tmp_path: Path, *overrides: str) -> Path:
    pairs = make_spec(tmp_path, "reward", "optim.steps=2", "data.val_fraction=0.2", *overrides)
    trainer_class(pairs)(pairs, tmp_path / "reward", quiet=True).run()
    return tmp_path / "reward"


@pytest.mark.parametrize("form", with_slow(["run", "exported"], ["run"]))
def test_a_reward_model_scores_the_answers(form: str, tmp_path: Path) -> None:
    """Normalised by the rewards of held-out pairs, which are exported with the weights."""
    folder = reward_model(tmp_path)
    stats = json.loads((folder / STATS).read_text())
    if form == "exported":
        export(folder, tmp_path / "exported")
        folder = tmp_path / "exported"
    assert asdict(read_stats(folder)) == stats and stats["std"] > 0 and stats["step"] == 2
    spec = make_spec(tmp_path, "ppo", "align.rewards=[]", f"align.reward_model={folder}", "optim.steps=2")
    trainer = built_online(spec, tmp_path / "run")
    trainer.batches_at(0)
    model = trainer.rounds.reward_model
    assert model is not None
    network = model.model.parts[0]
    for one in trainer.rounds.rollouts:
        with torch.no_grad():
            values = network(torch.tensor([[*one.prompt_ids, *one.token_ids]]))
        assert one.reward == pytest.approx((float(values[0, -1]) - stats["mean"]) / stats["std"], abs=1e-4)
        assert one.rewards["reward_model"] == one.reward and not math.isnan(one.reward)
    assert math.isfinite(trainer.next_step(trainer.rounds)["value/loss"])


def test_statistics_of_other_weights_are_not_exported(tmp_path: Path) -> None:
    folder = reward_model(tmp_path, "checkpoint.every=1", "checkpoint.keep=0")
    export(folder, tmp_path / "exported")
    assert (tmp_path / "exported" / STATS).is_file()
    export(folder, tmp_path / "exported", step=1)
    assert not (tmp_path / "exported" / STATS).exists()
    (tmp_path / "exported" / STATS).write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object with the numbers"):
        read_stats(tmp_path / "exported")


@pytest.mark.slow  # GRPO does in tests/align/test_online.py
def test_it_learns_to_answer_with_digits(tmp_path: Path) -> None:
    spec = make_spec(
        tmp_path, "ppo", "optim.steps=80", "optim.lr=3e-3", "optim.schedule=constant", "align.samples=2",
        "align.prompts=32", "data.global_batch=32", "align.epochs=2", "data.micro_batch=8", "checkpoint.every=0",
        "align.missing_eos_penalty=0", "align.beta=0.02",
    )  # fmt: skip
    trainer_class(spec)(spec, tmp_path / "run", quiet=True).run()
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in row]
    assert rows[0]["reward/mean"] < 0.15 and rows[-1]["reward/mean"] > 0.3
    assert rows[-1]["value/explained_variance"] > 0.2  # the critic has learnt, too


def test_a_group_without_rewards_leaves_the_metrics_of_the_others() -> None:
    rollouts = [rollout(2, 1.0), rollout(2, 3.0), rollout(2, math.nan), rollout(2, math.nan)]
    for one in rollouts:
        one.rewards = {"source": one.reward}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = summary(rollouts, samples=2, max_tokens=8)
    assert (found["reward/mean"], found["reward/std"], found["reward/equal_groups"]) == (2.0, 1.0, 0.0)
