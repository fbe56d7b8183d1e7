"""Adapters over a quantized base (QLoRA) under methods that sample: the engine has the rounded weights of the base, and
with them what the trainer computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.align.post_trainer import trainer_class
from lmworks.model import GPT
from lmworks.parallel.local_ranks import on_ranks
from lmworks.prove.parity import parity
from lmworks.record import read_metrics
from lmworks.spec import RunSpec
from lmworks.spec.align import ONLINE_METHODS
from lmworks.spec.layouts import choose
from post_training import built_online, make_spec, table
from tiny import differences, saved

EXPERTS = ["model.experts=4", "model.top_k=2", "model.expert_ffn=16", "model.shared_experts=1"]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["lora.base=nf4"], marks=pytest.mark.slow),
        ["lora.base=int8", "lora.dora=true", 'lora.targets=["attention"]'],
        ["lora.base=nf4", *EXPERTS],
    ],
    ids=["nf4", "int8", "experts"],
)
def test_the_engine_samples_from_the_rounded_base_and_the_adapters(overrides: list[str], tmp_path: Path) -> None:
    options = ["lora.rank=4", "optim.lr=0.05", "data.global_batch=16", "optim.steps=3", "log.eval_every=0"]
    spec = make_spec(
        tmp_path, "grpo", "align.beta=0.1", *options, *overrides
    )  # a round a step; the base is the reference
    trainer_class(spec)(spec, tmp_path / "run", quiet=True).run()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert max(row["sampler_diff/max"] for row in rows) < 1e-5
    assert abs(rows[-1]["kl_answer"]) > 1e-3  # the adapters have moved the policy
    assert rows[1]["hand_over_bytes"] == rows[2]["hand_over_bytes"] <= rows[0]["hand_over_bytes"]


def test_the_base_is_handed_over_once(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "grpo", "lora.rank=4", "lora.base=nf4", 'lora.targets=["attention.q"]')
    trainer = built_online(spec, tmp_path / "run")
    engine = trainer.rounds.sampler.engine  # type: ignore[attr-defined]
    sizes = {name: sum(slot.tensor.nbytes for slot in slots) for name, slots in engine.weights.slots.items()}
    adapted = sum(size for name, size in sizes.items() if name.endswith("attention.q.weight"))
    engine.wake()
    assert engine.hand_over().copied_bytes == sum(size for name, size in sizes.items() if name not in engine.shared)
    assert engine.hand_over().copied_bytes == adapted
    whole = GPT(spec.model, seed=spec.seed)
    k = engine.weights.slots["blocks.1.attention.k.weight"][0].tensor
    layer = trainer.parallel_model.parts[0].blocks["1"].attention.k  # type: ignore[union-attr]
    torch.testing.assert_close(k, layer.quantized.dequantize())  # type: ignore[union-attr, operator]
    assert not torch.equal(k, whole.blocks["1"].attention.k.weight)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        ("grpo", "fsdp2"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("sft", "fsdp2"), ("grpo", "tp2"), ("grpo", "ddp"), ("ppo", "zero-2"), ("rloo", "tp2-sp"))
        ),
    ],
)
def test_layouts_give_the_gradients_of_one_rank(method: str, layout: str, tmp_path: Path) -> None:
    make_spec(tmp_path, method)
    given: dict[str, Any] = table(tmp_path / f"{method}.jsonl", method)
    if method in ONLINE_METHODS:
        given["align"] |= {"epochs": 5, "beta": 0.1}  # all steps are of one round
        given["data"]["global_batch"] = 16
    given |= {"lora": {"rank": 3, "base": "nf4"}, "optim": {"optimizer": "sgd", "lr": 0.1}}
    with parity(given, quick=True) as proof:
        (chosen,) = choose(layout)
        result = proof.prove(chosen)
    assert result.ok, result.failure
    assert result.tokens > 0


@pytest.mark.slow
def test_scales_are_not_rounded_with_the_weights(tmp_path: Path) -> None:
    """FSDP2 gathers blocks in bf16: its steps are as far from fp32 as those of one rank."""
    make_spec(tmp_path, "sft")
    given: dict[str, Any] = table(tmp_path / "sft.jsonl", "sft")
    given |= {"lora": {"rank": 3, "base": "nf4"}, "precision": {"dtype": "bf16"}}
    with parity({**given, "optim": {"optimizer": "sgd", "lr": 0.1}}, quick=True) as proof:
        (chosen,) = choose("fsdp2")
        result = proof.prove(chosen)
    assert result.ok, result.failure


def train(_rank: int, spec: RunSpec, run: Path, resume: bool = False) -> None:
    chosen = trainer_class(spec)
    (chosen.resume(run, quiet=True) if resume else chosen(spec, run, quiet=True)).run()


@pytest.mark.slow
def test_a_resumed_run_over_shards_of_the_base_ends_as_one_that_never_stopped(tmp_path: Path) -> None:
    options = ["lora.rank=3", "lora.base=nf4", "optim.schedule=constant", "checkpoint.every=1", "checkpoint.keep=0"]
    layout = ["parallel.dp=2", "parallel.strategy=fsdp2"]
    spec = make_spec(tmp_path, "grpo", *options, *layout)  # two steps a round
    half = spec.replace(optim=spec.optim.replace(steps=3))
    on_ranks(2, train, spec, tmp_path / "whole")
    on_ranks(2, train, half, tmp_path / "half")
    (tmp_path / "half" / "spec.toml").write_text((tmp_path / "whole" / "spec.toml").read_text())
    on_ranks(2, train, spec, tmp_path / "half", True)
    assert not differences(saved(tmp_path / "whole", 4), saved(tmp_path / "half", 4))
