"""Rotary settings as Hugging Face writes them, both ways.

Two layouts are read: `rope_theta` beside `rope_scaling`, and `rope_parameters` with both since transformers 5. The
first is written, because every version reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..spec import ModelSpec, RopeScaling, SpecError

Config = Mapping[str, Any]


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
    if kind not in ("linear", "yarn", "llama3"):
        raise SpecError(f"rope_type {kind!r} is not supported; known: default, linear, yarn, llama3")
    keys = {"linear": (), "yarn": ("beta_fast", "beta_slow"), "llama3": ("low_freq_factor", "high_freq_factor")}[kind]
    given = {key: rope[key] for key in keys if rope.get(key)}
    original = rope.get("original_max_position_embeddings") or need(rope, "max_position_embeddings")
    # YaRN without a factor means the ratio of the two contexts.
    factor = rope.get("factor") or need(rope, "max_position_embeddings") / original
    if kind == "yarn":
        check_yarn(rope, factor)
    if kind == "linear":
        return RopeScaling(type="linear", factor=factor)
    return RopeScaling(type=kind, factor=factor, original_context=original, **given)


def yarn_temperature(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def check_yarn(rope: Config, factor: float) -> None:
    """Only the paper's factor on cos and sin is ours; a config may also spell that one out."""
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
    if scaling.type != "linear":
        config["original_max_position_embeddings"] = scaling.original_context
    if scaling.type == "yarn":
        config |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    if scaling.type == "llama3":
        config |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    return spec.rope_theta, config
