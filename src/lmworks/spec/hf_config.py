"""A model's shape as Hugging Face writes it: config.json ↔ ModelSpec, for the families that share our network.

Every family is a row of `FAMILIES`: which configs are supported, and which specs it can express. Dropout is no part
of our network: its keys are ignored, and written as 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import SpecError, did_you_mean
from .model import LAYER_TYPES, MUP_KEYS, ModelSpec, RopeScaling

Config = Mapping[str, Any]  # a parsed config.json


@dataclass(frozen=True)
class Family:
    architecture: str
    defaults: dict[str, Any]  # of keys that a config may leave out, as `transformers` fills them in
    must_be: dict[str, tuple[Any, ...]]  # values that our network computes; anything else is refused
    writes: dict[str, Any]  # spec keys and the value that this family can express; a callable says whether it can


ROPE_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}
ROPE_MUST_BE = {"hidden_act": ("silu", None)}
ROPE_WRITES: dict[str, Any] = {
    "norm": "rms",
    "positions": "rope",
    "mlp": "swiglu",
    "bias": False,
    "qkv_bias": False,
    "qk_norm": False,
    "experts": 0,
}
# capacity and balance_loss act in training alone; a choice bias changes the logits, and none of these families has one.
EXPERTS_WRITES = {
    **ROPE_WRITES,
    "experts": lambda spec: spec.experts > 0,
    "balance_bias": 0,
}
# Keys of which every family can express any value, and those that act in training alone; of other keys that a family
# does not name it can express the default.
WRITTEN = frozenset({
    "preset", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context", "norm_eps", "rope_theta",
    "rope_scaling", "qkv_bias", "sliding_window", "tie_embeddings", "top_k", "expert_ffn", "capacity", "balance_loss",
    "attention", "init_std", "scalar_head", *MUP_KEYS,
})  # fmt: skip
NORM_TOPK = {"norm_topk": lambda spec: True}
BY_LAYER = {"layer_types": lambda spec: True}
CLASSIFIER = "ForSequenceClassification"
QWEN_MUST_BE = {**ROPE_MUST_BE, "attention_bias": (False, None)}

# In the order in which a spec looks for a family to be saved as.
FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"tie_word_embeddings": True, "activation_function": "gelu_new"},
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True, None),
            "scale_attn_by_inverse_layer_idx": (False, None),
            "add_cross_attention": (False, None),
        },
        {
            "norm": "layer",
            "positions": "learned",
            "mlp": "gelu",
            "bias": True,
            "kv_heads": lambda spec: spec.kv_heads == spec.heads,
            "head_dim": lambda spec: spec.head_dim * spec.heads == spec.hidden,
            "qk_norm": False,
            "sliding_window": 0,
            "experts": 0,
        },
    ),
    # q, k, v and gate, up are one matrix each. Without longrope it is the network of Llama or Mistral.
    "phi3": Family(
        "Phi3ForCausalLM",
        {
            **ROPE_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        QWEN_MUST_BE,
        {
            **ROPE_WRITES,
            "head_dim": lambda spec: spec.head_dim * spec.heads == spec.hidden,
            "rope_scaling": lambda spec: spec.rope_scaling.type == "longrope",
        },
    ),
    "llama": Family(
        "LlamaForCausalLM",
        {**ROPE_DEFAULTS, "max_position_embeddings": 2048},
        ROPE_MUST_BE,
        {
            **ROPE_WRITES,
            "bias": lambda spec: True,  # Llama has attention_bias and mlp_bias: all of them or none
            "qkv_bias": lambda spec: spec.qkv_bias == spec.bias,
            "sliding_window": 0,
            "hidden": lambda spec: spec.hidden % spec.heads == 0,
        },
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {**ROPE_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
        ROPE_MUST_BE,
        ROPE_WRITES,
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        {**ROPE_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
        QWEN_MUST_BE,
        {**ROPE_WRITES, **BY_LAYER},
    ),
    "qwen2": Family("Qwen2ForCausalLM", ROPE_DEFAULTS, ROPE_MUST_BE, {**ROPE_WRITES, **BY_LAYER, "qkv_bias": True}),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**ROPE_DEFAULTS, "head_dim": 128},
        QWEN_MUST_BE,
        {**ROPE_WRITES, **BY_LAYER, "qk_norm": True},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {**ROPE_DEFAULTS, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
        ROPE_MUST_BE,
        EXPERTS_WRITES,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {**ROPE_DEFAULTS, "norm_topk_prob": False},
        {**QWEN_MUST_BE, "decoder_sparse_step": (1, None), "mlp_only_layers": ([], None)},
        {**EXPERTS_WRITES, **NORM_TOPK, "qk_norm": True},
    ),
    "mellum": Family(
        "MellumForCausalLM",
        {**ROPE_DEFAULTS, "rms_norm_eps": 1e-6, "sliding_window": 1024, "norm_topk_prob": True},
        {
            **QWEN_MUST_BE,
            "num_nextn_predict_layers": (0, None),
            "num_mtp_layers": (0, None),
        },
        {**EXPERTS_WRITES, **NORM_TOPK, **BY_LAYER, "qk_norm": True, "rope_local_theta": lambda spec: True},
    ),
    # Latent attention with dense layers; its experts (sigmoid routing in groups) are not supported.
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {**ROPE_DEFAULTS, "max_position_embeddings": 4096, "rope_interleave": True, "first_k_dense_replace": 3},
        QWEN_MUST_BE,
        {
            **ROPE_WRITES,
            "kv_lora_rank": lambda spec: spec.kv_lora_rank > 0,
            "sliding_window": 0,
            **dict.fromkeys(("q_lora_rank", "rope_head_dim", "v_head_dim", "rope_interleaved"), lambda spec: True),
        },
    ),
}


HF_LAYER_TYPES = {name: f"{name}_attention" for name in LAYER_TYPES}
LAYERED = [name for name, family in FAMILIES.items() if "layer_types" in family.writes]

# --- config.json → spec -------------------------------------------------------------------------------


def family_of_config(config: Config) -> str:
    name = str(config.get("model_type"))
    if name not in FAMILIES:
        raise SpecError(f"model_type {name!r} is not supported{did_you_mean(name, FAMILIES)}")
    return name


def spec_of_config(config: Config) -> ModelSpec:
    """The spec of a parsed config.json; what the network cannot compute is refused by key."""
    name = family_of_config(config)
    family = FAMILIES[name]
    config = {**family.defaults, **config}
    for key, allowed in family.must_be.items():
        if config.get(key) not in allowed:
            raise SpecError(f"{key} = {config.get(key)!r} is not supported for {name}; it must be {allowed[0]!r}")
    if config.get("quantization_config"):
        raise SpecError("quantization_config: quantized weights are not supported; export the model in bf16 or fp32")
    spec = gpt2_spec(config) if name == "gpt2" else rope_spec(name, config)
    if config.get("parametrization") == "mup":  # of an export of ours: how it goes on learning, not what it computes
        spec = spec.replace(**{key: config[key] for key in MUP_KEYS if key in config})
    return spec.replace(scalar_head=True) if has_scalar_head(config) else spec


def has_scalar_head(config: Config) -> bool:
    """A reward model, as `transformers` has it: a sequence classifier with one label."""
    if not any(str(one).endswith(CLASSIFIER) for one in config.get("architectures") or ()):
        return False
    labels = len(config.get("id2label") or {}) or config.get("num_labels") or 2
    if labels != 1:
        raise SpecError(f"a classifier with {labels} labels is not supported: a reward model has one")
    return True


def gpt2_spec(config: Config) -> ModelSpec:
    return ModelSpec(
        layers=need(config, "n_layer"),
        hidden=need(config, "n_embd"),
        heads=need(config, "n_head"),
        ffn=config.get("n_inner") or 4 * need(config, "n_embd"),
        vocab=need(config, "vocab_size"),
        context=need(config, "n_positions"),
        norm="layer",
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        positions="learned",
        mlp="gelu",
        bias=True,
        tie_embeddings=config["tie_word_embeddings"],
        init_std=config.get("initializer_range", 0.02),
    )


def rope_spec(name: str, config: Config) -> ModelSpec:
    experts = {}
    if name == "mixtral":
        experts = {"experts": need(config, "num_local_experts"), "top_k": need(config, "num_experts_per_tok")}
    elif name in ("qwen3_moe", "mellum"):
        # transformers 5 renamed `num_experts`.
        count = config.get("num_local_experts") or need(config, "num_experts")
        experts = {"experts": count, "top_k": need(config, "num_experts_per_tok")}
        experts["expert_ffn"] = need(config, "moe_intermediate_size")
        experts["norm_topk"] = bool(config["norm_topk_prob"])
    if name == "deepseek_v3":
        return latent_spec(config)
    bias = bool(config.get("attention_bias"))
    if bias != bool(config.get("mlp_bias")):
        raise SpecError("attention_bias and mlp_bias must be equal: biases are on every projection or on none")
    return ModelSpec(
        **common_keys(config),
        kv_heads=config.get("num_key_value_heads") or need(config, "num_attention_heads"),
        head_dim=config.get("head_dim") or 0,
        bias=bias,
        qkv_bias=name == "qwen2" or bias,
        qk_norm=name in ("qwen3", "qwen3_moe", "mellum"),
        **windows_of_config(name, config),
        **experts,
    )


def common_keys(config: Config) -> dict[str, Any]:
    """Of all families with rotary embedding."""
    rope = rotary_keys(config)
    return {
        "layers": need(config, "num_hidden_layers"),
        "hidden": need(config, "hidden_size"),
        "heads": need(config, "num_attention_heads"),
        "ffn": need(config, "intermediate_size"),
        "vocab": need(config, "vocab_size"),
        "context": longest_context(config, rope),
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling_of_config(rope),
        "tie_embeddings": config["tie_word_embeddings"],
        "init_std": config.get("initializer_range", 0.02),
    }


def rotary_keys(config: Config) -> dict[str, Any]:
    """Of both layouts, in one dictionary; where kinds of layers have keys of their own, those of full attention."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key), dict | None):
            raise SpecError(f"{key} = {config[key]!r:.60}: an object is expected")
    parameters = config.get("rope_parameters") or {}
    kind = "sliding_attention" if set(config.get("layer_types") or ()) == {"sliding_attention"} else "full_attention"
    of_kind: dict[str, Any] = parameters.get(kind) or parameters
    return {**config, **(config.get("rope_scaling") or {}), **of_kind}


