"""A model's shape as Hugging Face writes it: config.json ↔ ModelSpec, for the families that share our network
(`hf_families`), with their rotary settings (`hf_rope`)."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from .errors import SpecError
from .hf_families import (
    ACTIVATIONS,
    EVERYWHERE,
    FAMILIES,
    HF_LAYER_TYPES,
    WRITTEN,
    Family,
    Keys,
    hf_name,
    shortest_period,
    turned_layers,
)
from .hf_rope import (
    Config,
    local_theta,
    longest_context,
    need,
    rope_by_kind,
    rope_of_spec,
    rotary_keys,
    scaling_of_config,
)
from .model import MUP_KEYS, ModelSpec

CLASSIFIER = "ForSequenceClassification"

# --- config.json → spec -------------------------------------------------------------------------------


def family_of_config(config: Config) -> str:
    name = str(config.get("model_type"))
    if name not in FAMILIES:
        # Other spellings alone: a model with a similar name is another network.
        same = [known for known in FAMILIES if plain(known) == plain(name)]
        hint = f"did you mean {same[0]!r}?" if same else f"known: {', '.join(sorted(FAMILIES))}"
        raise SpecError(f"model_type {name!r} is not supported; {hint}")
    return name


def plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def spec_of_config(config: Config) -> ModelSpec:
    """The spec of a parsed config.json; what the network cannot compute is refused by key."""
    name = family_of_config(config)
    family = FAMILIES[name]
    config = family.prepare(with_defaults(config, family))
    for key, allowed in {**EVERYWHERE, **family.must_be}.items():
        if config.get(key) not in allowed:
            raise SpecError(f"{key} = {config.get(key)!r} is not supported for {name}; it must be {allowed[0]!r}")
    if config.get("quantization_config"):
        raise SpecError("quantization_config: quantized weights are not supported; export the model in bf16 or fp32")
    keys = {} if name == "gpt2" else rope_keys(name, family, config)
    keys |= {"tie_embeddings": bool(config["tie_word_embeddings"]), "init_std": config.get("initializer_range", 0.02)}
    keys |= family.reads(config)
    if "mlp" not in keys:
        keys["mlp"] = activation_of_config(config, family)
    if keys.get("experts") and keys["mlp"] != "swiglu":
        raise SpecError(f"hidden_act = {config['hidden_act']!r} is not supported with experts; it must be 'silu'")
    spec = ModelSpec(**keys)
    if config.get("parametrization") == "mup":  # of an export of ours: how it goes on learning, not what it computes
        spec = spec.replace(**{key: config[key] for key in MUP_KEYS if key in config})
    return spec.replace(scalar_head=True) if has_scalar_head(config) else spec


def with_defaults(config: Config, family: Family) -> Keys:
    """As `transformers` fills it in; where a key has two names, the further one comes first."""
    also = {key: config[alias] for alias, key in family.aliases.items() if alias in config}
    return {"is_causal": True, **family.defaults, **config, **also}


def has_scalar_head(config: Config) -> bool:
    """A reward model, as `transformers` has it: a sequence classifier with one label."""
    if not any(str(one).endswith(CLASSIFIER) for one in config.get("architectures") or ()):
        return False
    labels = len(config.get("id2label") or {}) or config.get("num_labels") or 2
    if labels != 1:
        raise SpecError(f"a classifier with {labels} labels is not supported: a reward model has one")
    return True


def rope_keys(name: str, family: Family, config: Config) -> Keys:
    """Of all families with rotary embedding; `Family.reads` has those of one."""
    windows = windows_of_config(name, family, config)
    rope = rotary_keys(config, family.rope_by_kind)
    fraction = rope.get("partial_rotary_factor")
    if fraction not in (None, 1, 1.0) and not family.partial_rotary:
        raise SpecError(f"partial_rotary_factor = {fraction} is not supported for {name}; it must be 1")
    if family.interleaved and fraction in (1, 1.0):  # as a spec it would be taken for another family's
        raise SpecError(f"partial_rotary_factor = {fraction} is not supported for {name}; it must be below 1")
    width = config.get("head_dim") or need(config, "hidden_size") // need(config, "num_attention_heads")
    if fraction is not None and family.partial_rotary and int(width * fraction) % 2:
        raise SpecError(f"partial_rotary_factor = {fraction} of {width} is not supported: it turns an odd number")
    if windows.get("layer_types") and family.rope_by_kind:
        windows["rope_local_theta"] = local_theta(config)
    return {
        "layers": need(config, "num_hidden_layers"),
        "hidden": need(config, "hidden_size"),
        "heads": need(config, "num_attention_heads"),
        "kv_heads": config.get("num_key_value_heads") or need(config, "num_attention_heads"),
        "head_dim": config.get("head_dim") or 0,
        "ffn": need(config, "intermediate_size"),
        "vocab": need(config, "vocab_size"),
        "context": longest_context(rope),
        "norm_eps": config[family.norm_eps],
        "rope_theta": need(rope, "rope_theta"),
        "rope_fraction": 1.0 if fraction is None else fraction,
        "rope_scaling": scaling_of_config(rope),
        **dict.fromkeys(family.attention_bias, bool(config.get("attention_bias"))),
        **windows,
    }


def activation_of_config(config: Config, family: Family) -> str:
    name = str(config[family.activation])
    if name not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise SpecError(f"{family.activation} = {name!r} is not supported; known: {known}")
    return ACTIVATIONS[name]


def windows_of_config(name: str, family: Family, config: Config) -> Keys:
    """`sliding_window`, and where layers differ `layer_types`."""
    layers = need(config, "num_hidden_layers")
    window = config.get("sliding_window") or 0
    asked = "use_sliding_window" not in family.defaults or config["use_sliding_window"]
    if name == "smollm3" and config.get("layer_types"):  # whose masks follow that key alone
        asked = True
    if family.windows == "none" or not asked:
        window = 0
    if family.windows != "layers":
        return {"sliding_window": window}
    kinds = [str(kind) for kind in config.get("layer_types") or ()]
    if not kinds and "max_window_layers" in config:  # layers from there on have the window
        full = min(max(0, config["max_window_layers"]), layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if not kinds and name == "mellum":
        kinds = ["full_attention"] * layers
    if not kinds and name == "smollm3":
        kinds = ["full_attention" if turned else "sliding_attention" for turned in turned_layers(config)]
    if unknown := set(kinds) - set(HF_LAYER_TYPES.values()):
        raise SpecError(f"layer_types: {min(unknown)!r} is not supported; known: {', '.join(HF_LAYER_TYPES.values())}")
    if kinds and len(kinds) != layers:
        raise SpecError(f"layer_types names {len(kinds)} layers, but num_hidden_layers = {layers}")
    if not window or set(kinds) == {"full_attention"}:
        return {}
    if len(set(kinds)) < 2:
        return {"sliding_window": window}
    return {
        "sliding_window": window,
        "layer_types": shortest_period(tuple(kind.removesuffix("_attention") for kind in kinds)),
    }


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
    family = FAMILIES[name]
    common = {
        "model_type": name,
        "architectures": [architecture_of(spec, family)],
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
    return common | ({} if name == "gpt2" else rope_config(family, spec)) | family.says(spec)


def architecture_of(spec: ModelSpec, family: Family) -> str:
    if not spec.scalar_head:
        return family.architecture
    return family.architecture.removesuffix("LMHeadModel").removesuffix("ForCausalLM") + CLASSIFIER


def rope_config(family: Family, spec: ModelSpec) -> Keys:
    theta, scaling = rope_of_spec(spec)
    before = spec.rope_scaling.type == "dynamic"  # max_position_embeddings is the context before stretching
    config = {
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "max_position_embeddings": spec.rope_scaling.original_context if before else spec.context,
        **({family.activation: hf_name(ACTIVATIONS, spec.mlp)} if spec.gated_mlp else {}),
        family.norm_eps: spec.norm_eps,
        "attention_dropout": 0.0,
        **(rope_by_kind(spec) if family.rope_by_kind else {"rope_theta": theta, "rope_scaling": scaling}),
    }
    if family.windows != "none":
        config["sliding_window"] = spec.sliding_window or None
    if family.windows == "layers":
        kinds = ("sliding" if spec.window_of(layer) else "full" for layer in range(spec.layers))
        config["layer_types"] = [HF_LAYER_TYPES[kind] for kind in kinds]
    return config
