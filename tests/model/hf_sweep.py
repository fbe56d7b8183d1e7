"""Random configurations of a Hugging Face family, computed by `transformers` and by us.

A case is a small config.json of the family with one to four keys changed: its own, those of other families, and what
people add by hand. `transformers` builds a random model from it, and we load that folder: with the same logits, or
with a refusal that names a key. Anything else is a silent difference.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from lmworks.model import GPT
from lmworks.spec import LMWorksError

TOLERANCE = 1e-4
TOKENS = torch.randint(0, 96, (1, 24), generator=torch.Generator().manual_seed(1))
PAIRS = 8  # rotary pairs of a head in most cases

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
GPT2 = {
    "vocab_size": 96, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "num_nextn_predict_layers": 0,
}  # fmt: skip
DEEPSEEK = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": SHAPE,
    "mistral": SHAPE,
    "ministral": {**SHAPE, "head_dim": 16},
    "qwen2": SHAPE,
    "qwen3": {**SHAPE, "head_dim": 16},
    "phi3": SHAPE,
    "mixtral": {**SHAPE, "num_local_experts": 6},
    "qwen3_moe": {**SHAPE, **MOE},
    "qwen2_moe": {**SHAPE, **MOE, "shared_expert_intermediate_size": 48},
    "glm": {**SHAPE, "head_dim": 16},
    "glm4": {**SHAPE, "head_dim": 16},
    "olmo2": SHAPE,
    "gemma": {**SHAPE, "head_dim": 16},
    "gemma2": {**SHAPE, "head_dim": 16, "sliding_window": 5},
    "gemma3_text": {**SHAPE, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16},
    "starcoder2": SHAPE,
    "smollm3": SHAPE,
    "granite": {**SHAPE, "attention_multiplier": 0.3},
    "mellum": {**SHAPE, **MOE, "head_dim": 16},
    "olmoe": {**SHAPE, "num_experts": 6, "num_experts_per_tok": 2},
    "glm4_moe": {**SHAPE, **DEEPSEEK, "head_dim": 16, "use_qk_norm": True},
    "deepseek_v2": {**SHAPE, **LATENT, **DEEPSEEK, "n_group": 3, "topk_group": 2},
    "deepseek_v3": {**SHAPE, **LATENT, **DEEPSEEK, "n_group": 1, "topk_group": 1},
}

SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPE: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 4.0},
    YARN,
    {**YARN, "attention_factor": 1.5},
    {**YARN, "truncate": False, "beta_fast": 8.0},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    {**YARN, "mscale": 0.7},
    {"type": "yarn", "factor": 2.0},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "default"},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
]  # fmt: skip
PLAIN_KEYS: dict[str, list[Any]] = {
    "hidden_act": ["swish", "gelu", "gelu_pytorch_tanh", "relu", "gelu_new"],
    "activation_function": ["gelu", "gelu_pytorch_tanh", "relu"],
    "rms_norm_eps": [1e-5, 1e-2],
    "layer_norm_epsilon": [1e-2],
    "layer_norm_eps": [1e-2],
    "rope_theta": [500.0, 1e6],
    "partial_rotary_factor": [0.5, 0.5, 0.25, 1.0],
    "original_max_position_embeddings": [8, 32],
    "max_position_embeddings": [16, 128],
    "n_positions": [128],
    "sliding_window": [5, 7, None],
    "use_sliding_window": [True, True, False],
    "max_window_layers": [0, 1, 2, 9],
    "layer_types": [[SLIDING, FULL, FULL], [FULL, SLIDING, SLIDING], [SLIDING] * 3, [FULL] * 3, [SLIDING, FULL]],
    "attention_bias": [True],
    "mlp_bias": [True],
    "qkv_bias": [True],
    "use_bias": [True],
    "tie_word_embeddings": [True, False],
    "head_dim": [8, 12, 16, None],
    "num_key_value_heads": [1, 4, None],
    "num_attention_heads": [2, 6],
    "n_head": [2, 6],
    "hidden_size": [60],
    "n_inner": [40, None],
    "is_causal": [False, None, True],
    "num_experts_per_tok": [1, 3],
    "num_experts": [4],
    "num_local_experts": [4, 8],
    "norm_topk_prob": [True, False],
    "moe_intermediate_size": [16],
    "decoder_sparse_step": [2],
    "mlp_only_layers": [[0], [1, 2], []],
    "mlp_layer_types": [["dense", "sparse", "sparse"], ["sparse"] * 3],
    "first_k_dense_replace": [0, 1, 2],
    "routed_scaling_factor": [2.5],
    "n_group": [1, 2, 3],
    "topk_group": [1, 2],
    "n_shared_experts": [1, 2],
    "shared_expert_intermediate_size": [24, 48],
    "topk_method": ["greedy", "group_limited_greedy"],
    "scoring_func": ["softmax"],
    "q_lora_rank": [None],
    "rope_interleave": [False],
    "attention_dropout": [0.1],
    "resid_pdrop": [0.1],
    "pretraining_tp": [2],
    "logits_scaling": [2.0],
    "logit_scale": [2.0],
    "embedding_multiplier": [3.0],
    "residual_multiplier": [0.5],
    "attention_multiplier": [0.1],
    "query_pre_attn_scalar": [20],
    "attn_logit_softcapping": [5.0, None],
    "final_logit_softcapping": [5.0, None],
    "qk_layernorm": [True],
    "use_qk_norm": [True, False],
    "clip_qkv": [0.1],
    "hidden_activation": ["gelu", "gelu_new", "silu"],
    "use_bidirectional_attention": [True, False],
    "sliding_window_pattern": [2, 3],
    "rope_local_base_freq": [500.0],
    "no_rope_layers": [[1, 0, 1], [0, 0, 1], [1, 1, 1]],
    "no_rope_layer_interval": [2, 3],
    "use_parallel_residual": [True, False],
    "scale_attn_weights": [False],
    "scale_attn_by_inverse_layer_idx": [True],
    "reorder_and_upcast_attn": [True],
    "router_jitter_noise": [0.1],
    "attention_chunk_size": [8],
    "pad_token_id": [0],
    "per_layer_config": [{"1": {"intermediate_size": 24}}],
    "num_nextn_predict_layers": [1],
}  # fmt: skip


def case(family: str, seed: int) -> dict[str, Any]:
    """A config.json."""
    choose = random.Random(f"{family} {seed}")
    own = set(transformers.CONFIG_MAPPING[family]().to_dict())
    config = {"model_type": family, **BASES[family]}
    for _ in range(choose.randint(1, 4)):
        if choose.random() < 0.3:
            key, value = choose.choice(("rope_scaling", "rope_parameters")), rope(choose)
            if family in ("mellum", "gemma3_text") and choose.random() < 0.6:
                key, value = "rope_parameters", {kind: {"rope_theta": 1e4, **rope(choose)} for kind in (FULL, SLIDING)}
        else:
            known = [key for key in PLAIN_KEYS if key in own]
            key = choose.choice(known if choose.random() < 0.7 else list(PLAIN_KEYS))
            value = choose.choice(PLAIN_KEYS[key])
        config[key] = value
    return config


def rope(choose: random.Random) -> dict[str, Any]:
    pairs = choose.choice((3, 4, 6, PAIRS))
    longrope = {
        "rope_type": "longrope", "original_max_position_embeddings": 16,
        "short_factor": [1.0 + i / 9 for i in range(pairs)], "long_factor": [1.5 + i for i in range(pairs)],
    }  # fmt: skip
    found = dict(choose.choice([*ROPE, longrope, {**longrope, "factor": 2.0}, {**longrope, "attention_factor": 1.3}]))
    for key, value in (("rope_theta", 300.0), ("partial_rotary_factor", 0.5), ("factor", 8.0)):
        if choose.random() < 0.2:
            found[key] = value
    return found


def randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.state_dict().items()):
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 and name.endswith("weight") else 0.2 * noise)


def theirs(config: dict[str, Any], folder: Path, seed: int) -> nn.Module | None:
    """A model of `transformers`, saved beside the config as it was written; None where it computes nothing."""
    (folder / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(Exception):  # of any kind: they say in many ways that a config is wrong
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
        model = model.float().eval()
        randomise(model, seed)
        with torch.no_grad():
            finite = model(TOKENS).logits.isfinite().all()
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
        return model if finite else None
    return None


def keys_of(config: Any) -> set[str]:
    if isinstance(config, dict):
        return set(config) | {key for value in config.values() for key in keys_of(value)}
    return set()


def outcome(config: dict[str, Any], folder: Path, seed: int) -> str:
    """exact; refused; nothing to compare with; or what is wrong."""
    model = theirs(config, folder, seed)
    if model is None:
        return "none"
    try:
        ours = GPT.from_hf(folder)
    except LMWorksError as error:
        said = str(error).replace(str(folder), "")
        named = any(key in said for key in keys_of(config)) or "tensor '" in said
        return "refused" if named else f"refused without a key: {said}"
    with torch.no_grad():
        expected, found = model(TOKENS).logits, ours(TOKENS)
    off = float((expected - found).abs().max())
    close = TOLERANCE * max(1.0, float(expected.std()))  # some have logits of size 30
    return "exact" if math.isfinite(off) and off <= close else f"differs by {off:.2g}"
