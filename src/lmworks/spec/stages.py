"""Stages of a run: the same model trained on longer sequences, or other data, from some step on.

Each has a number of steps and the keys in which it differs from the spec; the keys of the spec itself are those of the
model that the run ends with. A stage begins as a resumed run does: from the checkpoint that the one before it
ends with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .errors import SpecError
from .resumed_keys import MAY_CHANGE
from .schema import Section, check_known_keys

if TYPE_CHECKING:
    from .run import RunSpec

# What a stage may change: rotary embedding has no weights, and what a resumed run may.
OWN_KEYS = ("data", "model.context", "model.rope_theta", "model.rope_scaling")
NOT_OWN = ("name", "deterministic", "cluster", "checkpoint", "fault", "optim.steps")


def total_steps(stages: Any) -> int:
    """Of a list of stages, as far as it is one."""
    counts = [stage.get("steps") for stage in stages if isinstance(stage, Mapping)] if isinstance(stages, list) else []
    return sum(count for count in counts if isinstance(count, int))


def changed(section: Section, table: Mapping[str, Any]) -> Any:
    """The section as if it had been written with these keys."""
    changes = {}
    for key, value in table.items():
        inner = getattr(section, key)
        changes[key] = changed(inner, value) if isinstance(inner, Section) and isinstance(value, Mapping) else value
    return section.replace(**changes)


def keys_of(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        yield from keys_of(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [f"{prefix}{key}"]


def within(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def check_stages(spec: RunSpec) -> None:
    if spec.align.method:
        raise SpecError(f"stages are of pretraining; align.method = '{spec.align.method}' has none")
    for number, stage in enumerate(spec.stages):
        place = f"stages[{number}]"
        steps = stage.get("steps")
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise SpecError(f"{place}.steps = {steps!r}: a stage needs its number of optimizer steps, at least 1")
        check_known_keys(type(spec), {key: value for key, value in stage.items() if key != "steps"}, spec.dotted_keys())
        for key in keys_of(stage):
            allowed = within(key, OWN_KEYS) or (within(key, MAY_CHANGE) and not within(key, NOT_OWN))
            if key != "steps" and not allowed:
                raise SpecError(
                    f"{place}.{key}: a stage cannot change that; it can {', '.join(OWN_KEYS)}, parallel, and what a "
                    "resumed run may change"
                )
        try:
            one = spec.stage(number)
        except SpecError as error:
            raise SpecError(f"{place}: {error}") from None
        if one.parallel.world != spec.parallel.world:
            raise SpecError(
                f"{place}: its layout has {one.parallel.world} ranks, that of the spec {spec.parallel.world}; a run "
                "has the same number of ranks in all its stages"
            )
