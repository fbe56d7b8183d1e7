"""Rollout engines over several ranks of the trainer: answers, log-probabilities and trained weights are those of one
rank; bytes are those of the planner; runs are resumed bitwise."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.align.post_trainer import trainer_class
from lmworks.model import GPT
from lmworks.parallel.local_ranks import on_ranks
from lmworks.plan.exact.hand_over import hand_over_bytes
from lmworks.plan.memory.phases import held_beside
from lmworks.prove.parity import parity
from lmworks.spec import RunSpec, SpecError
from lmworks.spec.elastic import sizes
from lmworks.spec.layouts import choose
from lmworks.train.rank_memory import storage_bytes
from post_training import built_online, make_spec, table
from tiny import differences, saved

LAYOUTS = {
    "fsdp2": ["parallel.dp=2", "parallel.strategy=fsdp2"],
    "tp2": ["parallel.tp=2"],
    "zero-2": ["parallel.dp=2", "parallel.strategy=zero", "parallel.zero=2"],
    "fsdp2 of 4": ["parallel.dp=4", "parallel.strategy=fsdp2"],
    "fsdp2-tp2": ["parallel.dp=2", "parallel.tp=2", "parallel.strategy=fsdp2"],
    "hsdp": ["parallel.dp_replicate=2", "parallel.dp_shard=2", "parallel.strategy=fsdp2"],
    "tp4": ["parallel.tp=4"],
    "expert parallel": ["parallel.dp=2", "parallel.ep=2", "parallel.strategy=fsdp2"],
}
EXPERTS = ["model.experts=4", "model.top_k=2", "model.expert_ffn=16", "model.shared_experts=1"]
SHAPES = {
    "dense": [],
    "experts": [*EXPERTS, "model.balance_bias=0.1"],
    "one key head": ["model.kv_heads=1", "model.tie_embeddings=true"],
    "latent": ["model.kv_lora_rank=16", "model.rope_head_dim=4", "model.v_head_dim=8", "model.kv_heads=4"],
}
# Two rounds of two steps each: the trainer's log-probabilities are computed before the first.
ROUNDS = ["align.temperature=0.7", "align.epochs=2", "data.global_batch=16", "optim.optimizer=sgd", "optim.lr=0.5"]


def two_rounds(_rank: int, spec: RunSpec, run: Path) -> dict[str, Any]:
    """What a rank's engine holds, both rounds, and the weights at the end, whole."""
    trainer = built_online(spec, run)
    engine = trainer.rounds.sampler.engine  # type: ignore[attr-defined]
    asleep = storage_bytes([engine.runner.cache.store])
    engine.wake()
    sizes = {name: sum(slot.tensor.nbytes for slot in slots) for name, slots in engine.weights.slots.items()}
    held = [sum(size for name, size in sizes.items() if (name in engine.shared) == shared) for shared in (False, True)]
    cache = storage_bytes([engine.runner.cache.store])
    engine.sleep()
    rounds = []
    for _ in range(2):
        values, _ = (trainer.next_step(trainer.rounds) for _ in range(2))
        rounds.append({**values, "answers": [one.token_ids for one in trainer.rounds.rollouts]})
    with torch.no_grad():
        weights = {name: weight.clone() for name, weight in trainer.parallel_model.whole_weights()}
    return {"held": held, "cache": cache, "asleep": asleep, "rounds": rounds, "weights": weights}


