"""Online methods: log-probabilities of engine and trainer, gradients against plain functions, layouts against one rank,
runs that are resumed inside of a round."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lmworks.align import entropy, grpo_loss, rloo_loss
from lmworks.align.online_trainer import OnlineTrainer
from lmworks.align.post_trainer import trainer_class
from lmworks.align.rollouts import Rollout, by_answer, load_round, micro_batches, save_round, split_over_ranks
from lmworks.model import GPT
from lmworks.prove.parity import parity
from lmworks.record import read_metrics
from lmworks.spec import CheckpointError, RunSpec, SpecError
from lmworks.spec.layouts import choose
from post_training import built_online, make_spec, table, write_prompts
from tiny import differences, saved

SHAPES = {
    "dense": [],
    "tied": ["model.tie_embeddings=true", "model.qk_norm=true"],
    "experts": ["model.experts=4", "model.top_k=2", "model.expert_ffn=16", "model.shared_experts=1"],
    "latent": ["model.kv_lora_rank=16", "model.rope_head_dim=4", "model.v_head_dim=8", "model.kv_heads=4"],
}


def rollout(prompt: int, size: int, answer: int) -> Rollout:
    return Rollout(prompt, list(range(1, size + 1)), list(range(50, 50 + answer)), [-1.5] * answer, "", True)


# --- packing ------------------------------------------------------------------------------------------------


def test_every_answer_is_in_one_micro_batch_of_one_rank() -> None:
    draw = np.random.default_rng(0)
    rollouts = [rollout(i, int(draw.integers(1, 9)), int(draw.integers(1, 20))) for i in range(23)]
    for ranks in (1, 2, 3):
        shares = [micro_batches(rollouts, rank, ranks, 32, 2, pad=0) for rank in range(ranks)]
        assert len({len(share) for share in shares}) == 1  # collectives need the same number on all ranks
        held = sorted(index for share in shares for _, numbers in share for index in numbers)
        assert held == list(range(23))
        tokens = [sum(batch.count() for batch, _ in share) for share in shares]
        assert sum(tokens) == sum(len(one.token_ids) for one in rollouts)
        assert max(tokens) - min(tokens) < 40  # balanced


def test_log_probabilities_are_found_where_the_answers_are_packed() -> None:
    rollouts = [rollout(0, 3, 4), rollout(1, 5, 2), rollout(2, 2, 7)]
    ((batch, numbers),) = micro_batches(rollouts, 0, 1, 32, 2, pad=0)
    # As if the model gave every target its own number: what comes back are the answers' tokens.
    values = torch.where(batch.targets >= 0, batch.targets, -7).float()
    for row, number in zip(by_answer(values, batch), numbers, strict=True):
        ids = rollouts[number].token_ids
        assert row.tolist() == [*ids, *[0] * (7 - len(ids))]
    assert batch.documents is not None and int(batch.documents.max()) == 3
    assert batch.extras["sampler_logps"][0, 0] == -1.5 and "old_logps" not in batch.extras


def test_ranks_share_tokens_evenly() -> None:
    lengths = [100, 90, 10, 10, 10, 10, 10, 10]
    loads = [sum(lengths[index] for index in share) for share in split_over_ranks(lengths, 2)]
    assert sorted(loads) == [120, 130]


def test_a_round_is_kept_exactly(tmp_path: Path) -> None:
    one = rollout(3, 4, 5)
    one.old_logps, one.reward, one.rewards = [0.1, 1 / 3, -2e-30], math.nan, {"exact": 1.0}
    save_round(tmp_path / "round.npz", 7, [one])
    (back,) = load_round(tmp_path / "round.npz")
    assert back.old_logps == one.old_logps and math.isnan(back.reward) and back.rewards == one.rewards
    (tmp_path / "round.npz").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="not the answers of a round"):
        load_round(tmp_path / "round.npz")


# --- a step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "temperature", "steps_a_round"),
    [
        *((shape, 0.7, 2) for shape in SHAPES),
        ("dense", 1.0, 1),
        *(pytest.param(shape, 0.7, 1, marks=pytest.mark.slow) for shape in SHAPES),
        pytest.param("dense", 1.0, 2, marks=pytest.mark.slow),
    ],
)
def test_engine_and_trainer_agree(shape: str, temperature: float, steps_a_round: int, tmp_path: Path) -> None:
    overrides = [f"align.temperature={temperature}", "align.max_tokens=24", f"data.global_batch={16 // steps_a_round}"]
    trainer = built_online(make_spec(tmp_path, "grpo", *overrides, *SHAPES[shape]), tmp_path / "run")
    for _ in range(2):  # and after an update, with the same engine
        values, *_ = [trainer.next_step(trainer.rounds) for _ in range(steps_a_round)]
        assert values["sampler_diff/mean"] <= values["sampler_diff/max"] < 1e-5
        assert values["importance_weight/mean"] == pytest.approx(1, abs=1e-5)
        assert values["hand_over_bytes"] == (0 if shape != "latent" else pytest.approx(kv_b_bytes(trainer)))


def kv_b_bytes(trainer: OnlineTrainer) -> int:
    """The engine stores this projection in another form: it is copied."""
    return sum(p.nbytes for name, p in trainer.model.named_parameters() if name.endswith("kv_b.weight"))


def plain_policy_loss(spec: RunSpec, model: GPT, rollouts: list[Rollout], reference: GPT | None) -> torch.Tensor:
    """Every answer in a pass of its own, by torch's cross-entropy; the loss of all of them at once."""
    longest = max(len(one.token_ids) for one in rollouts)
    rows, references, mask = [], [], torch.zeros(len(rollouts), longest)
    for number, one in enumerate(rollouts):
        ids = torch.tensor([[*one.prompt_ids, *one.token_ids]])
        size = len(one.token_ids)
        mask[number, :size] = torch.tensor(one.mask)

        def logps(network: GPT, ids: torch.Tensor = ids, size: int = size) -> torch.Tensor:
            logits = network(ids[:, :-1])[0, -size:] / spec.align.temperature
            return F.pad(-F.cross_entropy(logits, ids[0, -size:], reduction="none"), (0, longest - size))

        rows.append(logps(model))
        if reference is not None:
            with torch.no_grad():
                references.append(logps(reference))
    advantages = torch.tensor([one.advantage for one in rollouts])
    align = spec.align
    if align.method == "rloo":
        return rloo_loss(torch.stack(rows), None, advantages, mask, align.clip)[0]
    return grpo_loss(
        torch.stack(rows), None, advantages, mask, align.clip, clip_high=align.clip_high,
        ratio="sequence" if align.method == "gspo" else "token",
        aggregation={"dr_grpo": "dr_grpo", "dapo": "dapo"}.get(align.method, "grpo"),  # type: ignore[arg-type]
        max_length=align.max_tokens, ref_logps=torch.stack(references) if references else None, beta=align.beta,
    )[0]  # fmt: skip


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "dapo", "gspo", "rloo"])
def test_gradients_of_a_step_equal_those_of_plain_functions(method: str, tmp_path: Path) -> None:
    beta = "0" if method == "rloo" else "0.2"  # RLOO has its KL in the rewards
    GPT(make_spec(tmp_path, method).model, seed=9).save_hf(tmp_path / "reference")
    spec = make_spec(
        tmp_path, method, "align.temperature=0.8", f"align.beta={beta}", f"align.reference={tmp_path / 'reference'}",
        "data.global_batch=16", "align.importance_cap=0", "align.dynamic_sampling=0",
    )  # fmt: skip
    trainer = built_online(spec, tmp_path / "run")
    batches = trainer.batches_at(0)
    counts = trainer.count(batches)
    sums = trainer.forward_backward(batches, counts)
    reference = GPT.from_hf(tmp_path / "reference") if beta != "0" else None
    model = GPT(spec.model, seed=spec.seed)
    assert len({one.advantage for one in trainer.rounds.rollouts}) > 3
    want = plain_policy_loss(spec, model, trainer.rounds.rollouts, reference)
    want.backward()
    assert float(sums[0]) / counts.units == pytest.approx(float(want.detach()), rel=1e-4, abs=1e-6)
    for shard in trainer.parallel_model.shards:
        grad = dict(model.named_parameters())[shard.name].grad
        torch.testing.assert_close(shard.leaf.grad, grad, atol=1e-5, rtol=1e-3)


