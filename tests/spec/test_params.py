"""Parameter counts are exact: every published shape against `transformers`, from configurations written here.

The configurations are what the authors published, written down independently of `spec/presets.py`; building them on the
meta device costs no memory, so 405 billion parameters are counted in a second.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmworks.spec import PRESETS, ModelSpec

transformers = pytest.importorskip("transformers")


def gpt2(n_layer: int, n_embd: int, n_head: int, **more: Any) -> Any:
    return transformers.GPT2Config(n_layer=n_layer, n_embd=n_embd, n_head=n_head, **more)


def opt(layers: int, hidden: int, heads: int, **more: Any) -> Any:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "ffn_dim": 4 * hidden}
    return transformers.OPTConfig(**{**sizes, "word_embed_proj_dim": hidden, "vocab_size": 50272, **more})


def llama(**config: Any) -> Any:
    shape = {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
    return transformers.LlamaConfig(**{**shape, **config})


def qwen3(layers: int, hidden: int, heads: int, ffn: int, tied: bool) -> Any:
    return transformers.Qwen3Config(
        vocab_size=151936,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=ffn,
        tie_word_embeddings=tied,
    )


MISTRAL = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}


def small(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool) -> Any:
    return llama(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        vocab_size=vocab,
        tie_word_embeddings=tied,
    )


PUBLISHED = {
    "tiny": lambda: small(2, 64, 4, 2, 192, 320, tied=False),
    "cpu-3m": lambda: small(6, 192, 6, 6, 512, 2048, tied=True),
    "cpu-10m": lambda: gpt2(10, 256, 8, vocab_size=8192, n_positions=256),
    "gpt2-small": lambda: gpt2(12, 768, 12),
    "gpt2-medium": lambda: gpt2(24, 1024, 16),
    "gpt2-large": lambda: gpt2(36, 1280, 20),
    "gpt2-xl": lambda: gpt2(48, 1600, 25),
    "llama3-1b": lambda: llama(
        num_hidden_layers=16,
        hidden_size=2048,
        num_attention_heads=32,
        intermediate_size=8192,
        tie_word_embeddings=True,
    ),
    "llama3-3b": lambda: llama(
        num_hidden_layers=28,
        hidden_size=3072,
        num_attention_heads=24,
        intermediate_size=8192,
        tie_word_embeddings=True,
    ),
    "llama3-8b": lambda: llama(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, intermediate_size=14336),
    "llama3-70b": lambda: llama(
        num_hidden_layers=80, hidden_size=8192, num_attention_heads=64, intermediate_size=28672
    ),
    "llama3-405b": lambda: llama(
        num_hidden_layers=126, hidden_size=16384, num_attention_heads=128, intermediate_size=53248
    ),
    "qwen3-0.6b": lambda: qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": lambda: qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": lambda: qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": lambda: qwen3(36, 4096, 32, 12288, tied=False),
    "qwen3-14b": lambda: qwen3(40, 5120, 40, 17408, tied=False),
    "qwen3-32b": lambda: qwen3(64, 5120, 64, 25600, tied=False),
    "qwen3-30b-a3b": lambda: transformers.Qwen3MoeConfig(
        vocab_size=151936,
        num_hidden_layers=48,
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
    ),
    "mistral-7b": lambda: transformers.MistralConfig(**MISTRAL, sliding_window=4096),
    "mixtral-8x7b": lambda: transformers.MixtralConfig(**MISTRAL, num_local_experts=8, num_experts_per_tok=2),
    "mellum-4b": lambda: small(30, 3072, 24, 24, 8256, 49152, tied=False),
    "opt-350m": lambda: opt(24, 1024, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": lambda: opt(24, 2048, 32),
    "opt-6.7b": lambda: opt(32, 4096, 32),
    "opt-13b": lambda: opt(40, 5120, 40),
    "opt-30b": lambda: opt(48, 7168, 56),
    "opt-66b": lambda: opt(64, 9216, 72),
}
# Ours has an embedding as wide as the stream and a final norm; OPT projects half as many columns in and out.
MORE = {"opt-350m": 512 * 50_272 - 2 * 512 * 1024 + 2 * 1024}

# What the model cards print, so that a config wrong on both sides is noticed.
CARDS = {
    "gpt2-small": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
}


def test_every_preset_is_compared() -> None:
    assert PUBLISHED.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_preset(name: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(PUBLISHED[name]())
    spec = ModelSpec.from_preset(name)
    assert spec.params == sum(p.numel() for p in model.parameters()) + MORE.get(name, 0)
    assert spec.params == CARDS.get(name, spec.params)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "layer", "bias": True},
        {"mlp": "gelu"},
        {"mlp": "gelu", "bias": True, "positions": "learned", "norm": "layer", "tie_embeddings": True},
        {"qkv_bias": True, "qk_norm": True, "kv_heads": 2, "head_dim": 48},
        {"positions": "alibi", "sliding_window": 32},
        {"experts": 4, "top_k": 2, "shared_experts": 1, "expert_ffn": 96, "kv_heads": 1},
    ],
    ids=str,
)
def test_the_network_agrees_with_the_arithmetic(changes: dict[str, Any]) -> None:
    from lmworks.model import GPT

    spec = ModelSpec.from_preset("cpu-3m", **changes)
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT(spec).parameters()) == spec.params


def test_active_and_multiplied_parameters() -> None:
    moe = ModelSpec.from_preset("mixtral-8x7b")
    expert = 3 * 4096 * 14336
    assert moe.active_params == moe.params - 32 * 6 * expert == 12_879_925_248  # "13B active"
    norms = (2 * 32 + 1) * 4096
    assert moe.matmul_params == moe.active_params - 32000 * 4096 - norms
    dense = ModelSpec.from_preset("gpt2-small")
    assert dense.active_params == dense.params
    assert dense.matmul_params == 12 * 12 * 768**2 + 50257 * 768  # 12 h² a block, and the tied head once
