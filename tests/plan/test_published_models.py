"""Parameters and KV bytes of published models, from their configs: those of `transformers`, and hand arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmworks.plan.serving.served_model import Cache, ServedModel
from lmworks.spec.hf_config import spec_of_config

transformers = pytest.importorskip("transformers")


def shape(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocab,
        "max_position_embeddings": 4096, "pad_token_id": None, **more,
    }  # fmt: skip


LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# config, parameters, numbers that the cache keeps of a token
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "Qwen1.5-MoE-A2.7B": (
        {"model_type": "qwen2_moe", **shape(24, 2048, 16, 16, 5632, 151936), "num_experts": 60,
         "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        14_315_784_192, 24 * 2 * 16 * 128,
    ),
    "DeepSeek-V2-Lite": (
        {"model_type": "deepseek_v2", **shape(27, 2048, 16, 16, 10944, 102400), **LATENT, "q_lora_rank": None,
         "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
         "first_k_dense_replace": 1},
        15_706_484_224, 27 * (512 + 64),
    ),
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", **shape(61, 7168, 128, 128, 18432, 129280), **LATENT, "q_lora_rank": 1536,
         "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
         "first_k_dense_replace": 3, "num_nextn_predict_layers": 0},
        671_026_404_352, 61 * (512 + 64),
    ),
    "Gemma 2 2B": (
        {"model_type": "gemma2", **shape(26, 2304, 8, 4, 9216, 256000), "head_dim": 256}, 2_614_341_888,
        26 * 2 * 4 * 256,
    ),
    "Gemma 3 1B": (
        {"model_type": "gemma3_text", **shape(26, 1152, 4, 1, 6912, 262144), "head_dim": 256}, 999_885_952,
        26 * 2 * 256,
    ),
    "OLMo 2 7B": ({"model_type": "olmo2", **shape(32, 4096, 32, 32, 11008, 100352)}, 7_298_617_344, 32 * 2 * 4096),
    "SmolLM3": ({"model_type": "smollm3", **shape(36, 2048, 16, 4, 11008, 128256)}, 3_075_098_624, 36 * 2 * 512),
    "GLM-4-9B-0414": (
        {"model_type": "glm4", **shape(40, 4096, 32, 2, 13696, 151552), "head_dim": 128}, 9_400_279_040, 40 * 2 * 256,
    ),
    "StarCoder2 3B": (
        {"model_type": "starcoder2", **shape(30, 3072, 24, 2, 12288, 49152)}, 3_030_371_328, 30 * 2 * 256,
    ),
    "Granite 3.1 2B": (
        {"model_type": "granite", **shape(40, 2048, 32, 8, 8192, 49155), "tie_word_embeddings": True}, 2_533_531_648,
        40 * 2 * 512,
    ),
    "Phi-4-mini": (
        {"model_type": "phi3", **shape(32, 3072, 24, 8, 8192, 200064), "tie_word_embeddings": True,
         "partial_rotary_factor": 0.75},
        3_836_021_760, 32 * 2 * 1024,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_kv_bytes(name: str) -> None:
    config, params, kept = MODELS[name]
    spec = spec_of_config(config)
    assert spec.params == params
    assert Cache.of(spec, "bf16").token_bytes == 2 * kept
    assert ServedModel.of(spec).params == params


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_transformers(name: str) -> None:
    config = transformers.AutoConfig.for_model(**MODELS[name][0])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == MODELS[name][1]
