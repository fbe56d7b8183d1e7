"""The memory of post-training by model and phase: against an engine's live tensors, and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmworks.align import rollout_engine
from lmworks.align.online_trainer import OnlineTrainer
from lmworks.align.post_trainer import trainer_class
from lmworks.cli.main import app
from lmworks.engine.core import kv_cache
from lmworks.model import GPT
from lmworks.plan.memory import phases
from lmworks.plan.memory.phases import held_beside
from lmworks.plan.memory.sheet import memory, run_phases
from lmworks.spec import RunSpec
from lmworks.spec.load import apply_overrides
from lmworks.train.rank_memory import element_bytes, held_parameters, storage_bytes, train_one_step
from post_training import offline, write_prompts


def make_spec(*overrides: str, path: Path = Path("prompts.jsonl"), method: str = "grpo") -> RunSpec:
    given = offline(path, method)
    if method == "grpo":
        given["align"] |= {"rewards": ["exact"], "prompts": 4, "samples": 2, "max_tokens": 8}
    return RunSpec.from_dict(apply_overrides(given, overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["lora.rank=4"],
        ["lora.rank=4", 'lora.targets=["attention.q"]'],
        ["lora.rank=4", "lora.base=nf4"],
        ["lora.rank=4", "lora.base=int8", 'lora.targets=["attention.q"]'],
    ],
)
def test_the_engine_holds_what_is_planned(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    spec = make_spec(*overrides, path=write_prompts(tmp_path / "prompts.jsonl"))
    trainer = trainer_class(spec)(spec, tmp_path / "run", quiet=True, force=True)
    assert isinstance(trainer, OnlineTrainer)
    trainer.build()
    engine = trainer.rollout_engine
    assert storage_bytes([engine.engine.runner.cache.store]) == 0  # it sleeps until a round begins
    engine.wake()
    models, planned = held_beside(spec, None, 0)
    assert planned is not None
    sizes = {name: sum(slot.tensor.nbytes for slot in slots) for name, slots in engine.weights.slots.items()}
    assert sum(size for name, size in sizes.items() if name in engine.shared) == planned.shared
    assert sum(size for name, size in sizes.items() if name not in engine.shared) == planned.weights
    assert storage_bytes([engine.engine.runner.cache.store]) == planned.cache
    assert models[0].weights == element_bytes(trainer.parallel_model.parts[0].parameters())


def test_four_models_hold_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    path = write_prompts(tmp_path / "prompts.jsonl")
    judge = tmp_path / "judge"
    GPT(make_spec(path=path).model.replace(scalar_head=True, layers=1)).save_hf(judge)
    spec = make_spec("align.method=ppo", f"align.reward_model={judge}", path=path)
    trainer = trainer_class(spec)(spec, tmp_path / "run", quiet=True, force=True)
    assert isinstance(trainer, OnlineTrainer)
    trainer.build()
    train_one_step(trainer)
    assert trainer.critic is not None
    held = {"policy": trainer, "critic": trainer.critic}
    models, _ = held_beside(spec, None, 0)
    assert [model.name for model in models] == ["policy", "reference", "reward model", "critic"]
    for model in models:
        where = held[model.name].parallel_model if model.trained else trainer.frozen[model.name]
        assert model.weights == element_bytes(held_parameters(where)), model.name
        if model.trained:
            states = held[model.name].optimizer.state.values()
            assert model.optimizer == storage_bytes(value for state in states for value in state.values()), model.name


def test_limits_are_the_engines() -> None:
    assert phases.MAX_SEQS == {"cuda": rollout_engine.MAX_SEQS, "cpu": rollout_engine.MAX_SEQS_CPU}
    assert phases.CPU_CACHE == kv_cache.CPU_BYTES


def command(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", "memory", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_models_and_phases_of_a_preference_run() -> None:
    """Llama 3.2 1B in bf16 with fp32 weights on one GPU: 1,235,814,400 parameters."""
    options = ["llama3-1b", "align.method=dpo", "--cluster", "1xh100", "--seq", "1024", "--micro-batch", "1"]
    facts = command(*options)
    policy, reference = facts["post_training"]["models"]
    count = 1_235_814_400
    assert (policy["weights"], policy["gradients"]) == (4 * count, 4 * count)
    assert policy["optimizer"] == pytest.approx(8 * count, rel=1e-6)
    assert (reference["weights"], reference["gradients"], reference["optimizer"]) == (4 * count, 0, 0)
    score, update = facts["post_training"]["phases"]
    assert (score["phase"], score["runs"], update["phase"]) == ("score", ["reference"], "update")
    assert facts["post_training"]["highest_phase"] == "update"
    assert update["peak"] == pytest.approx(facts["allocated"], rel=1e-6)
    assert facts["others"] == 4 * count

    shared = command(*options, "lora.rank=16")["post_training"]["models"]
    assert shared[1]["weights"] == 0 and shared[1]["shares"] == "policy"
    # A and B of rank 16 on q, k, v, out, gate, up and down of 16 blocks.
    adapters = 16 * 16 * (2 * (2048 + 2048) + 2 * (2048 + 512) + 3 * (2048 + 8192))
    assert shared[0]["trained"] == adapters
    assert shared[0]["weights"] == 4 * (count + adapters)
    assert shared[0]["gradients"] == 4 * adapters


def test_a_pair_has_two_rows() -> None:
    options = ["llama3-1b", "--cluster", "1xh100", "--seq", "1024", "data.global_batch=4"]
    pairs = command(*options, "--micro-batch", "1", "align.method=simpo")
    sft = command(*options, "--micro-batch", "2", "align.method=sft", "data.packing=false")
    assert pairs["activations"] == pytest.approx(sft["activations"], rel=0.05)


def test_a_rollout_engine_takes_its_share_of_the_gpu() -> None:
    online = ["align.method=grpo", 'align.rewards=["exact"]', "align.beta=0.04", "align.samples=64"]
    options = [
        "llama3-8b",
        *online,
        "align.engine_memory=0.8",
        "precision.weights=bf16",
        "--cluster",
        "1xh200",
        "--seq",
        "4096",
    ]
    found = command(*options, "--micro-batch", "1")["post_training"]
    assert [phase["phase"] for phase in found["phases"]] == ["generate", "score", "update"]
    assert found["engine"]["weights"] == 0  # the trainer's own, in bf16
    share = 0.8 * 0.99 * 141 * 2**30
    models = sum(model["weights"] + model["optimizer"] for model in found["models"])
    assert 0 < share - models - found["engine"]["cache"] < 4e9  # the CUDA context, and the engine's largest step
    sharded = command(*options, "--micro-batch", "1", "--cluster", "8xh200", "--zero", "3")["post_training"]
    count, norms = 8_030_261_248, (2 * 32 + 1) * 4096
    assert sharded["engine"]["weights"] == 2 * count  # every rank has an engine of its own
    assert sharded["hand_over"]["received"] == 2 * count * 7 // 8
    one = command(*options, "--micro-batch", "1", "--cluster", "8xh200", "--zero", "3", "align.engine_tp=8")
    engine, moved = one["post_training"]["engine"], one["post_training"]["hand_over"]
    assert engine["weights"] == moved["copied"] == 2 * ((count - norms) // 8 + norms)
    # Rows of FSDP2 are those of column-parallel layers; of out and down a rank has rows, and needs columns.
    rows = 32 * (4096 * 4096 + 4096 * 14336)
    assert moved["received"] == 2 * (rows // 8 * 7 // 8 + norms * 7 // 8)


def test_cache_of_a_colocated_engine_beside_what_an_h200_left_it() -> None:
    """`benchmarks/online_round.py grpo`: tokens of the cache by align.engine_memory (0.1: it did not start)."""
    run = ["llama3-1b", "align.method=grpo", 'align.rewards=["exact"]', "align.prompts=256", "align.samples=4"]
    options = [*run, "precision.dtype=bf16", "precision.weights=bf16", "--cluster", "1xh200", "--seq", "2048"]
    for part, tokens in ((0.1, 0), (0.15, 119_424), (0.18, 256_848), (0.2, 348_480)):
        found = command(*options, "--micro-batch", "3", f"align.engine_memory={part}")
        planned = found["post_training"]["engine"]["cache"]
        assert abs(planned - tokens * 2**15) < 2 * 2**30, (part, planned / 2**15)  # of 140 GiB
        assert found["fits"] == (tokens > 0)
    fp32 = command(*options[:-6], "--cluster", "1xh200", "--seq", "2048", "align.engine_memory=0.1")
    assert fp32["post_training"]["engine"]["cache"] > 0  # PyTorch makes the states at the first step


def test_the_sheet_of_a_run_has_all_models() -> None:
    spec = make_spec(method="dpo")
    names = {row.name: row.bytes for row in memory(spec).rows}
    assert names["reference: weights"] == 4 * spec.model.params
    assert run_phases(spec, None, "cpu").highest.peak == memory(spec).total


def test_the_cache_of_a_sleeping_engine_is_the_trainers() -> None:
    spec = make_spec("align.prompts=64", "align.samples=32", "data.global_batch=2048", "data.micro_batch=1")
    sheet = run_phases(spec, None, "cpu")
    generate, update = sheet.phases[0], sheet.phases[-1]
    assert sheet.engine is not None and generate.resting - update.resting == sheet.engine.cache
    assert memory(spec).moment == "generate" and memory(spec).total == generate.peak == sheet.highest.peak
