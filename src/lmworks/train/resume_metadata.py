"""What a checkpoint remembers beside its tensors, looked at before a run goes on from it."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from ..checkpoint.format.manifest import Manifest, is_int, short_repr
from .health.bad_step import HealthState

MAX_LENGTH = 2**62  # a cursor beyond it would overflow where sequences are counted


def wrong_meta(manifest: Manifest) -> str:
    """The first thing in `meta` that no run has written; empty where there is none."""
    meta = manifest.meta
    cursor: Any = meta.get("cursor")
    if not is_int(cursor, manifest.step) or cursor > MAX_LENGTH:
        return f"meta.cursor = {short_repr(cursor)} is not where the data can stand at step {manifest.step}"
    if not isinstance(meta.get("data"), str):
        return f"meta.data = {short_repr(meta.get('data'))} is not the digest of any data"
    if not isinstance(meta.get("spec"), dict):
        return f"meta.spec = {short_repr(meta.get('spec'))} is not a spec"
    if not is_scale(meta.get("loss_scale")):
        return f"meta.loss_scale = {short_repr(meta.get('loss_scale'))} is not a loss scale"
    health = meta.get("health", {})  # there was none in the first checkpoints
    if not isinstance(health, dict):
        return f"meta.health = {short_repr(health)} is not an object"
    for one in fields(HealthState):
        if one.name in health and not fits(health[one.name], getattr(HealthState(), one.name)):
            return f"meta.health.{one.name} = {short_repr(health[one.name])} is not what a run writes there"
    return ""


def is_scale(state: Any) -> bool:
    """Empty where products do not run in fp16."""
    if not isinstance(state, dict) or not state:
        return state == {}
    scale: Any = state.get("scale")
    return is_number(scale) and math.isfinite(scale) and scale > 0 and is_int(state.get("good"))


def fits(value: Any, like: Any) -> bool:
    """Of the type of a field's default: numbers, lists of numbers, and the digests of replicas that differed."""
    if isinstance(like, list):
        return isinstance(value, list) and all(is_number(item) for item in value)
    if isinstance(like, dict):
        return isinstance(value, dict) and (not value or is_suspect_record(value))
    return is_int(value) if isinstance(like, int) else is_number(value)


def is_suspect_record(value: dict[str, Any]) -> bool:
    digests = value.get("digests")
    named = is_int(value.get("step")) and isinstance(value.get("part"), str) and isinstance(digests, dict)
    return named and all(rank.isdigit() and isinstance(digest, int) for rank, digest in (digests or {}).items())


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
