"""A model's shape: what is derived from what, and which combinations are refused."""

from __future__ import annotations

from typing import Any

import pytest

from lmworks.spec import ModelSpec, RopeScaling, SpecError


def test_derived_fields() -> None:
    spec = ModelSpec(hidden=256, heads=8)
    assert (spec.kv_heads, spec.head_dim, spec.ffn) == (8, 32, 704)  # 8/3 · 256 = 682.7, up to a multiple of 64
    assert ModelSpec(hidden=256, mlp="gelu").ffn == 1024
    assert ModelSpec(bias=True).qkv_bias
    assert ModelSpec(experts=4).expert_ffn == ModelSpec().ffn
    stretched = ModelSpec(context=1024, rope_scaling=RopeScaling(type="yarn", factor=4))
    assert stretched.rope_scaling.original_context == 256


def test_replace_derives_anew() -> None:
    spec = ModelSpec(hidden=256, heads=4).replace(heads=8, hidden=512)
    assert spec == ModelSpec(hidden=512, heads=8)
    assert (spec.kv_heads, spec.head_dim, spec.ffn) == (8, 64, 1408)
    scaled = ModelSpec(context=1024, rope_scaling=RopeScaling(type="yarn", factor=4)).replace(context=2048)
    assert scaled.rope_scaling.original_context == 512


def test_a_preset_is_a_starting_point() -> None:
    spec = ModelSpec.from_preset("llama3-1b", layers=2, rope_scaling={"factor": 8})
    assert (spec.layers, spec.hidden, spec.vocab) == (2, 2048, 128_256)
    assert (spec.rope_scaling.type, spec.rope_scaling.factor) == ("llama3", 8.0)  # a table is laid over, not replaced
    assert ModelSpec.from_dict(spec.to_dict()) == spec


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"preset": "gpt3"}, r"model.preset = 'gpt3' is not known; known: .*gpt2-small"),
    ({"preset": ["tiny"]}, r"model.preset must be a string, got \['tiny'\]"),
    ({"heads": 6, "kv_heads": 4}, "model.heads = 6 is not divisible by model.kv_heads = 4; kv_heads can be 1, 2, 3, 6"),
    ({"hidden": 100, "heads": 8}, "model.hidden = 100 is not divisible by model.heads = 8; use hidden = 96 or set"),
    ({"hidden": 1, "heads": 8}, "use hidden = 8 or set model.head_dim"),
    ({"hidden": 12, "heads": 4}, "model.head_dim = 3 must be even for model.positions = 'rope'"),
    ({"experts": 2, "top_k": 3}, "model.top_k = 3 is more than model.experts = 2"),
    ({"experts": 2, "mlp": "gelu"}, "model.experts needs model.mlp = 'swiglu' and model.mlp_bias = false"),
    ({"shared_experts": 1}, "model.shared_experts needs model.experts > 0"),
    ({"layers": 0}, "model.layers = 0 is out of range: it must be at least 1"),
    ({"layers": 2.5}, "model.layers must be a whole number, got 2.5"),
    ({"layers": True}, "model.layers must be a whole number, got True"),
    ({"layers": 10**30}, "model.layers is out of range: it does not fit in 64 bits"),
    ({"bias": 1}, "model.bias must be true or false, got 1"),
    ({"norm_eps": float("nan")}, "model.norm_eps = nan is not a finite number"),
    ({"norm": "batch"}, "model.norm = 'batch' is not one of: rms, layer"),
    ({"hiden": 64}, "unknown key 'model.hiden'; did you mean 'hidden'?"),
    ({"rope_scaling": 2}, "model.rope_scaling: expected a table, got 2"),
    ({"rope_scaling": {"facto": 2}}, "unknown key 'model.rope_scaling.facto'; did you mean 'factor'?"),
    ({"rope_scaling": {"factor": 2}}, "model.rope_scaling.factor = 2 needs model.rope_scaling.type"),
    (
        {"rope_scaling": {"type": "yarn", "factor": 2}, "positions": "alibi"},
        "model.rope_scaling.type = 'yarn' needs model.positions = 'rope', not 'alibi'",
    ),
    (
        {"rope_scaling": {"type": "llama3", "low_freq_factor": 4}},
        "model.rope_scaling.low_freq_factor = 4 must be below high_freq_factor = 4",
    ),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[str(fields) for fields, _ in WRONG])
def test_wrong(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        ModelSpec.from_dict(fields)
    assert "\n" not in str(caught.value)


def test_a_preset_given_to_the_constructor_is_not_ignored() -> None:
    with pytest.raises(SpecError, match=r"write ModelSpec.from_preset\('gpt2-small'"):
        ModelSpec(preset="gpt2-small")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"bias": True}, "model.bias = True does not go with latent attention"),
        ({"positions": "alibi"}, "model.positions = 'alibi' does not go with latent attention"),
        ({"kv_heads": 2}, "model.kv_heads = 2 does not go with latent attention.*must be 4"),
        ({"rope_head_dim": 5}, "model.rope_head_dim = 5 must be even"),
        ({"rope_head_dim": 4, "v_head_dim": 64}, "model.v_head_dim = 64 is wider than a key head"),
        ({"attention": "flash"}, "takes keys and values of one width"),
        ({"attention_sinks": True}, "model.attention_sinks = True does not go with latent attention"),
    ],
)
def test_what_latent_attention_refuses(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        ModelSpec(**{"heads": 4, "hidden": 64, "kv_lora_rank": 16, **keys})


def test_widths_that_latent_attention_derives() -> None:
    spec = ModelSpec(heads=4, hidden=64, head_dim=6, kv_lora_rank=16)
    assert (spec.rope_head_dim, spec.v_head_dim, spec.rotary_dim) == (2, 6, 2)
    assert ModelSpec(heads=4, hidden=64, head_dim=7, kv_lora_rank=16, rope_head_dim=4).head_dim == 7
    with pytest.raises(SpecError, match=r"model\.v_head_dim needs model\.kv_lora_rank > 0"):
        ModelSpec(heads=4, hidden=64, v_head_dim=8)