def compare_with_one_rank(spec: RunSpec, whole: RunSpec, folder: Path) -> list[dict[str, Any]]:
    """`spec` on its ranks against `whole` on one."""
    (one,) = on_ranks(1, two_rounds, whole, folder / "one", launched=False)
    ranks = on_ranks(spec.parallel.world, two_rounds, spec, folder / "ranks")
    _, planned = held_beside(spec, None, 0)
    assert planned is not None
    for rank, found in enumerate(ranks):
        moved = [hand_over_bytes(spec, rank, first=True), hand_over_bytes(spec, rank)]
        assert (found["held"], found["cache"], found["asleep"]) == ([planned.weights, planned.shared], planned.cache, 0)
        for values, expected, plan in zip(found["rounds"], one["rounds"], moved, strict=True):
            assert values["sampler_diff/max"] < 1e-5
            assert values["answers"] == expected["answers"]
            assert (values["hand_over_received_bytes"], values["hand_over_bytes"]) == (plan.received, plan.copied)
        for name, weight in one["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, atol=1e-5, rtol=1e-5, msg=name)
    assert one["rounds"][0]["answers"] != one["rounds"][1]["answers"]
    return ranks


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("fsdp2", "experts"),
        pytest.param("tp2", "dense", marks=pytest.mark.slow),
        pytest.param("fsdp2", "dense", marks=pytest.mark.slow),
        pytest.param("tp2", "experts", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_are_one_engine(layout: str, shape: str, tmp_path: Path) -> None:
    make = functools.partial(make_spec, tmp_path, "grpo", *ROUNDS, *SHAPES[shape])
    spec = make("align.engine_tp=2", *LAYOUTS[layout])
    compare_with_one_rank(spec, make(), tmp_path)
    if layout == "tp2":  # the trainer's shards are the engine's, but for the choice biases of 4 experts in 2 layers
        plan = hand_over_bytes(spec)
        assert plan.received == 0 and plan.copied == (0 if shape == "dense" else 2 * 4 * 4)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("fsdp2", "nf4"),
        pytest.param("fsdp2", "dense", marks=pytest.mark.slow),
        pytest.param("tp2", "dora", marks=pytest.mark.slow),
        pytest.param("fsdp2-tp2", "int8", marks=pytest.mark.slow),
    ],
)
def test_merged_adapters_of_two_ranks(layout: str, shape: str, tmp_path: Path) -> None:
    """Frozen weights travel once. Five rows of A do not divide by two: the message is padded."""
    adapters = ["lora.rank=5", "optim.lr=5", "align.beta=0.1", f"lora.dora={'true' if shape == 'dora' else 'false'}"]
    adapters += [f"lora.base={shape}"] if shape in ("nf4", "int8") else []
    GPT(make_spec(tmp_path, "grpo").model, seed=3).save_hf(tmp_path / "base")
    make = functools.partial(make_spec, tmp_path, "grpo", *ROUNDS, f"checkpoint.init={tmp_path / 'base'}", *adapters)
    spec = make("align.engine_tp=2", *LAYOUTS[layout])
    compare_with_one_rank(spec, make(), tmp_path)
    first, later = hand_over_bytes(spec, first=True), hand_over_bytes(spec)
    assert first.copied == later.copied if layout == "tp2" else first.copied > later.copied


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "layout", "overrides"),
    [
        ("grpo", "fsdp2", ["lora.base=nf4"]),
        ("grpo", "tp2", ["lora.base=int8"]),
        ("ppo", "fsdp2", []),  # the critic is a further adapter
        ("grpo", "fsdp2", ["precision.dtype=bf16", "precision.weights=bf16"]),
    ],
)
def test_hand_overs_over_a_frozen_base(method: str, layout: str, overrides: list[str], tmp_path: Path) -> None:
    GPT(make_spec(tmp_path, "grpo").model, seed=3).save_hf(tmp_path / "base")
    start = [f"checkpoint.init={tmp_path / 'base'}", "lora.rank=4", "align.engine_tp=2"]
    spec = make_spec(tmp_path, method, *ROUNDS, *start, *LAYOUTS[layout], *overrides)
    for rank, found in enumerate(on_ranks(2, two_rounds, spec, tmp_path / "run")):
        for first, values in zip((True, False), found["rounds"], strict=True):
            plan = hand_over_bytes(spec, rank, first)
            assert (values["hand_over_received_bytes"], values["hand_over_bytes"]) == (plan.received, plan.copied)
            assert values["sampler_diff/max"] < (1e-5 if spec.precision.dtype == "fp32" else 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "shape", "tp"),
    [
        ("fsdp2 of 4", "dense", 2),  # two engines, and rows of the vocabulary that do not divide by 4
        ("fsdp2 of 4", "experts", 2),
        ("hsdp", "dense", 4),  # an engine over both copies of the shards
        ("hsdp", "experts", 2),
        ("fsdp2-tp2", "dense", 2),  # gathered over the data-parallel ranks alone
        ("fsdp2-tp2", "experts", 4),
        ("tp2", "one key head", 2),
        ("fsdp2", "latent", 2),
        ("zero-2", "one key head", 2),
        ("expert parallel", "experts", 2),
        ("tp4", "dense", 2),  # engines of fewer ranks than the trainer's layers
        ("tp4", "one key head", 4),
    ],
)
def test_every_layout_gives_the_answers_of_one_rank(layout: str, shape: str, tp: int, tmp_path: Path) -> None:
    vocab = f"model.vocab={260 if tp == 4 or layout == 'tp4' else 258}"
    make = functools.partial(make_spec, tmp_path, "grpo", *ROUNDS, vocab, *SHAPES[shape])
    compare_with_one_rank(make(f"align.engine_tp={tp}", *LAYOUTS[layout]), make(), tmp_path)


