"""The description of components against the network that is built: names, shapes, order, sharding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmworks.model import GPT
from lmworks.spec import PRESETS, ModelSpec, components

SMALL: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2},
    "gpt2": {"mlp": "gelu", "norm": "layer", "positions": "learned", "bias": True, "tie_embeddings": True},
    "qwen2": {"qkv_bias": True},
    "biases of attention": {"qkv_bias": True, "out_bias": True, "mlp": "geglu"},
    "biases of the MLP": {"mlp_bias": True, "mlp": "gelu_erf", "norm": "layer", "norm_bias": True},
    "qwen3": {"qk_norm": True, "kv_heads": 2, "head_dim": 32},
    "alibi": {"positions": "alibi", "norm": "layer"},
    "sinks": {"attention_sinks": True, "attention_softcap": 5.0, "final_softcap": 5.0, "kv_heads": 2},
    "norms after": {"norm_placement": "post", "qk_norm_whole": True, "kv_heads": 2},
    "norms before and after": {"norm_placement": "both", "qk_norm": True},
    "moe": {"experts": 4, "expert_ffn": 48},
    "latent attention": {"kv_lora_rank": 12, "q_lora_rank": 20, "head_dim": 8, "rope_head_dim": 4, "v_head_dim": 6},
    "latent attention without query rank": {"kv_lora_rank": 12, "experts": 4},
    "gated shared experts": {"experts": 4, "shared_experts": 2, "shared_gate": True, "norm_topk": False},
    "dense layers among experts": {"experts": 4, "shared_experts": 1, "mlp_layers": ("dense", "experts")},
    "moe with shared experts": {"experts": 4, "shared_experts": 2, "qk_norm": True},
}


def built(spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    with torch.device("meta"):
        return [(name, tuple(parameter.shape)) for name, parameter in GPT(spec).named_parameters()]


@pytest.mark.parametrize("trait", SMALL)
def test_described_weights_are_those_of_the_network(trait: str) -> None:
    spec = ModelSpec(layers=2, hidden=64, heads=4, vocab=128, context=32, **SMALL[trait])
    assert [(weight.name, weight.shape) for weight in components.weights(spec)] == built(spec)
    assert spec.params == sum(torch.Size(shape).numel() for _, shape in built(spec))


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_of_presets(preset: str) -> None:
    spec = ModelSpec.from_preset(preset, layers=1)
    assert [(weight.name, weight.shape) for weight in components.weights(spec)] == built(spec)


@pytest.mark.parametrize("trait", SMALL)
def test_matmul_weights_are_the_parameters_of_linear_layers(trait: str) -> None:
    """2 FLOPs for each, by what FlopCounterMode counts in a forward pass of one token (top_k experts of each layer)."""
    from torch.utils.flop_counter import FlopCounterMode

    spec = ModelSpec(layers=2, hidden=64, heads=4, vocab=128, context=32, attention="reference", **SMALL[trait])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        GPT(spec)(torch.zeros(1, 1, dtype=torch.long))
    core = components.attention_core(spec)
    assert counter.get_total_flops() == 2 * spec.matmul_params + spec.layers * core.flops_per_key


def test_replicated_weights_in_a_region_have_partial_gradients() -> None:
    """KV heads that 8 ranks outnumber are whole, as is the router; norms outside the region only with sp."""
    spec = ModelSpec(hidden=64, heads=8, kv_heads=2, qk_norm=True, experts=4, shared_experts=1)
    partial = {weight.name for weight in components.block_weights(spec) if weight.has_partial_grad(8, sp=False)}
    names = ("attention.k.weight", "attention.v.weight", "attention.q_norm.weight", "attention.k_norm.weight")
    assert partial == {*names, "mlp.router.weight"}
    also = {weight.name for weight in components.block_weights(spec) if weight.has_partial_grad(8, sp=True)} - partial
    assert also == {"attention_norm.weight", "mlp_norm.weight"}
    assert not any(weight.has_partial_grad(1, sp=True) for weight in components.block_weights(spec))
    assert components.find(spec, "blocks.3.attention.k.weight").sharded(2) == 0


@pytest.mark.parametrize(
    ("name", "init"),
    [
        ("blocks.1.attention.out.weight", "residual"),
        ("blocks.0.mlp.down", "residual"),
        ("blocks.0.mlp.shared.down.weight", "residual"),
        ("blocks.0.mlp.gate", "normal"),
        ("blocks.0.attention.k_norm.weight", "ones"),
        ("norm.weight", "ones"),
        ("embed.weight", "normal"),
    ],
)
def test_initialisation(name: str, init: str) -> None:
    spec = ModelSpec(hidden=64, heads=4, qk_norm=True, experts=4, shared_experts=1)
    assert components.find(spec, name).init == init