def test_layouts_give_the_gradients_of_one_rank(tmp_path: Path) -> None:
    """Steps on the answers of one round: those of later ones would follow from other roundings."""
    make_spec(tmp_path, "grpo")
    given = table(tmp_path / "grpo.jsonl", "grpo")
    given["align"] |= {"epochs": 5, "beta": 0.1}
    given["data"]["global_batch"] = 16
    with parity({**given, "optim": {"optimizer": "sgd", "lr": 0.1}}, quick=True) as proof:
        results = [proof.prove(layout) for layout in choose("fsdp2,tp2")]
    assert [result.failure for result in results if not result.ok] == []
    assert all(result.tokens > 0 for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "tp2-sp", "zero-2", "ddp"])
@pytest.mark.parametrize("method", ["dapo", "gspo", "rloo", "dr_grpo"])
def test_every_online_method_under_every_strategy(method: str, layout: str, tmp_path: Path) -> None:
    make_spec(tmp_path, method)
    given = table(tmp_path / f"{method}.jsonl", method)
    given["align"] |= {"epochs": 5}
    given["data"]["global_batch"] = 16
    with parity({**given, "optim": {"optimizer": "sgd", "lr": 0.1}}, quick=True) as proof:
        (chosen,) = choose(layout)
        result = proof.prove(chosen)
    assert result.ok, result.failure


