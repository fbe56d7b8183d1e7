"""Partial rollouts: unfinished answers go on in the next round, none of their tokens is sampled twice."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lmworks.align import grpo_loss
from lmworks.align.online_trainer import OnlineTrainer
from lmworks.align.partial_rollouts import PartialSampler
from lmworks.align.policy_objective import PolicyObjective
from lmworks.align.post_trainer import trainer_class
from lmworks.align.rollouts import Rollout, ignored, load_round, micro_batches, packed_batch
from lmworks.model import GPT
from lmworks.parallel.local_ranks import on_ranks
from lmworks.record import read_metrics
from lmworks.spec import AlignSpec, CheckpointError, RunSpec, SpecError
from post_training import built_online, make_spec, save_terse_model
from tiny import differences, saved, write_spec


def partial_spec(tmp_path: Path, *overrides: str, method: str = "grpo") -> RunSpec:
    """4 prompts a round of 6 in flight, with 4 answers of up to 40 tokens each."""
    if not (tmp_path / "start").exists():
        save_terse_model(make_spec(tmp_path, method), tmp_path / "start")
    return make_spec(
        tmp_path, method, f"checkpoint.init={tmp_path / 'start'}", "align.partial_rollouts=0.5", "align.max_tokens=40",
        "data.global_batch=16", "optim.schedule=constant", *overrides,
    )  # fmt: skip


def sampler_of(trainer: OnlineTrainer) -> PartialSampler:
    assert isinstance(trainer.rounds.sampler, PartialSampler)
    return trainer.rounds.sampler


def test_a_batch_that_only_takes_part_in_collectives_has_no_fresh_tokens() -> None:
    """Or the log-probabilities that the sampler gave to them would be compared with 0."""
    batch = packed_batch([[Rollout(0, [5], [6, 7], [-3.0, -4.0], "", True, stale_tokens=1)]], 4, 0)
    assert batch.extras["fresh"].tolist() == [[False, True]]
    assert not ignored(batch).extras["fresh"].any() and not ignored(batch).extras["mask"].any()


def test_no_token_is_sampled_twice_and_groups_stay_together(tmp_path: Path) -> None:
    trainer = built_online(partial_spec(tmp_path), tmp_path / "run")
    engine: Any = trainer.rollout_engine
    sampled: dict[int, list[list[int]]] = defaultdict(list)  # prompt → what the engine gave for it
    generate = engine.generate_until

    def recorded(asked: Any, groups: int = 0) -> Any:
        found = generate(asked, groups)
        for one, completions in zip(asked, found, strict=True):
            sampled[one.group] += [list(answer.token_ids) for answer in completions]
        return found

    engine.generate_until = recorded
    trained: dict[int, list[Rollout]] = {}
    carried = reused = 0
    for step in range(5):
        trainer.batches_at(step)
        rollouts, metrics = trainer.rounds.rollouts, trainer.rounds.metrics
        numbers = [one.prompt for one in rollouts]
        assert len(rollouts) == 16 and numbers == sorted(numbers) and len(set(numbers)) == 4
        for number in set(numbers):
            assert number not in trained  # a prompt is trained on once
            trained[number] = [one for one in rollouts if one.prompt == number]
            assert len(trained[number]) == 4
        for one in rollouts:
            assert not one.unfinished and (one.ended or len(one.token_ids) == 40)
            assert len(one.token_ids) == len(one.sampler_logps) == len(one.mask)
            assert (one.token_ids[-1] == 256) == one.ended
            assert one.text == trainer.batches.tokenizer.decode(one.token_ids)
        begun = [one for one in rollouts if one.stale_tokens]
        assert metrics["partial/carried_over"] == len(begun) / 16
        assert metrics["partial/reused_tokens"] == sum(one.stale_tokens for one in begun)
        carried, reused = carried + len(begun), reused + int(metrics["partial/reused_tokens"])
        assert len(sampler_of(trainer).carried) == 2 and sampler_of(trainer).prompts_taken == 4 * step + 6
    assert carried > 4 and reused > 20
    groups = {**trained, **{group.number: group.answers for group in sampler_of(trainer).carried}}
    assert sorted(groups) == list(range(22))  # no prompt is left out
    for number, answers in groups.items():
        parts = sum(len(part) for part in sampled[number])
        assert parts == sum(len(answer.token_ids) for answer in answers)  # nothing is thrown away, nothing repeated


def test_earlier_tokens_keep_the_log_probabilities_of_the_weights_that_sampled_them(tmp_path: Path) -> None:
    trainer = built_online(partial_spec(tmp_path, "optim.lr=0.02"), tmp_path / "run")
    old = GPT.from_hf(tmp_path / "start")
    values = trainer.next_step(trainer.rounds)
    assert values["sampler_diff/max"] < 1e-5 and values["partial/carried_over"] == 0
    waiting = {
        (answer.prompt, place): answer
        for group in load_carried(tmp_path / "run", 0)
        for place, answer in enumerate(group)
        if answer.unfinished and answer.token_ids
    }
    assert waiting
    values = trainer.next_step(trainer.rounds)
    assert values["sampler_diff/max"] < 1e-5  # of the tokens that the weights at hand sampled
    assert values["importance_weight/mean"] != pytest.approx(1, abs=1e-4)  # the others are weighed
    seen = 0
    for place, one in ((index % 4, one) for index, one in enumerate(trainer.rounds.rollouts)):
        before = waiting.get((one.prompt, place))
        if before is None:
            continue
        size = len(before.token_ids)
        assert one.stale_tokens == size and one.token_ids[:size] == before.token_ids
        assert one.sampler_logps[:size] == before.sampler_logps
        ids = torch.tensor([[*one.prompt_ids, *before.token_ids]])
        logits = old(ids[:, :-1])[0, -size:]
        logps = -F.cross_entropy(logits, ids[0, -size:], reduction="none")
        torch.testing.assert_close(torch.tensor(before.sampler_logps), logps.detach(), atol=1e-5, rtol=1e-5)
        seen += 1
    assert seen


def load_carried(run: Path, number: int) -> list[list[Rollout]]:
    answers = load_round(run / "rollouts" / f"carried-{number:06d}.npz")
    return [answers[place : place + 4] for place in range(0, len(answers), 4)]


def test_gradients_have_the_importance_weights(tmp_path: Path) -> None:
    """Against plain functions over whole logits, in a round with tokens of older weights."""
    spec = partial_spec(tmp_path, "optim.lr=0.02", "align.importance_cap=1.5")
    trainer = built_online(spec, tmp_path / "run")
    trainer.next_step(trainer.rounds)
    weights = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    batches = trainer.batches_at(1)
    counts = trainer.count(batches)
    for shard in trainer.parallel_model.shards:
        shard.leaf.grad = None
    trainer.forward_backward(batches, counts)
    model = GPT(spec.model)
    model.load_state_dict(weights)
    rollouts = trainer.rounds.rollouts
    longest = max(len(one.token_ids) for one in rollouts)
    logps, sampler, mask = (torch.zeros(16, longest) for _ in range(3))
    rows = []
    for row, one in enumerate(rollouts):
        ids, size = torch.tensor([[*one.prompt_ids, *one.token_ids]]), len(one.token_ids)
        found = -F.cross_entropy(model(ids[:, :-1])[0, -size:], ids[0, -size:], reduction="none")
        rows.append(F.pad(found, (0, longest - size)))
        sampler[row, :size], mask[row, :size] = torch.tensor(one.sampler_logps), 1
    logps = torch.stack(rows)
    ratio = ((logps.detach() - sampler) * mask).exp()
    assert (ratio > 1.5).any() and ratio.std() > 0.01
    advantages = torch.tensor([one.advantage for one in rollouts])
    loss, _ = grpo_loss(logps, None, advantages, mask, 0.2, sampler_logps=sampler, importance_cap=1.5)
    loss.backward()
    for shard in trainer.parallel_model.shards:
        grad = dict(model.named_parameters())[shard.name].grad
        torch.testing.assert_close(shard.leaf.grad, grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("stop", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_with_the_unfinished_answers(stop: int, tmp_path: Path) -> None:
    """Stopped inside of a round (two steps each) and between rounds: bitwise like one that never stopped."""
    fixed = ["data.global_batch=8", "checkpoint.every=1", "checkpoint.keep=0", "optim.steps=5", "optim.lr=1e-3"]
    spec = partial_spec(tmp_path, *fixed)
    trainer_class(spec)(spec, tmp_path / "whole", quiet=True).run()
    short = spec.replace(optim=spec.optim.replace(steps=stop))
    trainer_class(short)(short, tmp_path / "short", quiet=True).run()
    (tmp_path / "short" / "spec.toml").write_text((tmp_path / "whole" / "spec.toml").read_text())
    OnlineTrainer.resume(tmp_path / "short", quiet=True).run()
    assert not differences(saved(tmp_path / "whole", 5), saved(tmp_path / "short", 5))
    whole, resumed = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "short"))
    names = ("loss", "reward/mean", "partial/carried_over", "partial/reused_tokens", "partial/waiting")
    for name in names:
        assert [row.get(name) for row in whole] == [row.get(name) for row in resumed], name
    assert whole[-1]["partial/carried_over"] > 0


def run_on_rank(_rank: int, spec: RunSpec, run: Path, resumed: bool) -> None:
    kind = trainer_class(spec)
    (kind.resume(run, quiet=True) if resumed else kind(spec, run, quiet=True)).run()


def test_two_ranks_share_what_is_in_flight(tmp_path: Path) -> None:
    """Resumed on one rank, which goes on with the unfinished answers of both."""
    layout = ["parallel.dp=2", "parallel.strategy=ddp", "checkpoint.every=1", "optim.steps=2"]
    run = tmp_path / "run"
    on_ranks(2, run_on_rank, partial_spec(tmp_path, *layout), run, False, group=False, timeout=120)
    write_spec(partial_spec(tmp_path, "checkpoint.every=1", "optim.steps=4"), run / "spec.toml")
    OnlineTrainer.resume(run, quiet=True).run()
    trained: list[int] = []
    for number in range(4):
        rollouts = load_round(run / "rollouts" / f"round-{number:06d}.npz")
        numbers = [one.prompt for one in rollouts]
        assert len(rollouts) == 16 and all(numbers.count(one) == 4 for one in numbers)
        assert not any(one.unfinished for one in rollouts)
        assert not set(numbers) & set(trained)
        trained += set(numbers)
    assert sum(row["partial/reused_tokens"] for row in read_metrics(run / "metrics.jsonl")) > 0
    carried = [group[0].prompt for group in load_carried(run, 3)]
    assert sorted([*trained, *carried]) == list(range(18))


def test_missing_unfinished_answers_are_named(tmp_path: Path) -> None:
    spec = partial_spec(tmp_path, "checkpoint.every=1", "optim.steps=1")
    trainer_class(spec)(spec, tmp_path / "run", quiet=True).run()
    for path in (tmp_path / "run" / "rollouts").glob("carried-*"):
        path.unlink()
    text = (tmp_path / "run" / "spec.toml").read_text()
    (tmp_path / "run" / "spec.toml").write_text(text.replace("steps = 1", "steps = 2"))
    with pytest.raises(CheckpointError, match=r"carried-000000.npz: the answers of the round .* are missing"):
        OnlineTrainer.resume(tmp_path / "run", quiet=True).run()


def test_dynamic_sampling_takes_from_the_same_pool(tmp_path: Path) -> None:
    trainer = built_online(
        partial_spec(tmp_path, "align.dynamic_sampling=2", "align.overlong_buffer=0", method="dapo"), tmp_path / "run"
    )
    trained: list[int] = []
    for step in range(2):
        trainer.batches_at(step)
        numbers = [one.prompt for one in trainer.rounds.rollouts]
        assert all(numbers.count(number) == 4 for number in numbers)
        trained += set(numbers)
    assert len(set(trained)) == len(trained)
    draws, rest = divmod(sampler_of(trainer).prompts_taken - 2, 4)
    assert draws > 2 and not rest  # more than one a round; each takes 4 prompts, the first 6
    assert not set(trained) & {group.number for group in sampler_of(trainer).carried}


@pytest.mark.parametrize(
    ("method", "overrides", "message"),
    [
        ("rloo", [], "rloo' has no importance weights for stale answers; use align.partial_rollouts=0"),
        ("grpo", ["align.importance_cap=0"], "answers of older weights need importance weights"),
        ("grpo", ["align.environment=python"], "cannot be combined with align.environment"),
        ("grpo", ["align.rollout_ranks=1", "align.max_staleness=0"], "cannot be combined with align.rollout_ranks"),
        ("grpo", ["align.partial_rollouts=-1"], "align.partial_rollouts"),
    ],
)
def test_what_does_not_go_together_is_refused(method: str, overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message.replace(".", r"\.")):
        make_spec(tmp_path, method, "align.partial_rollouts=0.5", *overrides)


def test_the_difference_of_the_sampler_is_a_mean_over_fresh_tokens() -> None:
    """One micro-batch has none of them: it must not dilute the mean that the alarm is for."""
    stale = Rollout(0, [1, 2], [5] * 6, [-1.0] * 6, "", True, stale_tokens=6, reward=1.0)
    fresh = Rollout(0, [1, 2], [5] * 6, [-0.7] * 6, "", True, stale_tokens=2, reward=0.0)
    objective = PolicyObjective(AlignSpec(method="grpo", rewards=["exact"]))
    for batch, _ in micro_batches([stale, fresh], 0, 1, seq=8, rows=1, pad=0):
        logps = torch.full(batch.targets.shape, -0.5, requires_grad=True)
        found = SimpleNamespace(logps=logps, entropies=torch.zeros(batch.targets.shape))
        objective.loss(lambda _batch, found=found, **_options: found, batch)
    assert objective.metrics(None)["sampler_diff/mean"] == pytest.approx(0.2, rel=1e-5)
