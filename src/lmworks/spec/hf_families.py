"""The families of Hugging Face models that our network computes, one row each.

A row says which configs it supports, which specs it can express, and its own keys both ways. Dropout is no part of our
network: its keys are ignored, and written as 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import SpecError
from .hf_rope import FULL, SLIDING, Config, kind_of, mscale, need, rope_of_spec, rotary_keys
from .model import LAYER_TYPES, MUP_KEYS, ModelSpec

Keys = dict[str, Any]


def nothing(_: Any) -> Keys:
    return {}


@dataclass(frozen=True)
class Family:
    architecture: str
    models: str  # published ones, for docs/models.md
    defaults: Keys  # of keys that a config may leave out, as `transformers` fills them in
    writes: Keys  # spec keys and the value that this family can express; a callable says whether it can
    must_be: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # values that our network computes
    aliases: dict[str, str] = field(default_factory=dict)  # further names of its keys, which come first
    windows: Literal["none", "all", "layers"] = "none"  # whether sliding_window is read, and layer_types beside it
    attention_bias: tuple[str, ...] = ()  # spec keys that its `attention_bias` stands for
    rope_by_kind: bool = False  # rotary keys are those of a kind of layer
    partial_rotary: bool = False  # whether partial_rotary_factor is read
    interleaved: bool = False  # rotary pairs lie side by side, not in halves
    fused: tuple[str, ...] = ()  # of "qkv_proj" and "gate_up_proj": what is one matrix
    norms_from_zero: bool = False  # the weight of a norm is stored less 1
    prepare: Callable[[Config], Config] = lambda config: config  # into the form that this table reads
    names: dict[str, str] = field(default_factory=dict)  # of tensors: what stands there for a part of Llama's names
    norm_eps: str = "rms_norm_eps"
    activation: str = "hidden_act"
    reads: Callable[[Config], Keys] = nothing  # its own keys of the spec
    says: Callable[[ModelSpec], Keys] = nothing  # its own keys of config.json


def anything(_: ModelSpec) -> bool:
    return True


# Of every family: bidirectional attention, and layers with configs of their own, are other networks.
EVERYWHERE: dict[str, tuple[Any, ...]] = {"is_causal": (True,), "per_layer_config": (None, {}, [])}
ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
ALONE = {"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu": "gelu_erf"}
HF_LAYER_TYPES = {name: f"{name}_attention" for name in LAYER_TYPES}

# Keys of which every family can express any value, and those that act in training alone; of other keys that a family
# does not name it can express the default.
WRITTEN = frozenset({
    "preset", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context", "norm_eps", "rope_theta",
    "rope_scaling", "tie_embeddings", "top_k", "expert_ffn", "capacity", "balance_loss", "attention", "init_std",
    "scalar_head", *MUP_KEYS,
})  # fmt: skip

ROPE_DEFAULTS: Keys = {
    "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
QWEN_DEFAULTS = {**ROPE_DEFAULTS, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
ROPE_WRITES: Keys = {
    "norm": "rms",
    "positions": "rope",
    "mlp": lambda spec: spec.mlp in ("swiglu", "geglu"),
    "bias": False,
    "experts": 0,
}
WINDOW: Keys = {"sliding_window": anything}
BY_LAYER: Keys = {**WINDOW, "layer_types": anything}
ATTENTION_BIAS: Keys = {"qkv_bias": lambda spec: spec.qkv_bias == spec.out_bias, "out_bias": anything}
QKVO = ("qkv_bias", "out_bias")
# capacity and balance_loss act in training alone; a choice bias changes the logits, and none of these families has one.
EXPERTS_WRITES: Keys = {**ROPE_WRITES, "experts": lambda spec: spec.experts > 0, "balance_bias": 0}
NORM_TOPK: Keys = {"norm_topk": anything, "mlp_layers": anything}


# --- GPT-2 --------------------------------------------------------------------------------------------


def gpt2_keys(config: Config) -> Keys:
    return {
        "layers": need(config, "n_layer"),
        "hidden": need(config, "n_embd"),
        "heads": need(config, "n_head"),
        "ffn": config.get("n_inner") or 4 * need(config, "n_embd"),
        "vocab": need(config, "vocab_size"),
        "context": need(config, "n_positions"),
        "norm": "layer",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "positions": "learned",
        "mlp": "gelu",
        "bias": True,
    }


def gpt2_config(spec: ModelSpec) -> Keys:
    return {
        "n_layer": spec.layers,
        "n_embd": spec.hidden,
        "n_head": spec.heads,
        "n_inner": spec.ffn,
        "n_positions": spec.context,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": spec.norm_eps,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


# --- dense families -----------------------------------------------------------------------------------


def llama_keys(config: Config) -> Keys:
    return {"mlp_bias": bool(config.get("mlp_bias"))}


def llama_config(spec: ModelSpec) -> Keys:
    return {"attention_bias": spec.out_bias, "mlp_bias": spec.mlp_bias}


def phi3_config(spec: ModelSpec) -> Keys:
    original = spec.rope_scaling.original_context or spec.context
    rotary = {"partial_rotary_factor": spec.rope_fraction}
    return {"original_max_position_embeddings": original, "pad_token_id": None, **rotary}


def qwen_config(spec: ModelSpec) -> Keys:
    return {"use_sliding_window": spec.sliding_window > 0, "max_window_layers": 0, "attention_bias": spec.out_bias}


def glm_config(spec: ModelSpec) -> Keys:
    return {"attention_bias": spec.qkv_bias, "partial_rotary_factor": spec.rope_fraction, "pad_token_id": None}


def gemma_keys(config: Config) -> Keys:
    return {"embed_scale": math.sqrt(need(config, "hidden_size"))}


def gemma2_keys(config: Config) -> Keys:
    """Scores are scaled by 1/√query_pre_attn_scalar."""
    asked = need(config, "query_pre_attn_scalar")
    scale = {} if asked == need(config, "head_dim") else {"attention_scale": asked**-0.5}
    caps = {"attention_softcap": "attn_logit_softcapping", "final_softcap": "final_logit_softcapping"}
    return {
        **gemma_keys(config),
        **scale,
        "norm_placement": "both",
        **{key: config[name] or 0.0 for key, name in caps.items()},
    }


def gemma2_config(spec: ModelSpec) -> Keys:
    return {
        "query_pre_attn_scalar": query_scalar(spec),
        "attn_logit_softcapping": spec.attention_softcap or None,
        "final_logit_softcapping": spec.final_softcap or None,
        "pad_token_id": None,
        "attention_bias": spec.out_bias,
    }


def gemma3_config(spec: ModelSpec) -> Keys:
    """In the layout of before transformers 5, which later ones read."""
    theta, scaling = rope_of_spec(spec)
    rope = {"rope_theta": theta, "rope_local_base_freq": spec.rope_local_theta or theta, "rope_scaling": scaling}
    return {**gemma2_config(spec), **rope, "rope_parameters": None}


def gemma2_layers(config: Config) -> Config:
    """Kinds of layers, where they follow from a pattern."""
    if config.get("layer_types") is not None:
        return config
    every, layers = config["sliding_window_pattern"], need(config, "num_hidden_layers")
    return {**config, "layer_types": [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]}


def gemma3_layers(config: Config) -> Config:
    """Rotary keys of each kind of layer, from either layout."""
    config = gemma2_layers(config)
    given = config.get("rope_parameters") or {}
    if not isinstance(given, dict) or not isinstance(config.get("rope_scaling"), dict | None):
        return config  # refused where they are read
    full, sliding = ({**(given.get(kind) or {"rope_type": "default"})} for kind in (FULL, SLIDING))
    full |= config.get("rope_scaling") or {}
    full.setdefault("rope_theta", config["rope_theta"])
    sliding.setdefault("rope_theta", config["rope_local_base_freq"])
    return {**config, "rope_scaling": None, "rope_parameters": {FULL: full, SLIDING: sliding}}


def query_scalar(spec: ModelSpec) -> int:
    """A whole number there."""
    return round(spec.attention_scale**-2) if spec.attention_scale else spec.head_dim


def has_query_scalar(spec: ModelSpec) -> bool:
    return not spec.attention_scale or math.isclose(query_scalar(spec) ** -0.5, spec.attention_scale, rel_tol=1e-6)


def has_gemma_scale(spec: ModelSpec) -> bool:
    return math.isclose(spec.embed_scale, math.sqrt(spec.hidden), rel_tol=1e-6)


def starcoder2_keys(config: Config) -> Keys:
    biases = dict.fromkeys((*QKVO, "mlp_bias"), bool(config["use_bias"]))
    return {"norm": "layer", "norm_bias": True, "mlp": alone(config), **biases}


def alone(config: Config) -> str:
    """The activation of an MLP without a gate."""
    name = str(config["hidden_act"])
    if name not in ALONE:
        raise SpecError(f"hidden_act = {name!r} is not supported; known: {', '.join(map(repr, ALONE))}")
    return ALONE[name]


def starcoder2_config(spec: ModelSpec) -> Keys:
    return {"hidden_act": hf_name(ALONE, spec.mlp), "use_bias": spec.bias}


def hf_name(names: dict[str, str], value: str) -> str:
    """The first of those that stand for a value."""
    return next(name for name, kind in names.items() if kind == value)


GRANITE = {"embed_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}


def granite_keys(config: Config) -> Keys:
    scales = {key: float(config[name]) for key, name in GRANITE.items()}
    scales |= {"attention_scale": float(config["attention_multiplier"]), "logit_scale": 1 / config["logits_scaling"]}
    return {**llama_keys(config), **scales}


def granite_config(spec: ModelSpec) -> Keys:
    width = spec.head_dim
    scales = {name: getattr(spec, key) for key, name in GRANITE.items()}
    scales |= {"attention_multiplier": spec.attention_scale or width**-0.5, "logits_scaling": 1 / spec.logit_scale}
    return {**llama_config(spec), **scales}


def smollm3_keys(config: Config) -> Keys:
    kinds = ["rope" if turned else "none" for turned in turned_layers(config)]
    return {**llama_keys(config), "rope_layers": () if "none" not in kinds else shortest_period(tuple(kinds))}


def turned_layers(config: Config) -> list[int]:
    """Whether each layer has rotary embedding, in spite of its name `no_rope_layers`."""
    layers, every = need(config, "num_hidden_layers"), config["no_rope_layer_interval"]
    found = config.get("no_rope_layers")
    if found is None:
        return [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(found, list) or len(found) != layers:
        raise SpecError(f"no_rope_layers = {found!r:.60}: a list of num_hidden_layers = {layers} numbers is expected")
    return found


def smollm3_config(spec: ModelSpec) -> Keys:
    turned = [int(spec.has_rope(layer)) for layer in range(spec.layers)]
    window = {"use_sliding_window": spec.sliding_window > 0, "pad_token_id": None}
    return {**llama_config(spec), "no_rope_layers": turned, **window}


def shortest_period(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The least of what, repeated and cut off, gives the list."""
    return next(
        kinds[:count]
        for count in range(1, len(kinds) + 1)
        if all(kind == kinds[at % count] for at, kind in enumerate(kinds))
    )


