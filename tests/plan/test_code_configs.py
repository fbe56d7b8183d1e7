"""configs/code: every recipe loads, is planned, fits, and continues the one before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.plan.devices.machine import Machine
from lmworks.plan.memory.reserve import reserved, safe_bytes_of
from lmworks.plan.predict import predict
from lmworks.spec import RunSpec, load_run

FOLDER = Path(__file__).parents[2] / "configs" / "code"
SIZES = {"30m": 30e6, "100m": 97e6, "350m": 340e6, "4b": 4e9, "12b-moe": 12e9}
STEPS = ("pretrain", "sft", "dpo")
GPUS = {"30m": 1, "100m": 1, "350m": 1, "4b": 64, "12b-moe": 256}
TOKENS = {"100m": 0.94e9, "350m": 7e9, "4b": 4e12, "12b-moe": 10.6e12}  # before the context is extended


def recipe(size: str, step: str) -> RunSpec:
    return load_run(FOLDER / f"{size}-{step}.toml")


def stages(spec: RunSpec) -> list[RunSpec]:
    return [spec.stage(number) for number in range(len(spec.stages))] or [spec]


def test_every_file_is_one_of_a_recipe() -> None:
    expected = {f"{size}-{part}.toml" for size in SIZES for part in ("model", *STEPS)}
    assert {path.name for path in FOLDER.glob("*.toml")} == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("step", STEPS)
def test_recipes_are_planned_and_fit(size: str, step: str) -> None:
    spec = recipe(size, step)
    assert spec.model.params == pytest.approx(SIZES[size], rel=0.03)
    assert spec.parallel.world == GPUS[size]
    gpu = spec.cluster.accelerator
    for stage in stages(spec):
        prediction = predict(stage, Machine.of(gpu) if gpu else None)
        assert prediction.memory.total > 16 * spec.model.params / spec.parallel.world
        if gpu:
            assert prediction.time is not None and prediction.time.total > 0
            assert float(reserved(prediction.memory.total)) <= safe_bytes_of(gpu.memory_gb * 1e9)
        else:
            assert prediction.memory.total < 2 * 2**30  # of any laptop


@pytest.mark.parametrize("size", SIZES)
def test_each_step_begins_where_the_one_before_ends(size: str) -> None:
    pretrain, sft, dpo = (recipe(size, step) for step in STEPS)
    assert sft.checkpoint.init == f"runs/{pretrain.name}" and dpo.checkpoint.init == f"runs/{sft.name}"
    assert pretrain.model == sft.model == dpo.model  # the last stage's rotary embedding and context
    assert dpo.align.method == "dpo" and (sft.align.method == "sft" or sft.data.fim.split == "syntax")


@pytest.mark.parametrize("size", SIZES)
def test_pretraining_infills_and_then_grows_its_context(size: str) -> None:
    spec = recipe(size, "pretrain")
    parts = stages(spec)
    assert all(part.data.fim.rate == 0.5 for part in parts)
    assert parts[-1].data.seq == spec.model.context and parts[-1].data.seq >= 2 * parts[0].data.seq
    assert {part.data.seq for part in parts[:-1]} == {parts[0].data.seq}
    before, after = parts[0].model, parts[-1].model
    assert before.rope_theta < after.rope_theta or (before.rope_scaling.type, after.rope_scaling.type) == (
        "none",
        "yarn",
    )
    if size in TOKENS:
        seen = sum(stage["steps"] * part.tokens_per_step for stage, part in zip(spec.stages, parts, strict=True))
        assert seen - spec.stages[-1]["steps"] * parts[-1].tokens_per_step == pytest.approx(TOKENS[size], rel=0.01)


def test_the_moe_has_the_shape_of_mellum_2() -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "MellumConfig"):
        pytest.skip("an older transformers")
    config, model = transformers.MellumConfig(), recipe("12b-moe", "pretrain").model
    for theirs, ours in {
        "vocab_size": "vocab", "hidden_size": "hidden", "num_hidden_layers": "layers", "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads", "head_dim": "head_dim", "num_experts": "experts", "intermediate_size": "ffn",
        "num_experts_per_tok": "top_k", "moe_intermediate_size": "expert_ffn", "rms_norm_eps": "norm_eps",
        "max_position_embeddings": "context",
    }.items():  # fmt: skip
        assert getattr(config, theirs) == getattr(model, ours), theirs
    assert config.rope_parameters["full_attention"]["rope_theta"] == model.rope_theta
    assert model.active_params == pytest.approx(2.5e9, rel=0.05)
