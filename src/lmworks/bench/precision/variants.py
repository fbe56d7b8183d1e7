"""The precisions that are compared, and the run that each of them is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...spec import CheckpointSpec, PrecisionSpec, RunSpec, SpecError
from ...spec.errors import did_you_mean

TOO_HIGH = 2.0**32  # a first loss scale at which gradients overflow in fp16
LEAST_STEPS = 8  # fewer have no quarters to look at, and no slope


@dataclass(frozen=True)
class PassCost:
    """One precision."""

    name: str
    what: str  # in words
    keys: dict[str, Any] = field(default_factory=dict, hash=False)  # of `precision`; the others have their defaults
    seed: int = 0  # added to the run's


BASE = PassCost("fp32", "everything in fp32: what the others are held against")
SEED = PassCost("fp32-seed", "fp32 from another seed: what chance alone changes", seed=1)
HALF = {"dtype": "bf16", "weights": "bf16"}
OTHERS = (
    PassCost("bf16", "products in bf16, weights and states in fp32", {"dtype": "bf16"}),
    PassCost("bf16-master", "bf16 weights, and 16 bits beside each that make it an fp32 number", HALF),
    PassCost("bf16-states", "as bf16-master, and Adam's moments in bf16", {**HALF, "states": "bf16"}),
    PassCost(
        "bf16-stochastic",
        "bf16 weights alone, updates rounded up or down by chance",
        {**HALF, "master": False, "rounding": "stochastic"},
    ),
    PassCost("bf16-nearest", "bf16 weights alone, updates rounded to the nearest", {**HALF, "master": False}),
    PassCost("fp16", "products in fp16, the loss scaled", {"dtype": "fp16"}),
    PassCost("fp16-high", "fp16 from a loss scale that is too high, 2³²", {"dtype": "fp16"}),
    PassCost("fp8-tensorwise", "the blocks' linear layers in fp8, one scale a tensor", {"dtype": "fp8"}),
    PassCost("fp8-rowwise", "the same, one scale a row", {"dtype": "fp8", "fp8_scaling": "rowwise"}),
)
WAYS = {way.name: way for way in (BASE, SEED, *OTHERS)}


def choose(names: Iterable[str]) -> list[PassCost]:
    """Those asked for (none: all), after fp32 and its second seed, without which nothing can be said of them."""
    asked = set(names)
    for name in asked:
        if name not in WAYS:
            raise SpecError(f"--only {name}: this study has no such precision{did_you_mean(name, WAYS)}")
    return [BASE, SEED, *(way for way in OTHERS if not asked or way.name in asked)]


def spec_of(spec: RunSpec, way: PassCost) -> RunSpec:
    """`spec` in this precision. What it says of number formats is replaced, of fp16's loss scale kept."""
    refuse(spec)
    steps, given = spec.optim.steps, spec.precision
    keys = {"loss_scale": given.loss_scale, "loss_scale_window": given.loss_scale_window, **way.keys}
    if way.name == "fp16-high":  # and a window that lets it rise again
        keys |= {"loss_scale": TOO_HIGH, "loss_scale_window": max(1, steps // 10)}
    return spec.replace(
        name=f"{spec.name}-{way.name}",
        seed=spec.seed + way.seed,
        precision=PrecisionSpec(**keys),
        checkpoint=CheckpointSpec(every=max(1, steps // 4), keep=1, init=spec.checkpoint.init),
        log=spec.log.replace(eval_every=max(1, steps // 10)),
    )


def refuse(spec: RunSpec) -> None:
    """What this study cannot compare."""
    layout = spec.parallel
    if layout.world > 1 or layout.engine != "native" or layout.offload != "none":
        raise SpecError(
            "this study trains on one device: leave parallel.dp, tp, pp, cp at 1, engine = 'native', offload = 'none'"
        )
    if spec.optim.steps < LEAST_STEPS:
        raise SpecError(f"--steps {spec.optim.steps} is too few to compare; use at least {LEAST_STEPS}")


def spots(steps: int) -> list[int]:
    """The steps that are looked at closely: a quarter, half, three quarters, and the last."""
    return sorted({max(2, steps * quarter // 4) for quarter in (1, 2, 3, 4)})