# --- experts ------------------------------------------------------------------------------------------


def with_dense_layers(routed: list[bool], keys: Keys) -> Keys:
    """Keys of experts, where these layers have them."""
    if all(routed):
        return keys
    if not any(routed):
        return {}
    kinds = tuple("experts" if has else "dense" for has in routed)
    return {**keys, "mlp_layers": shortest_period(kinds)}


def sparse_layers(config: Config) -> list[bool]:
    """Of the Qwen families."""
    alone, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    layers = range(need(config, "num_hidden_layers"))
    return [layer not in alone and (layer + 1) % every == 0 for layer in layers]


def first_dense(config: Config) -> list[bool]:
    """Of the DeepSeek families."""
    return [layer >= (config["first_k_dense_replace"] or 0) for layer in range(need(config, "num_hidden_layers"))]


def dense_come_first(spec: ModelSpec) -> bool:
    routed = [spec.has_experts(layer) for layer in range(spec.layers)]
    return routed == sorted(routed)


def mixtral_keys(config: Config) -> Keys:
    return {"experts": need(config, "num_local_experts"), "top_k": need(config, "num_experts_per_tok")}


def mixtral_config(spec: ModelSpec) -> Keys:
    return {
        "num_local_experts": spec.experts,
        "num_experts_per_tok": spec.top_k,
        "intermediate_size": spec.expert_ffn,
    }


