"""Rotary settings as Hugging Face writes them ↔ `model.rope_theta`, `model.rope_scaling` and their like.

Two layouts are read: `rope_theta` beside `rope_scaling`, and `rope_parameters` with both since transformers 5. The
first is written, because every version reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .errors import SpecError
from .model import ModelSpec, RopeScaling

Config = Mapping[str, Any]  # a parsed config.json

KINDS = ("linear", "dynamic", "yarn", "llama3", "longrope")
SLIDING, FULL = "sliding_attention", "full_attention"


def need(config: Config, key: str) -> Any:
    if config.get(key) is None:
        raise SpecError(f"'{key}' is missing")
    return config[key]


# --- config.json → spec -------------------------------------------------------------------------------


def rotary_keys(config: Config, by_kind: bool = False) -> dict[str, Any]:
    """Those of a config in one dictionary, as `transformers` makes it: `rope_scaling` replaces `rope_parameters` whole,
    and what neither says is beside them. `by_kind`: kinds of layers have keys of their own; those of full attention."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key), dict | None):
            raise SpecError(f"{key} = {config[key]!r:.60}: an object is expected")
    if by_kind:
        given = of_kind(config, main_kind(config))
        if given.get("truncate") is False:  # which `transformers` looks for beside the kinds
            raise SpecError("rope_parameters: truncate = false of a kind of layer is not supported")
        return {"max_position_embeddings": need(config, "max_position_embeddings"), **given}
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if nested := [kind for kind in (FULL, SLIDING) if kind in given]:
        raise SpecError(f"rope_parameters.{nested[0]}: all layers of {config.get('model_type')} turn heads alike")
    return beside(config, given)


def beside(config: Config, given: Config) -> dict[str, Any]:
    """`given`, with what the config itself says. Its `original_max_position_embeddings` comes first."""
    found = {"max_position_embeddings": need(config, "max_position_embeddings"), **given}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key not in given and config.get(key) is not None:
            found[key] = config[key]
    if config.get("original_max_position_embeddings") is not None:
        found["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return found


def main_kind(config: Config) -> str:
    return SLIDING if set(config.get("layer_types") or ()) == {SLIDING} else FULL


def of_kind(config: Config, kind: str) -> dict[str, Any]:
    if config.get("rope_scaling"):
        raise SpecError(f"rope_scaling: {config.get('model_type')} has rope_parameters for each kind of layer instead")
    found = need(config, "rope_parameters").get(kind)
    if not isinstance(found, dict):
        raise SpecError(f"rope_parameters.{kind} = {found!r:.60}: an object is expected")
    return found


def local_theta(config: Config) -> float:
    """The rotary base of sliding layers, where kinds have keys of their own; 0: they are as the others."""
    full, sliding = of_kind(config, FULL), of_kind(config, SLIDING)
    if full == sliding:
        return 0.0
    if (sliding.get("rope_type") or "default") != "default":
        raise SpecError(
            f"rope_parameters.sliding_attention has rope_type {sliding['rope_type']!r}: layers with a window are not "
            "stretched; it must be 'default', or all of it equal to full_attention's"
        )
    return float(need(sliding, "rope_theta"))


def kind_of(rope: Config) -> str:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return "longrope" if kind == "su" else kind  # its first name


def scaling_of_config(rope: Config) -> RopeScaling:
    """`model.rope_scaling` from the rotary keys of a config, all in one dictionary."""
    kind = kind_of(rope)
    if kind == "default":
        return RopeScaling()
    if kind not in KINDS:
        raise SpecError(f"rope_type {kind!r} is not supported; known: default, {', '.join(KINDS)}")
    longest = need(rope, "max_position_embeddings")
    original = rope.get("original_max_position_embeddings") or longest
    if kind == "linear":
        return RopeScaling(type=kind, factor=need(rope, "factor"))
    if kind == "dynamic":
        return RopeScaling(type=kind, factor=need(rope, "factor"), original_context=longest)
    factor = rope.get("factor") or longest / original  # where there is none: the ratio of the two contexts
    keys: dict[str, Any] = {"type": kind, "original_context": original, "factor": factor}
    if kind == "llama3":
        keys |= {key: need(rope, key) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        keys |= {key: rope[key] for key in ("beta_fast", "beta_slow") if rope.get(key)}
        keys["truncate"] = bool(rope.get("truncate", True))
    if kind == "longrope":
        if any(rope.get(key) is not None for key in ("short_mscale", "long_mscale")):
            raise SpecError("longrope's short_mscale and long_mscale are not supported")
        keys |= {key: tuple(need(rope, key)) for key in ("short_factor", "long_factor")} | {"factor": max(factor, 1.0)}
    scaling = RopeScaling(**keys)
    asked = attention_factor(rope, kind, factor)
    if asked is None or math.isclose(asked, scaling.temperature, rel_tol=1e-9):
        return scaling
    if asked <= 0:
        raise SpecError(f"{kind}'s attention_factor = {asked:g} must be positive")
    return scaling.replace(attention_factor=asked)


def attention_factor(rope: Config, kind: str, factor: float) -> float | None:
    """What the config says of it; None: it follows from the factor."""
    asked = rope.get("attention_factor") if kind in ("yarn", "longrope") else None
    if asked is None and kind == "yarn" and rope.get("mscale") and rope.get("mscale_all_dim"):
        asked = mscale(factor, rope["mscale"]) / mscale(factor, rope["mscale_all_dim"])
    return asked


def mscale(factor: float, weight: float) -> float:
    """YaRN's temperature of attention scores, as DeepSeek weighs it."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def longest_context(rope: Config) -> int:
    """`max_position_embeddings`, which for dynamic scaling is the context before stretching."""
    context = need(rope, "max_position_embeddings")
    return int(context * (rope.get("factor") or 1)) if kind_of(rope) == "dynamic" else int(context)


# --- spec → config.json -------------------------------------------------------------------------------


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
        if not scaling.truncate:
            config["truncate"] = False
    if scaling.type == "longrope":
        config |= {"short_factor": [*scaling.short_factor], "long_factor": [*scaling.long_factor]}
    if scaling.attention_factor:
        config["attention_factor"] = scaling.attention_factor
    if scaling.type == "llama3":
        config |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    return spec.rope_theta, config


def rope_by_kind(spec: ModelSpec) -> dict[str, Any]:
    """As transformers 5 has it, which alone has such families."""
    theta, scaling = rope_of_spec(spec)
    full = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    sliding = {"rope_theta": spec.rope_local_theta, "rope_type": "default"} if spec.rope_local_theta else full
    return {"rope_parameters": {FULL: full, SLIDING: sliding}}