# --- runs ---------------------------------------------------------------------------------------------------


def test_a_run_resumed_inside_of_a_round_ends_as_one_that_never_stopped(tmp_path: Path) -> None:
    """Two steps a round: resumed in the middle of the first, between two, and in the middle of the second."""
    keys = ("checkpoint.every=1", "checkpoint.keep=0", "optim.steps=5", "optim.schedule=constant")
    spec, whole = make_spec(tmp_path, "grpo", *keys), tmp_path / "whole"
    trainer_class(spec)(spec, whole, quiet=True).run()
    for stop in (1, 2, 3):
        short, run = spec.replace(optim=spec.optim.replace(steps=stop)), tmp_path / f"stopped-{stop}"
        trainer_class(short)(short, run, quiet=True).run()
        (run / "spec.toml").write_text((whole / "spec.toml").read_text())
        OnlineTrainer.resume(run, quiet=True).run()
        assert not differences(saved(whole, 5), saved(run, 5)), stop
        rows = [read_metrics(folder / "metrics.jsonl") for folder in (whole, run)]
        assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]], stop
        assert [row.get("reward/mean") for row in rows[0]] == [row.get("reward/mean") for row in rows[1]], stop


def test_missing_answers_of_a_round_are_named(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "grpo", "checkpoint.every=1", "optim.steps=3", "optim.schedule=constant")
    trainer_class(spec)(spec, tmp_path / "run", quiet=True).run()
    for path in (tmp_path / "run" / "rollouts").iterdir():
        path.unlink()
    text = (tmp_path / "run" / "spec.toml").read_text()
    (tmp_path / "run" / "spec.toml").write_text(text.replace("steps = 3", "steps = 4"))
    with pytest.raises(CheckpointError, match="the answers of the round that this checkpoint is in are missing"):
        OnlineTrainer.resume(tmp_path / "run", quiet=True).run()