def moe_keys(config: Config) -> Keys:
    # transformers 5 renamed `num_experts`.
    return {
        "experts": config.get("num_local_experts") or need(config, "num_experts"),
        "top_k": need(config, "num_experts_per_tok"),
        "expert_ffn": need(config, "moe_intermediate_size"),
        "norm_topk": bool(config["norm_topk_prob"]),
    }


def moe_config(spec: ModelSpec) -> Keys:
    return {
        "num_experts": spec.experts,
        "num_experts_per_tok": spec.top_k,
        "norm_topk_prob": spec.norm_topk,
        "moe_intermediate_size": spec.expert_ffn,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(spec.layers) if not spec.has_experts(layer)],
    }


def qwen2_moe_keys(config: Config) -> Keys:
    shared, each = need(config, "shared_expert_intermediate_size"), need(config, "moe_intermediate_size")
    if shared % each or not shared:
        raise SpecError(
            f"shared_expert_intermediate_size = {shared} is not supported: it must be a multiple of "
            f"moe_intermediate_size = {each}"
        )
    experts = {**moe_keys(config), "shared_experts": shared // each, "shared_gate": True}
    return {**with_dense_layers(sparse_layers(config), experts), "qkv_bias": bool(config["qkv_bias"])}


def qwen2_moe_config(spec: ModelSpec) -> Keys:
    shared = {"shared_expert_intermediate_size": spec.shared_experts * spec.expert_ffn, "qkv_bias": spec.qkv_bias}
    return {**moe_config(spec), **qwen_config(spec), **shared}


def mellum_keys(config: Config) -> Keys:
    layers = need(config, "num_hidden_layers")
    kinds = config.get("mlp_layer_types") or ["sparse"] * layers
    if set(kinds) - {"sparse", "dense"} or len(kinds) != layers:
        raise SpecError(f"mlp_layer_types = {kinds!r:.60}: 'sparse' or 'dense' for each of {layers} layers is expected")
    return {**with_dense_layers([kind == "sparse" for kind in kinds], moe_keys(config)), "qk_norm": True}


def mellum_config(spec: ModelSpec) -> Keys:
    kinds = ["sparse" if spec.has_experts(layer) else "dense" for layer in range(spec.layers)]
    return {**moe_config(spec), "attention_bias": spec.out_bias, "mlp_layer_types": kinds}


# --- latent attention -----------------------------------------------------------------------------------


def latent_keys(config: Config) -> Keys:
    for key in ("num_hidden_layers", "first_k_dense_replace", "qk_rope_head_dim", "v_head_dim"):
        least = 0 if key == "first_k_dense_replace" else 1
        if not isinstance(config.get(key), int) or config[key] < least:
            raise SpecError(f"{key} = {config.get(key)!r:.60}: a whole number of at least {least} is expected")
    rope = rotary_keys(config)
    width = need(config, "qk_nope_head_dim") + config["qk_rope_head_dim"]
    # Of DeepSeek's YaRN: a temperature of scores, beside the one of cos and sin.
    weight = 0.0 if kind_of(rope) == "default" else rope.get("mscale_all_dim") or 0.0
    scale = mscale(need(rope, "factor"), weight) ** 2 / math.sqrt(width) if weight else 0.0
    return {
        "kv_heads": 0,
        "kv_lora_rank": need(config, "kv_lora_rank"),
        "q_lora_rank": config.get("q_lora_rank") or 0,
        "head_dim": config["qk_nope_head_dim"],
        "rope_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "attention_scale": scale,
    }


def deepseek_experts(config: Config) -> Keys:
    if not need(config, "n_shared_experts"):
        raise SpecError("n_shared_experts = 0 is not supported; it must be 1 or more")
    return {
        "experts": need(config, "n_routed_experts"),
        "top_k": need(config, "num_experts_per_tok"),
        "expert_ffn": need(config, "moe_intermediate_size"),
        "shared_experts": config["n_shared_experts"],
        "routed_scale": float(config["routed_scaling_factor"]),
    }


def groups_of_config(config: Config) -> Keys:
    return {"expert_groups": config.get("n_group") or 1, "top_groups": config.get("topk_group") or 1}


def deepseek_v2_keys(config: Config) -> Keys:
    """Its weights are never divided by their sum, whatever norm_topk_prob says."""
    experts = {**deepseek_experts(config), "norm_topk": False}
    if config["topk_method"] == "group_limited_greedy":
        experts |= groups_of_config(config)
    return {**latent_keys(config), "rope_interleaved": True, **with_dense_layers(first_dense(config), experts)}


def deepseek_v3_keys(config: Config) -> Keys:
    keys = {**latent_keys(config), "rope_interleaved": bool(config["rope_interleave"])}
    return {**keys, **with_dense_layers(first_dense(config), sigmoid_experts(config))}


def sigmoid_experts(config: Config) -> Keys:
    experts = {**deepseek_experts(config), **groups_of_config(config), "router": "sigmoid", "choice_bias": True}
    return {**experts, "norm_topk": bool(config["norm_topk_prob"])}


def latent_config(spec: ModelSpec) -> Keys:
    scaling = rope_of_spec(spec)[1]
    config: Keys = {
        "head_dim": spec.rope_head_dim,
        "kv_lora_rank": spec.kv_lora_rank,
        "q_lora_rank": spec.q_lora_rank or None,
        "qk_nope_head_dim": spec.head_dim,
        "qk_rope_head_dim": spec.rope_head_dim,
        "v_head_dim": spec.v_head_dim,
        "attention_bias": False,
        **deepseek_config(spec),
    }
    if spec.attention_scale and scaling is not None:  # mscale² = what scores are multiplied by, over 1/√width
        weight = (math.sqrt(spec.score_scale) - 1) / (0.1 * math.log(spec.rope_scaling.factor))
        config["rope_scaling"] = {
            "attention_factor": spec.rope_scaling.temperature,
            **scaling,
            "mscale_all_dim": weight,
        }
    return config


def deepseek_config(spec: ModelSpec) -> Keys:
    """Of experts."""
    config: Keys = {"first_k_dense_replace": spec.layers - spec.expert_layers, "num_nextn_predict_layers": 0}
    if not spec.experts:
        return {**config, "n_routed_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}
    return {
        **config,
        "n_routed_experts": spec.experts,
        "num_experts_per_tok": spec.top_k,
        "moe_intermediate_size": spec.expert_ffn,
        "n_shared_experts": spec.shared_experts,
        "routed_scaling_factor": spec.routed_scale,
        "norm_topk_prob": spec.norm_topk,
        "n_group": spec.expert_groups,
        "topk_group": spec.top_groups,
    }


def deepseek_v2_config(spec: ModelSpec) -> Keys:
    grouped = "group_limited_greedy" if spec.expert_groups > 1 else "greedy"
    return {**latent_config(spec), "topk_method": grouped, "mlp_bias": False}


def deepseek_v3_config(spec: ModelSpec) -> Keys:
    return {**latent_config(spec), "rope_interleave": spec.rope_interleaved}


def glm4_moe_keys(config: Config) -> Keys:
    keys = {"qk_norm": bool(config["use_qk_norm"])}
    return {**keys, **with_dense_layers(first_dense(config), sigmoid_experts(config))}


def glm4_moe_config(spec: ModelSpec) -> Keys:
    own = {"attention_bias": spec.qkv_bias, "use_qk_norm": spec.qk_norm, "partial_rotary_factor": spec.rope_fraction}
    return {**deepseek_config(spec), **own}


def olmoe_keys(config: Config) -> Keys:
    experts = {"experts": need(config, "num_experts"), "top_k": need(config, "num_experts_per_tok")}
    return {**experts, "norm_topk": bool(config["norm_topk_prob"]), "qk_norm_whole": True}


def olmoe_config(spec: ModelSpec) -> Keys:
    return {
        "num_experts": spec.experts,
        "num_experts_per_tok": spec.top_k,
        "norm_topk_prob": spec.norm_topk,
        "intermediate_size": spec.expert_ffn,
        "attention_bias": spec.out_bias,
        "pad_token_id": None,
    }


def has_yarn_scale(spec: ModelSpec) -> bool:
    """Whether a scale of scores can be written as that of DeepSeek's YaRN."""
    yarn = spec.rope_scaling.type == "yarn" and spec.rope_scaling.factor > 1
    return not spec.attention_scale or (yarn and spec.score_scale > 1)


LATENT_DEFAULTS: Keys = {
    **ROPE_DEFAULTS, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip
LATENT_WRITES: Keys = {
    **ROPE_WRITES,
    "experts": anything,
    "kv_lora_rank": lambda spec: spec.kv_lora_rank > 0,
    "attention_scale": has_yarn_scale,
    "mlp_layers": dense_come_first,
    "shared_experts": lambda spec: spec.shared_experts > 0 or not spec.experts,
    **dict.fromkeys(
        ("q_lora_rank", "rope_head_dim", "v_head_dim", "routed_scale", "expert_groups", "top_groups"), anything
    ),
}
GLM_DEFAULTS: Keys = {
    **ROPE_DEFAULTS, "rms_norm_eps": 1.5625e-7, "head_dim": 128, "num_key_value_heads": 2, "attention_bias": True,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
EXPERTS_OF_GLM: Keys = {
    "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
GLM_WRITES: Keys = {**ROPE_WRITES, "qkv_bias": anything, "rope_fraction": lambda spec: spec.rope_fraction < 1}
GEMMA_DEFAULTS: Keys = {
    **ROPE_DEFAULTS, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip
GEMMA2_DEFAULTS: Keys = {
    **GEMMA_DEFAULTS, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}  # fmt: skip
GEMMA_NORMS = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
CAUSAL: dict[str, tuple[Any, ...]] = {"use_bidirectional_attention": (None, False)}
GEMMA2_WRITES: Keys = {
    **ROPE_WRITES, **BY_LAYER, **ATTENTION_BIAS, "norm_placement": "both", "embed_scale": has_gemma_scale,
    "attention_scale": has_query_scalar, "final_softcap": anything,
    "hidden": lambda spec: spec.hidden % spec.heads == 0,
}  # fmt: skip

# --- the table ------------------------------------------------------------------------------------------

# In the order in which a spec looks for a family to be saved as.
FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        models="GPT-2, DistilGPT-2",
        defaults={
            "tie_word_embeddings": True,
            "activation_function": "gelu_new",
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
        },
        must_be={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True, None),
            "scale_attn_by_inverse_layer_idx": (False, None),
            "add_cross_attention": (False, None),
        },
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        writes={
            "norm": "layer",
            "positions": "learned",
            "mlp": "gelu",
            "bias": True,
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "kv_heads": lambda spec: spec.kv_heads == spec.heads,
            "head_dim": lambda spec: spec.head_dim * spec.heads == spec.hidden,
            "experts": 0,
        },
        reads=gpt2_keys,
        says=gpt2_config,
    ),
    # q, k, v and gate, up are one matrix each. Without longrope it is the network of Llama or Mistral.
    "phi3": Family(
        "Phi3ForCausalLM",
        models="Phi-3 and Phi-4 (mini: partial rotary, LongRoPE)",
        defaults={
            **ROPE_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        writes={
            **ROPE_WRITES,
            **WINDOW,
            "head_dim": lambda spec: spec.head_dim * spec.heads == spec.hidden,
            "rope_fraction": anything,
            "rope_scaling": lambda spec: (
                spec.rope_scaling.type == "longrope" or (spec.rope_scaling.type == "none" and spec.rope_fraction != 1)
            ),
        },
        windows="all",
        partial_rotary=True,
        fused=("qkv_proj", "gate_up_proj"),
        says=phi3_config,
    ),
    "llama": Family(
        "LlamaForCausalLM",
        models="Llama 1 to 3.3, SmolLM 1 and 2, Yi, DeepSeek LLM",
        defaults={**ROPE_DEFAULTS, "max_position_embeddings": 2048},
        writes={
            **ROPE_WRITES,
            **ATTENTION_BIAS,
            "bias": anything,
            "mlp_bias": anything,
            "hidden": lambda spec: spec.hidden % spec.heads == 0,
        },
        attention_bias=QKVO,
        reads=llama_keys,
        says=llama_config,
    ),
    # GLM-4-9B: a half of each head is turned, in pairs side by side; gate, up are one matrix.
    "glm": Family(
        "GlmForCausalLM",
        models="GLM-4-9B",
        defaults=GLM_DEFAULTS,
        writes=GLM_WRITES,
        attention_bias=("qkv_bias",),
        partial_rotary=True,
        interleaved=True,
        fused=("gate_up_proj",),
        says=glm_config,
    ),
    # GLM-4-0414: the same with a norm after attention and MLP, too.
    "glm4": Family(
        "Glm4ForCausalLM",
        models="GLM-4-0414, GLM-Z1",
        defaults=GLM_DEFAULTS,
        writes={**GLM_WRITES, "norm_placement": "both"},
        attention_bias=("qkv_bias",),
        partial_rotary=True,
        interleaved=True,
        fused=("gate_up_proj",),
        reads=lambda config: {"norm_placement": "both"},
        says=glm_config,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        models="OLMo 2",
        defaults={**ROPE_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        writes={**ROPE_WRITES, **ATTENTION_BIAS, "norm_placement": "post", "qk_norm_whole": True},
        attention_bias=QKVO,
        names={
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        },
        reads=lambda config: {"norm_placement": "post", "qk_norm_whole": True},
        says=lambda spec: {"attention_bias": spec.out_bias, "pad_token_id": None},
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        models="Gemma 1, CodeGemma",
        defaults={**GEMMA_DEFAULTS, "num_key_value_heads": 16},
        must_be=CAUSAL,
        writes={**ROPE_WRITES, **ATTENTION_BIAS, "embed_scale": has_gemma_scale},
        attention_bias=QKVO,
        norms_from_zero=True,
        reads=gemma_keys,
        says=lambda spec: {"attention_bias": spec.out_bias, "pad_token_id": None},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        models="Gemma 2",
        defaults={**GEMMA2_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        must_be=CAUSAL,
        writes={**GEMMA2_WRITES, "attention_softcap": anything},
        windows="layers",
        attention_bias=QKVO,
        norms_from_zero=True,
        names=GEMMA_NORMS,
        activation="hidden_activation",
        prepare=lambda config: gemma2_layers({**config, "sliding_window_pattern": 2}),
        reads=gemma2_keys,
        says=gemma2_config,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        models="Gemma 3 270M, 1B (text)",
        defaults={
            **GEMMA2_DEFAULTS,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "max_position_embeddings": 131_072,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        # Of attention a cap is computed by one of the backends of `transformers` alone.
        must_be={**CAUSAL, "attn_logit_softcapping": (None,)},
        writes={
            **GEMMA2_WRITES,
            "qk_norm": True,
            "rope_local_theta": lambda spec: (
                spec.rope_local_theta > 0 or not spec.sliding_window or spec.rope_scaling.type == "none"
            ),
        },
        windows="layers",
        attention_bias=QKVO,
        rope_by_kind=True,
        norms_from_zero=True,
        names=GEMMA_NORMS,
        activation="hidden_activation",
        prepare=gemma3_layers,
        reads=lambda config: {**gemma2_keys(config), "qk_norm": True},
        says=gemma3_config,
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        models="StarCoder2 3B to 15B",
        defaults={
            **ROPE_DEFAULTS,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "use_bias": True,
        },
        writes={
            **ROPE_WRITES,
            **WINDOW,
            "norm": "layer",
            "norm_bias": True,
            "mlp": lambda spec: not spec.gated_mlp,
            "bias": lambda spec: spec.bias or not (spec.qkv_bias or spec.out_bias or spec.mlp_bias),
            **dict.fromkeys((*QKVO, "mlp_bias"), anything),
        },
        windows="all",
        names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
        norm_eps="norm_epsilon",
        reads=starcoder2_keys,
        says=starcoder2_config,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        models="SmolLM3",
        defaults={
            **ROPE_DEFAULTS,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
            "rope_theta": 2e6,
        },
        writes={
            **ROPE_WRITES,
            **ATTENTION_BIAS,
            **BY_LAYER,
            "bias": anything,
            "mlp_bias": anything,
            "rope_layers": lambda spec: bool(spec.rope_layers),
        },
        windows="layers",
        attention_bias=QKVO,
        reads=smollm3_keys,
        says=smollm3_config,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        models="Granite 3.x dense",
        defaults={
            **ROPE_DEFAULTS,
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
        writes={
            **ROPE_WRITES,
            **ATTENTION_BIAS,
            "bias": anything,
            "mlp_bias": anything,
            **dict.fromkeys(("attention_scale", "logit_scale", *GRANITE), anything),
        },
        attention_bias=QKVO,
        reads=granite_keys,
        says=granite_config,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        models="Mistral 7B, Mistral NeMo",
        defaults={**ROPE_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
        writes={**ROPE_WRITES, **WINDOW},
        windows="all",
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        models="Ministral 8B",
        defaults={**ROPE_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
        writes={**ROPE_WRITES, **BY_LAYER},
        windows="layers",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        models="Qwen1.5, Qwen2, Qwen2.5, QwQ",
        defaults={**QWEN_DEFAULTS, "num_key_value_heads": 32},
        writes={**ROPE_WRITES, **BY_LAYER, "qkv_bias": True},
        windows="layers",
        reads=lambda config: {"qkv_bias": True},
        says=qwen_config,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        models="Qwen3 dense",
        defaults={**QWEN_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
        writes={**ROPE_WRITES, **BY_LAYER, **ATTENTION_BIAS, "qk_norm": True},
        windows="layers",
        attention_bias=QKVO,
        reads=lambda config: {"qk_norm": True},
        says=qwen_config,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        models="Mixtral 8x7B, 8x22B",
        defaults={
            **ROPE_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        writes={**EXPERTS_WRITES, **WINDOW},
        aliases={"num_experts": "num_local_experts"},
        windows="all",
        reads=mixtral_keys,
        says=mixtral_config,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        models="Qwen3-30B-A3B, Qwen3-235B-A22B",
        defaults={
            **ROPE_DEFAULTS,
            "norm_topk_prob": False,
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "sliding_window": 4096,
        },
        writes={**EXPERTS_WRITES, **NORM_TOPK, **WINDOW, **ATTENTION_BIAS, "qk_norm": True},
        windows="all",
        attention_bias=QKVO,
        reads=lambda config: {**with_dense_layers(sparse_layers(config), moe_keys(config)), "qk_norm": True},
        says=lambda spec: {**moe_config(spec), **qwen_config(spec)},
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
        defaults={
            **QWEN_DEFAULTS,
            "num_key_value_heads": 16,
            "norm_topk_prob": False,
            "qkv_bias": True,
            "shared_expert_intermediate_size": 5632,
        },
        writes={
            **EXPERTS_WRITES,
            **NORM_TOPK,
            **BY_LAYER,
            "qkv_bias": anything,
            "shared_experts": lambda spec: spec.shared_experts > 0,
            "shared_gate": True,
        },
        windows="layers",
        names={"mlp.shared_experts.": "mlp.shared_expert."},
        reads=qwen2_moe_keys,
        says=qwen2_moe_config,
    ),
    "mellum": Family(
        "MellumForCausalLM",
        models="Mellum 2",
        defaults={
            **ROPE_DEFAULTS,
            "head_dim": 128,
            "num_key_value_heads": 4,
            "sliding_window": 1024,
            "norm_topk_prob": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        must_be={
            "num_nextn_predict_layers": (0, None),
            "num_mtp_layers": (0, None),
        },
        writes={
            **EXPERTS_WRITES,
            **NORM_TOPK,
            **BY_LAYER,
            **ATTENTION_BIAS,
            "qk_norm": True,
            "rope_local_theta": anything,
        },
        windows="layers",
        attention_bias=QKVO,
        rope_by_kind=True,
        reads=mellum_keys,
        says=mellum_config,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        models="OLMoE",
        defaults={**ROPE_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "norm_topk_prob": False},
        must_be={"clip_qkv": (None,)},
        writes={
            **EXPERTS_WRITES,
            **ATTENTION_BIAS,
            "norm_topk": anything,
            "qk_norm_whole": True,
            "head_dim": lambda spec: spec.head_dim * spec.heads == spec.hidden,
        },
        aliases={"num_local_experts": "num_experts"},
        attention_bias=QKVO,
        reads=olmoe_keys,
        says=olmoe_config,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        models="GLM-4.5, 4.6, 4.5-Air",
        defaults={
            **GLM_DEFAULTS,
            "head_dim": None,
            **EXPERTS_OF_GLM,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "attention_bias": False,
            "use_qk_norm": False,
        },
        aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
        writes={
            **ROPE_WRITES,
            "experts": lambda spec: spec.experts > 0,
            "shared_experts": lambda spec: spec.shared_experts > 0,
            "router": "sigmoid",
            "choice_bias": True,
            "mlp_layers": dense_come_first,
            **dict.fromkeys(
                ("qkv_bias", "qk_norm", "rope_fraction", "norm_topk", "routed_scale", "balance_bias"), anything
            ),
            **dict.fromkeys(("expert_groups", "top_groups"), anything),
        },
        attention_bias=("qkv_bias",),
        partial_rotary=True,
        reads=glm4_moe_keys,
        says=glm4_moe_config,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        models="DeepSeek-V2, V2-Lite, Coder-V2",
        defaults={
            **LATENT_DEFAULTS,
            "max_position_embeddings": 2048,
            "first_k_dense_replace": 0,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "moe_intermediate_size": 1407,
        },
        must_be={
            "attention_bias": (False, None),
            "mlp_bias": (False, None),
            "topk_method": ("greedy", "group_limited_greedy"),
        },
        aliases={"num_experts": "n_routed_experts"},
        writes={
            **LATENT_WRITES,
            "rope_interleaved": True,
            "experts": lambda spec: spec.experts > 0,
            "norm_topk": False,
            "balance_bias": 0,
        },
        reads=deepseek_v2_keys,
        says=deepseek_v2_config,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        models="DeepSeek-V3, R1 (without the head of further tokens)",
        defaults={
            **LATENT_DEFAULTS,
            "max_position_embeddings": 4096,
            "rope_interleave": True,
            "first_k_dense_replace": 3,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
        },
        must_be={"attention_bias": (False, None)},
        aliases={"num_local_experts": "n_routed_experts"},
        writes={
            **LATENT_WRITES,
            "rope_interleaved": anything,
            "norm_topk": anything,
            "router": lambda spec: not spec.experts or spec.router == "sigmoid",
            "choice_bias": lambda spec: not spec.experts or spec.choice_bias,
            "balance_bias": anything,
        },
        reads=deepseek_v3_keys,
        says=deepseek_v3_config,
    ),
}