def local_theta(config: Config) -> float:
    """The rotary base of sliding layers; 0: they are as the others."""
    parameters = config.get("rope_parameters") or {}
    full, sliding = parameters.get("full_attention"), parameters.get("sliding_attention")
    if not full or not sliding or full == sliding:
        return 0.0
    if (sliding.get("rope_type") or "default") != "default":
        raise SpecError(
            f"rope_parameters.sliding_attention has rope_type {sliding['rope_type']!r}: layers with a window are not "
            "stretched; it must be 'default', or all of it equal to full_attention's"
        )
    return float(need(sliding, "rope_theta"))


def latent_spec(config: Config) -> ModelSpec:
    for key in ("num_hidden_layers", "first_k_dense_replace", "qk_rope_head_dim", "v_head_dim"):
        least = 0 if key == "first_k_dense_replace" else 1
        if not isinstance(config.get(key), int) or config[key] < least:
            raise SpecError(f"{key} = {config.get(key)!r:.60}: a whole number of at least {least} is expected")
    layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    if dense < layers:
        raise SpecError(
            f"first_k_dense_replace = {dense}: experts of deepseek_v3 are not supported; it must be {layers} or more"
        )
    rope = rotary_keys(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default" and rope.get("mscale_all_dim"):
        raise SpecError(f"mscale_all_dim = {rope['mscale_all_dim']} is not supported: it changes the softmax scale")
    return ModelSpec(
        **common_keys(config),
        rope_interleaved=bool(config["rope_interleave"]),
        kv_lora_rank=need(config, "kv_lora_rank"),
        q_lora_rank=config.get("q_lora_rank") or 0,
        head_dim=need(config, "qk_nope_head_dim"),
        rope_head_dim=need(config, "qk_rope_head_dim"),
        v_head_dim=need(config, "v_head_dim"),
    )


def windows_of_config(name: str, config: Config) -> dict[str, Any]:
    """`sliding_window`, and where layers differ `layer_types`, with the rotary base of sliding layers."""
    layers = need(config, "num_hidden_layers")
    window = config.get("sliding_window") or 0
    if name.startswith("qwen") and not config.get("use_sliding_window"):
        window = 0
    kinds = [str(kind) for kind in config.get("layer_types") or ()]
    if window and not kinds and name in ("qwen2", "qwen3"):  # layers from max_window_layers on have the window
        full = min(max(0, config.get("max_window_layers", 28)), layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if not kinds and name == "mellum":
        kinds = ["full_attention"] * layers
    if unknown := set(kinds) - set(HF_LAYER_TYPES.values()):
        raise SpecError(f"layer_types: {min(unknown)!r} is not supported; known: {', '.join(HF_LAYER_TYPES.values())}")
    if kinds and len(kinds) != layers:
        raise SpecError(f"layer_types names {len(kinds)} layers, but num_hidden_layers = {layers}")
    if not window or set(kinds) == {"full_attention"}:
        return {}
    if len(set(kinds)) < 2:
        return {"sliding_window": window}
    if name not in LAYERED:
        raise SpecError(f"layers of {name} that differ in attention (layer_types) are not supported")
    types = shortest_period(tuple(kind.removesuffix("_attention") for kind in kinds))
    return {"sliding_window": window, "layer_types": types, "rope_local_theta": local_theta(config)}


def shortest_period(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The least of what, repeated and cut off, gives the list."""
    return next(
        kinds[:count]
        for count in range(1, len(kinds) + 1)
        if all(kind == kinds[at % count] for at, kind in enumerate(kinds))
    )


# --- spec → config.json -------------------------------------------------------------------------------


def obstacles(spec: ModelSpec, family: Family) -> list[str]:
    """Keys of the spec that this family cannot express."""

    def fits(key: str, wanted: Any) -> bool:
        return bool(wanted(spec)) if callable(wanted) else getattr(spec, key) == wanted

    usual = ModelSpec()
    other = [field.name for field in fields(spec) if field.name not in {*family.writes, *WRITTEN}]
    unknown = [key for key in other if getattr(spec, key) != getattr(usual, key)]
    return [key for key, wanted in family.writes.items() if not fits(key, wanted)] + unknown


def family_of_spec(spec: ModelSpec) -> str:
    """The first family that has this shape; where none has, the nearest one names the keys that are in the way."""
    in_the_way = {name: obstacles(spec, family) for name, family in FAMILIES.items()}
    nearest = min(in_the_way, key=lambda name: ("experts" in in_the_way[name], len(in_the_way[name])))
    if keys := in_the_way[nearest]:
        values = ", ".join(f"model.{key} = {getattr(spec, key)!r}" for key in keys)
        raise SpecError(f"no Hugging Face family has this shape; the nearest, {nearest}, cannot express {values}")
    return nearest


def config_of_spec(spec: ModelSpec, eos: int | list[int] | None = None) -> dict[str, Any]:
    """A config.json for `transformers`, 4.5x and 5.x. Token ids are always named: its defaults are another model's."""
    name = family_of_spec(spec)
    common = {
        "model_type": name,
        "architectures": [architecture_of(spec, FAMILIES[name])],
        "vocab_size": spec.vocab,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": eos,
        "use_cache": True,
    }
    if spec.parametrization == "mup":
        common |= {key: getattr(spec, key) for key in MUP_KEYS}
    if spec.scalar_head:
        common |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return common | (gpt2_config(spec) if name == "gpt2" else rope_config(name, spec))


def architecture_of(spec: ModelSpec, family: Family) -> str:
    if not spec.scalar_head:
        return family.architecture
    return family.architecture.removesuffix("LMHeadModel").removesuffix("ForCausalLM") + CLASSIFIER


def gpt2_config(spec: ModelSpec) -> dict[str, Any]:
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


def rope_config(name: str, spec: ModelSpec) -> dict[str, Any]:
    theta, scaling = rope_of_spec(spec)
    config = {
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.expert_ffn if name == "mixtral" else spec.ffn,
        "max_position_embeddings": spec.rope_scaling.original_context
        if spec.rope_scaling.type == "dynamic"
        else spec.context,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "attention_dropout": 0.0,
        **(rope_by_layer_type(spec) if name == "mellum" else {"rope_theta": theta, "rope_scaling": scaling}),
    }
    if name == "deepseek_v3":
        config |= {
            "head_dim": spec.rope_head_dim,
            "kv_lora_rank": spec.kv_lora_rank,
            "q_lora_rank": spec.q_lora_rank or None,
            "qk_nope_head_dim": spec.head_dim,
            "qk_rope_head_dim": spec.rope_head_dim,
            "v_head_dim": spec.v_head_dim,
            "rope_interleave": spec.rope_interleaved,
            "first_k_dense_replace": spec.layers,
            "num_nextn_predict_layers": 0,
            "attention_bias": False,
        }
        return config
    if name == "llama":
        config |= {"attention_bias": spec.bias, "mlp_bias": spec.bias}
    else:
        config["sliding_window"] = spec.sliding_window or None
    if name.startswith("qwen"):
        config |= {"use_sliding_window": spec.sliding_window > 0, "max_window_layers": 0}
    if name in LAYERED:
        kinds = ("sliding" if spec.window_of(layer) else "full" for layer in range(spec.layers))
        config["layer_types"] = [HF_LAYER_TYPES[kind] for kind in kinds]
    if name == "phi3":
        config["original_max_position_embeddings"] = spec.rope_scaling.original_context or spec.context
        config["pad_token_id"] = None
    if name == "mixtral":
        config |= {"num_local_experts": spec.experts, "num_experts_per_tok": spec.top_k}
    if name in ("qwen3_moe", "mellum"):
        config |= {"num_experts": spec.experts, "num_experts_per_tok": spec.top_k, "norm_topk_prob": spec.norm_topk}
        config |= {"moe_intermediate_size": spec.expert_ffn, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return config


def rope_by_layer_type(spec: ModelSpec) -> dict[str, Any]:
    """As transformers 5 has it, which alone has such families."""
    theta, scaling = rope_of_spec(spec)
    full = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    sliding = {"rope_theta": spec.rope_local_theta, "rope_type": "default"} if spec.rope_local_theta else full
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


# --- rotary settings, both ways ---------------------------------------------------------------------------

# Two layouts are read: `rope_theta` beside `rope_scaling`, and `rope_parameters` with both since transformers 5. The
# first is written, because every version reads it.


def need(config: Config, key: str) -> Any:
    if config.get(key) is None:
        raise SpecError(f"'{key}' is missing")
    return config[key]


def scaling_of_config(rope: Config) -> RopeScaling:
    """`model.rope_scaling` from the rotary keys of a config, all in one dictionary."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise SpecError(f"partial_rotary_factor = {rope['partial_rotary_factor']} is not supported; it must be 1")
    if kind == "default":
        return RopeScaling()
    if kind in ("longrope", "su"):  # its first name
        return longrope_of_config(rope)
    if kind not in ("linear", "dynamic", "yarn", "llama3"):
        raise SpecError(f"rope_type {kind!r} is not supported; known: default, linear, dynamic, yarn, llama3, longrope")
    keys = {
        "linear": (),
        "dynamic": (),
        "yarn": ("beta_fast", "beta_slow"),
        "llama3": ("low_freq_factor", "high_freq_factor"),
    }[kind]
    given = {key: rope[key] for key in keys if rope.get(key)}
    original = rope.get("original_max_position_embeddings") or need(rope, "max_position_embeddings")
    # YaRN without a factor means the ratio of the two contexts.
    factor = rope.get("factor") or need(rope, "max_position_embeddings") / original
    if kind == "yarn":
        check_yarn(rope, factor)
    if kind == "linear":
        return RopeScaling(type="linear", factor=factor)
    return RopeScaling(type=kind, factor=factor, original_context=original, **given)


def longrope_of_config(rope: Config) -> RopeScaling:
    original = need(rope, "original_max_position_embeddings")
    factor = rope.get("factor") or need(rope, "max_position_embeddings") / original
    if rope.get("attention_factor") is not None:
        raise SpecError("longrope's attention_factor is not supported; it follows from the factor")
    if any(rope.get(key) is not None for key in ("short_mscale", "long_mscale")):
        raise SpecError("longrope's short_mscale and long_mscale are not supported")
    short, long = (tuple(need(rope, key)) for key in ("short_factor", "long_factor"))
    return RopeScaling(
        type="longrope", factor=max(factor, 1.0), original_context=original, short_factor=short, long_factor=long
    )


def longest_context(config: Config, rope: Config) -> int:
    """`max_position_embeddings`, which for dynamic scaling is the context before stretching."""
    context = need(config, "max_position_embeddings")
    if (rope.get("rope_type") or rope.get("type")) != "dynamic":
        return int(context)
    return int(context * (rope.get("factor") or 1))


def yarn_temperature(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def check_yarn(rope: Config, factor: float) -> None:
    """Only the paper's factor on cos and sin is supported; a config may also state it explicitly."""
    asked = rope.get("attention_factor")
    if asked is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        asked = yarn_temperature(factor, rope["mscale"]) / yarn_temperature(factor, rope["mscale_all_dim"])
    usual = yarn_temperature(factor)
    if asked is not None and not math.isclose(asked, usual, rel_tol=1e-6):
        raise SpecError(
            f"yarn's attention_factor {asked:g} is not supported; it must be 0.1·ln(factor) + 1 = {usual:g}"
        )
    if rope.get("truncate") is False:
        raise SpecError("yarn's truncate = false is not supported")


def rope_of_spec(spec: ModelSpec) -> tuple[float, dict[str, Any] | None]:
    """`rope_theta` and `rope_scaling`. Static NTK has no name there, but is only another base."""
    scaling = spec.rope_scaling
    if scaling.type == "none":
        return spec.rope_theta, None
    if scaling.type == "ntk":
        return spec.rope_theta * scaling.factor ** (spec.rotary_dim / (spec.rotary_dim - 2)), None
    config: dict[str, Any] = {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling.type in ("yarn", "llama3", "longrope"):
        config["original_max_position_embeddings"] = scaling.original_context
    if scaling.type == "yarn":
        config |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    if scaling.type == "longrope":
        config |= {"short_factor": [*scaling.short_factor], "long_factor": [*scaling.long_factor]}
    if scaling.type == "llama3":
        config |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    return spec.rope_theta, config