def test_adapters_are_sampled_from(tmp_path: Path) -> None:
    """Only they are trained; the engine's weights are base + adapter, and the reference is the base."""
    GPT(make_spec(tmp_path, "grpo").model, seed=3).save_hf(tmp_path / "base")
    spec = make_spec(
        tmp_path, "grpo", f"checkpoint.init={tmp_path / 'base'}", "lora.rank=4", "align.beta=0.1", "optim.lr=0.05",
        "data.global_batch=16",
    )  # fmt: skip
    trainer = built_online(spec, tmp_path / "run")
    seen: list[dict[str, Any]] = []
    for _ in range(3):
        seen.append(trainer.next_step(trainer.rounds))
    assert all(one["sampler_diff/max"] < 1e-5 for one in seen)
    assert seen[0]["kl"] == pytest.approx(0, abs=1e-7) and seen[2]["kl"] > 1e-6
    adapted = sum(
        p.nbytes for name, p in trainer.model.named_parameters() if name in trainer.rollout_engine.updates.adapted
    )
    copied = [one["hand_over_bytes"] for one in seen[:2]]
    assert copied == [adapted, adapted]  # frozen weights are shared, the rest is merged


def test_it_learns_to_answer_with_digits(tmp_path: Path) -> None:
    spec = make_spec(
        tmp_path, "grpo", "optim.steps=25", "optim.lr=5e-3", "optim.schedule=constant", "align.samples=8",
        "align.prompts=8", "data.global_batch=64", "data.micro_batch=8", "checkpoint.every=0",
    )  # fmt: skip
    trainer_class(spec)(spec, tmp_path / "run", quiet=True).run()
    rewards = [row["reward/mean"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert rewards[0] < 0.15 and rewards[-1] > 0.5


def test_dynamic_sampling_draws_further_prompts(tmp_path: Path) -> None:
    """Untrained answers have no digits, mostly: groups of equal rewards are replaced."""
    spec = make_spec(tmp_path, "dapo", "align.samples=2", "align.overlong_buffer=0", "data.global_batch=8")
    trainer = built_online(spec, tmp_path / "run")
    trainer.batches_at(0)
    rewards = np.array([one.reward for one in trainer.rounds.rollouts]).reshape(-1, 2)
    assert trainer.rounds.metrics["reward/equal_groups"] > 0  # there was something to replace
    assert (rewards[:, 0] != rewards[:, 1]).all()


@pytest.mark.parametrize("partial", [0, 0.5])
def test_rewards_are_no_part_of_the_time_of_generation(
    partial: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(tmp_path, "grpo", f"align.partial_rollouts={partial}")
    trainer = built_online(spec, tmp_path / "run")
    finish = trainer.rounds.finish_rewards

    def slow(rollouts: Any) -> None:
        time.sleep(0.5)
        finish(rollouts)

    monkeypatch.setattr(trainer.rounds, "finish_rewards", slow)
    began = time.perf_counter()
    trainer.batches_at(0)
    took, metrics = time.perf_counter() - began, trainer.rounds.metrics
    assert 0.5 <= metrics["reward_s"] < took and 0 < metrics["generate_s"] <= took - metrics["reward_s"]


def test_best_of_n_trains_on_the_best_answers(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "best_of_n", "data.global_batch=4")
    trainer = built_online(spec, tmp_path / "run")
    trainer.batches_at(0)
    kept = trainer.rounds.rollouts
    assert len(kept) == 4 and [one.prompt for one in kept] == [0, 1, 2, 3]


def test_best_of_n_records_the_entropy_of_the_policy(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "best_of_n", "data.global_batch=4")
    trainer = built_online(spec, tmp_path / "run")
    batches = trainer.batches_at(0)
    found = []
    for one in trainer.rounds.chosen(0):
        logits = trainer.model(torch.tensor([[*one.prompt_ids, *one.token_ids[:-1]]]))
        found += entropy(logits)[0, -len(one.token_ids) :].tolist()
    assert trainer.train_step(batches)["entropy"] == pytest.approx(np.mean(found), rel=1e-5)


def test_a_run_ends_early_where_the_policy_is_too_far_from_the_reference(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "grpo", "align.kl_stop=1e-4", "align.beta=0.01", "optim.steps=9", "data.global_batch=16")
    trainer = trainer_class(spec)(spec, tmp_path / "run", quiet=True)
    trainer.run()
    assert 1 < trainer.step < 9
    (event,) = [one for one in trainer.folder.events() if one["kind"] == "early_stop"]
    assert event["reason"] == "kl" and event["kl"] > 1e-4
    assert saved(tmp_path / "run", trainer.step)  # nothing is lost


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["align.rewards=[]"], "needs rewards"),
        (["align.samples=1"], "use 2 or more"),
        (["align.max_tokens=64"], "in data.seq = 64: lower it"),
        (["data.global_batch=6"], "not a multiple of data.global_batch = 6"),
        (["align.reward_weights=[1,2]"], "2 numbers for 1 align.rewards"),
        (["align.rewards=['nope']"], "align.rewards"),
        (["align.method=ppo", "align.samples=1", "align.prompts=8", "align.dynamic_sampling=2"], "(align.samples = 1)"),
        (
            ["align.method=distill", "align.on_policy=true", "align.teacher=tiny", "align.dynamic_sampling=2"],
            "distill has no rewards; use align.dynamic_sampling=0",
        ),
        (["align.partial_rollouts=0.5", "checkpoint.remote=file:///backup"], "use align.partial_rollouts=0"),
        (["align.kl_stop=1"], "set align.beta to more than 0"),
        (["align.beta=-0.5"], "or -1 for the method's default"),
    ],
)
def test_wrong_specs_are_refused(overrides: list[str], message: str, tmp_path: Path) -> None:
    write_prompts(tmp_path / "grpo.jsonl")
    with pytest.raises(SpecError, match=re.escape(message)):
        spec = make_spec(tmp_path, "grpo", *overrides)
        trainer_class(spec)(spec, tmp_path / "run", quiet=True)


