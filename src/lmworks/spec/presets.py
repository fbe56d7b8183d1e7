"""Named model shapes. Each is what its authors published; counts are checked against `transformers`."""

from __future__ import annotations

from typing import Any


def gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "vocab": 50_257, "context": 1024,
        "norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True, "tie_embeddings": True,
    }  # fmt: skip


def llama3(layers: int, hidden: int, heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 8, "ffn": ffn, "vocab": 128_256,
        "context": 8192, "rope_theta": 500_000.0, **more,
    }  # fmt: skip


def llama3_long(factor: float) -> dict[str, Any]:
    """Llama 3.1 and 3.2: 8k stretched to 128k."""
    return {
        "context": 131_072,
        "rope_scaling": {"type": "llama3", "factor": factor, "original_context": 8192},
    }


def qwen3(
    layers: int, hidden: int, heads: int, ffn: int, *, tied: bool, kv_heads: int = 8, **more: Any
) -> dict[str, Any]:
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": 128, "ffn": ffn,
        "vocab": 151_936, "context": 40_960, "rope_theta": 1_000_000.0, "norm_eps": 1e-6, "qk_norm": True,
        "tie_embeddings": tied, **more,
    }  # fmt: skip


def mistral(**more: Any) -> dict[str, Any]:
    return {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14_336, "vocab": 32_000,
        "context": 32_768, **more,
    }  # fmt: skip


def mellum() -> dict[str, Any]:
    """A Llama-shaped code model, written from memory of its public config: no other count was at hand."""
    return {
        "layers": 30, "hidden": 3072, "heads": 24, "ffn": 8256, "vocab": 49_152, "context": 8192, "norm_eps": 1e-6,
    }  # fmt: skip


def opt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """OPT. Two rows of its positions stand for padding. Our network has GELU where OPT has ReLU."""
    return {**gpt2(layers, hidden, heads), "vocab": 50_272, "context": 2050}


PRESETS: dict[str, dict[str, Any]] = {
    # Small ones for a CPU. Bytes need 257 rows (256 and end-of-text); 320 keeps the matrix a multiple of 64.
    "tiny": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 320, "context": 128},
    "cpu-3m": {"layers": 6, "hidden": 192, "heads": 6, "vocab": 2048, "context": 256, "tie_embeddings": True},
    "cpu-10m": {**gpt2(10, 256, 8), "vocab": 8192, "context": 256},
    "gpt2-small": gpt2(12, 768, 12),
    "gpt2-medium": gpt2(24, 1024, 16),
    "gpt2-large": gpt2(36, 1280, 20),
    "gpt2-xl": gpt2(48, 1600, 25),
    "llama3-1b": llama3(16, 2048, 32, 8192, tie_embeddings=True, **llama3_long(32.0)),
    "llama3-3b": llama3(28, 3072, 24, 8192, tie_embeddings=True, **llama3_long(32.0)),
    "llama3-8b": llama3(32, 4096, 32, 14_336),
    "llama3-70b": llama3(80, 8192, 64, 28_672),
    "llama3-405b": llama3(126, 16_384, 128, 53_248, **llama3_long(8.0)),
    "qwen3-0.6b": qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": qwen3(36, 4096, 32, 12_288, tied=False),
    "qwen3-14b": qwen3(40, 5120, 40, 17_408, tied=False),
    "qwen3-32b": qwen3(64, 5120, 64, 25_600, tied=False),
    "qwen3-30b-a3b": qwen3(48, 2048, 32, 6144, tied=False, kv_heads=4, experts=128, top_k=8, expert_ffn=768),
    "mistral-7b": mistral(sliding_window=4096),  # v0.1
    "mixtral-8x7b": mistral(rope_theta=1_000_000.0, experts=8, top_k=2),
    "mellum-4b": mellum(),
    "opt-350m": opt(24, 1024, 16),
    "opt-1.3b": opt(24, 2048, 32),
    "opt-6.7b": opt(32, 4096, 32),
    "opt-13b": opt(40, 5120, 40),
    "opt-30b": opt(48, 7168, 56),
    "opt-66b": opt(64, 9216, 72),
}
# Shapes to plan with: published weights of these families do not load, as the network differs in a detail. Of
# opt-350m the embedding too: OPT projects one of 512 columns and has no final norm.
PLAN_ONLY = tuple(name for name in PRESETS if name.startswith("opt-"))
