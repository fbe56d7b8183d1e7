"""FLOPs against those that PyTorch counts in a real forward and backward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lmworks.plan.flops import (
    attention_flops_per_token,
    forward_flops_per_token,
    hardware_flops_per_token,
    keys_per_query,
    model_flops_per_token,
)
from lmworks.plan.network import network
from lmworks.plan.ops import Workload
from lmworks.plan.predict import step_flops
from lmworks.plan.software import COMPILED, EAGER, Software
from lmworks.plan.step.uncalibrated import recomputed_ops
from lmworks.spec import ModelSpec, RunSpec
from tracker import Steps, make_run

SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "grouped": {"kv_heads": 2, "tie_embeddings": True},
    "gpt2": {"norm": "layer", "mlp": "gelu", "bias": True, "positions": "learned"},
    "experts": {"experts": 4, "top_k": 2, "shared_experts": 1},
    "latent attention": {"kv_lora_rank": 12, "q_lora_rank": 20, "rope_head_dim": 4, "v_head_dim": 6},
}

# Without causal skipping on a CPU, where the closed form has it.
SCORES: dict[str, dict[str, Any]] = {
    "soft cap": {"attention_softcap": 5.0, "final_softcap": 5.0},
    "sinks": {"attention_sinks": True},
}


def test_windows_on_some_layers() -> None:
    """By hand: keys of each layer, of each position."""
    model = ModelSpec(layers=5, hidden=64, heads=4, sliding_window=8, layer_types=("sliding", "sliding", "full"))
    seen = sum(min(t, model.window_of(layer) or t) for layer in range(5) for t in range(1, 33)) / 32
    assert attention_flops_per_token(model, 32) == pytest.approx(4 * 64 * seen)
    load = Workload.of(make_run(layers=5, sliding_window=8, layer_types=("sliding", "sliding", "full")), "cuda")
    for software in (EAGER, COMPILED):
        ops = network(replace(load, software=software)).block
        kernels = next(op for op in ops if op.name == "attention").forward
        assert 5 * sum(kernel.flops for kernel in kernels) == pytest.approx(4 * 64 * seen * load.tokens)


def counted(spec: RunSpec) -> float:
    """What FlopCounterMode sees. The reference attention spells its products out: all keys, above the diagonal too."""
    run = Steps(spec)
    with FlopCounterMode(display=False) as counter:
        run.forward().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("shape", [*SHAPES.values(), *SCORES.values()], ids=[*SHAPES, *SCORES])
def test_model_flops_are_those_that_run(shape: dict[str, Any]) -> None:
    """Exact once attention, which runs over every key here, is counted over every key."""
    spec = make_run(attention="reference", **shape)
    model, seq, tokens = spec.model, spec.data.seq, spec.tokens_per_step
    unmasked = seq / keys_per_query(seq)
    attention = 3 * attention_flops_per_token(model, seq)
    expected = model_flops_per_token(model, seq) + attention * (unmasked - 1)
    assert counted(spec) == pytest.approx(tokens * expected, rel=1e-9)


def test_recompute_runs_the_blocks_forward_again() -> None:
    spec = make_run(attention="reference", recompute="full")
    model, seq, tokens = spec.model, spec.data.seq, spec.tokens_per_step
    attention = attention_flops_per_token(model, seq)
    unmasked = seq / keys_per_query(seq)
    # Less the flash kernel's own recompute, and the last product of a block, which nobody asks for again.
    expected = hardware_flops_per_token(model, seq, "full") - attention / 2 + 4 * attention * (unmasked - 1)
    expected -= model.layers * 2 * model.ffn * model.hidden
    assert counted(spec) == pytest.approx(tokens * expected, rel=1e-9)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_recompute_of_the_mlp_runs_its_products_again(shape: dict[str, Any]) -> None:
    """As they are counted without recompute, and what is said to come on top."""
    model = make_run(**shape).model
    once, twice = (hardware_flops_per_token(model, 32, policy) for policy in ("none", "mlp"))
    runs = [make_run(attention="reference", recompute=policy, **shape) for policy in ("none", "mlp")]
    plain, again = (counted(spec) for spec in runs)
    assert again - plain == pytest.approx(runs[0].tokens_per_step * (twice - once), rel=1e-9)


@pytest.mark.parametrize("software", [EAGER, COMPILED], ids=lambda one: one.name)
@pytest.mark.parametrize("shape", [*SHAPES.values(), {"experts": 4, "top_k": 2}], ids=[*SHAPES, "no shared expert"])
def test_what_the_mlp_repeats_is_priced_as_it_is_counted(shape: dict[str, Any], software: Software) -> None:
    """The same FLOPs by the list of ops, eager and fused, as by the closed form; fused experts pay for padding too."""
    spec = make_run(seq=512, **shape)
    again = recomputed_ops(network(replace(Workload.of(spec, "cuda"), software=software)), "mlp")
    flops = sum(kernel.flops * kernel.count for op in again for kernel in op.forward)
    once, twice = (hardware_flops_per_token(spec.model, 512, policy) for policy in ("none", "mlp"))
    ratio = flops * spec.model.layers / (spec.tokens_per_step * (twice - once))
    assert 0.999 < ratio < (1.2 if spec.model.experts and software.fused else 1.001)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_op_list_adds_up_to_the_closed_form(shape: dict[str, Any]) -> None:
    spec = make_run(**shape)
    net = network(Workload.of(spec, "cpu"))
    ops = [*net.stem, *net.loss, *(spec.model.layers * net.block)]
    flops = sum(kernel.flops * kernel.count for op in ops for kernel in (*op.forward, *op.backward))
    tokens, seq = spec.tokens_per_step, spec.data.seq
    assert flops == pytest.approx(tokens * hardware_flops_per_token(spec.model, seq), rel=1e-9)


def test_a_step_counts_the_blocks_that_run_again() -> None:
    """Every second block; all of them under a budget that only their inputs fit into; none where all fits."""
    plain = make_run(layers=4)

    def done(**layout: Any) -> float:
        return step_flops(plain.replace(parallel=plain.parallel.replace(**layout))).hardware

    none, full = done(recompute="none"), done(recompute="full")
    assert done(recompute="full", recompute_every=2) == pytest.approx((none + full) / 2)
    two = plain.replace(data=plain.data.replace(global_batch=2 * plain.data.micro_batch))
    stages = two.parallel.replace(pp=2, recompute="full", recompute_every=4)
    assert step_flops(two.replace(parallel=stages)).hardware == pytest.approx(2 * (3 * none + full) / 4)
    assert done(recompute="budget", recompute_budget=100.0) == none
    inputs = 4 * plain.data.micro_batch * plain.data.seq * plain.model.hidden * 4 / 2**30
    assert done(recompute="budget", recompute_budget=1.01 * inputs) == pytest.approx(full)


def test_keys_per_query() -> None:
    mask = torch.ones(12, 12).tril()
    assert keys_per_query(12) == mask.sum() / 12
    assert keys_per_query(12, window=5) == (mask.triu(-4)).sum() / 12
    assert keys_per_query(12, window=50) == keys_per_query(12)


def test_the_head_counts_and_the_input_embedding_does_not() -> None:
    model = ModelSpec.from_preset("gpt2-small")
    per_token = 6 * (12 * 12 * 768**2 + 50_257 * 768) + 6 * 12 * 768 * (1024 + 1)
    assert model_flops_per_token(model, 1024) == per_token
    assert 3 * forward_flops_per_token(model, 1024) == per_token


def test_a_step_counts_every_token_of_the_global_batch() -> None:
    spec = make_run(accumulation=3)
    assert step_flops(spec).model == 3 * 2 * 32 * model_flops_per_token(spec.model, 32)