def test_a_round_may_have_fewer_answers_than_rows(tmp_path: Path) -> None:
    """data.global_batch follows from the round: the spec that is written must be readable."""
    spec = make_spec(
        tmp_path, "grpo", "data.global_batch=0", "align.prompts=2", "align.samples=2", "data.micro_batch=4",
        "parallel.dp=2",
    )  # fmt: skip
    assert spec.data.global_batch == 4 and spec.accumulation == 1
    assert RunSpec.from_dict(spec.to_dict()) == spec


def test_an_engine_with_other_weights_is_noticed(tmp_path: Path) -> None:
    trainer = built_online(make_spec(tmp_path, "grpo", "data.global_batch=16"), tmp_path / "run")
    trainer.next_step(trainer.rounds)
    assert not [one for one in trainer.folder.events() if one["kind"] == "sampler_mismatch"]
    runner: Any = trainer.rollout_engine.engine.runner
    runner.logit_scale = 0.8  # as if it sampled at another temperature than the loss assumes
    trainer.next_step(trainer.rounds)
    (event,) = [one for one in trainer.folder.events() if one["kind"] == "sampler_mismatch"]
    assert event["difference"] > event["limit"] == 1e-4


def test_answers_that_a_checkpoint_needs_are_kept(tmp_path: Path) -> None:
    """A run resumed inside of round 1 needs its answers, however many rounds came after."""
    often = ["checkpoint.every=3", "checkpoint.keep=0"]
    spec = make_spec(tmp_path, "grpo", "optim.steps=24", "align.max_tokens=2", *often)
    trainer_class(spec)(spec, tmp_path / "run", quiet=True).run()
    kept = {int(path.stem.split("-")[1]) for path in (tmp_path / "run" / "rollouts").iterdir()}
    assert {1, 2, 4, 5, 7, *range(4, 12)} <= kept and 0 not in kept  # steps 3, 9 and 15 are inside of 1, 4 and 7