def test_gradients_are_those_of_one_rank(tmp_path: Path) -> None:
    """`lmworks prove parity` of a spec whose engines have two ranks."""
    make_spec(tmp_path, "grpo")
    given = table(tmp_path / "grpo.jsonl", "grpo")
    given["align"] |= {"epochs": 5, "engine_tp": 2}
    given["data"]["global_batch"] = 16
    with parity({**given, "optim": {"optimizer": "sgd", "lr": 0.1}}, quick=True) as proof:
        result = proof.prove(choose("fsdp2")[0])
    assert result.ok, result.failure
    assert result.tokens > 0


def trained_run(_rank: int, spec: RunSpec, run: Path) -> None:
    kind = trainer_class(spec)
    trainer = kind.resume(run, quiet=True) if (run / "spec.toml").exists() else kind(spec, run, quiet=True)
    trainer.run()


@pytest.mark.slow
def test_two_rollout_ranks_are_one_engine(tmp_path: Path) -> None:
    """Beside the trainer's: whole weights arrive, and each keeps its shard."""
    steps = [*ROUNDS, "optim.steps=4", "optim.schedule=constant", "checkpoint.every=4"]
    whole = make_spec(tmp_path, "grpo", *steps)
    on_ranks(1, trained_run, whole, tmp_path / "one", launched=False)
    spec = make_spec(tmp_path, "grpo", *steps, "align.rollout_ranks=2", "align.engine_tp=2", "align.max_staleness=0")
    on_ranks(3, trained_run, spec, tmp_path / "ranks", group=False)
    one, found = (saved(tmp_path / name, 4) for name in ("one", "ranks"))
    for name in (name for name in one if name.startswith("model.")):
        torch.testing.assert_close(found[name], one[name], atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 2])
def test_a_resumed_run_ends_as_one_that_never_stopped(stop: int, tmp_path: Path) -> None:
    often = ["checkpoint.every=1", "optim.steps=4", "optim.schedule=constant", "align.engine_tp=2", *LAYOUTS["fsdp2"]]
    spec = make_spec(tmp_path, "grpo", *often)  # two steps a round
    on_ranks(2, trained_run, spec, tmp_path / "whole")
    on_ranks(2, trained_run, spec.replace(optim=spec.optim.replace(steps=stop)), tmp_path / "short")
    (tmp_path / "short" / "spec.toml").write_text((tmp_path / "whole" / "spec.toml").read_text())
    on_ranks(2, trained_run, spec, tmp_path / "short")
    assert not differences(saved(tmp_path / "whole", 4), saved(tmp_path / "short", 4))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["align.engine_tp=2"], "align.engine_tp = 2 does not divide the 1 ranks of the layout; use 1"),
        (["align.engine_tp=3", "parallel.dp=4"], "does not divide the 4 ranks of the layout; use 1, 2, 4"),
        (["align.engine_tp=4", "parallel.dp=4", "model.vocab=258"], "align.engine_tp = 4 does not divide model.vocab"),
        (["align.engine_tp=2", "parallel.dp=2", "model.heads=1", "model.kv_heads=1"], "model.heads = 1"),
    ],
)  # fmt: skip
def test_ranks_that_cannot_be_engines_are_refused(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        make_spec(tmp_path, "grpo", *overrides)


def test_a_run_goes_on_with_whole_engines(tmp_path: Path) -> None:
    make = functools.partial(make_spec, tmp_path, "grpo", "parallel.dp=4", "fault.elastic=true")
    assert (sizes(make("align.engine_tp=2")), sizes(make())) == ([4, 2], [4, 3, 2, 1])
