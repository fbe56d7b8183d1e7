"""The variants of precision that are compared, and the spec of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...spec import CheckpointSpec, PrecisionSpec, RunSpec, SpecError
from ...spec.errors import did_you_mean

OVERFLOWING_SCALE = 2.0**32  # an initial loss scale at which fp16 gradients overflow
MIN_STEPS = 8  # for four inspected steps


@dataclass(frozen=True)
class Variant:
    """One variant of precision."""

    name: str
    what: str  # description
    keys: dict[str, Any] = field(default_factory=dict, hash=False)  # of `precision`; the rest are defaults
    seed: int = 0  # added to the seed of the run


BASE = Variant("fp32", "everything in fp32: the baseline")
SEED = Variant("fp32-seed", "fp32 from another seed: the noise", seed=1)
HALF = {"dtype": "bf16", "weights": "bf16"}
OTHERS = (
    Variant("bf16", "products in bf16, weights and states in fp32", {"dtype": "bf16"}),
    Variant("bf16-master", "bf16 weights, and 16 bits beside each: an fp32 master", HALF),
    Variant("bf16-states", "as bf16-master, and Adam's moments in bf16", {**HALF, "states": "bf16"}),
    Variant(
        "bf16-stochastic",
        "bf16 weights without a master, stochastic rounding",
        {**HALF, "master": False, "rounding": "stochastic"},
    ),
    Variant("bf16-nearest", "bf16 weights without a master, rounding to nearest", {**HALF, "master": False}),
    Variant("fp16", "products in fp16, the loss scaled", {"dtype": "fp16"}),
    Variant("fp16-high", "fp16 from a loss scale that is too high, 2³²", {"dtype": "fp16"}),
    Variant("fp8-tensorwise", "the blocks' linear layers in fp8, one scale a tensor", {"dtype": "fp8"}),
    Variant("fp8-rowwise", "the same, one scale a row", {"dtype": "fp8", "fp8_scaling": "rowwise"}),
)
VARIANTS = {variant.name: variant for variant in (BASE, SEED, *OTHERS)}


def select_variants(names: Iterable[str]) -> list[Variant]:
    """Variants by name (none: all), after fp32 and fp32 with another seed, the baselines."""
    asked = set(names)
    for name in asked:
        if name not in VARIANTS:
            raise SpecError(f"--only {name}: this study has no such precision{did_you_mean(name, VARIANTS)}")
    return [BASE, SEED, *(variant for variant in OTHERS if not asked or variant.name in asked)]


def variant_spec(spec: RunSpec, variant: Variant) -> RunSpec:
    """`spec` in this variant. Its number formats are replaced, its loss scale settings kept."""
    check_supported(spec)
    steps, given = spec.optim.steps, spec.precision
    keys = {"loss_scale": given.loss_scale, "loss_scale_window": given.loss_scale_window, **variant.keys}
    if variant.name == "fp16-high":  # with a window that lets it rise again
        keys |= {"loss_scale": OVERFLOWING_SCALE, "loss_scale_window": max(1, steps // 10)}
    return spec.replace(
        name=f"{spec.name}-{variant.name}",
        seed=spec.seed + variant.seed,
        precision=PrecisionSpec(**keys),
        checkpoint=CheckpointSpec(every=max(1, steps // 4), keep=1, init=spec.checkpoint.init),
        log=spec.log.replace(eval_every=max(1, steps // 10)),
    )


def check_supported(spec: RunSpec) -> None:
    """Refuse specs that this study cannot compare."""
    layout = spec.parallel
    if layout.world > 1 or layout.engine != "native" or layout.offload != "none":
        raise SpecError(
            "this study trains on one device: leave parallel.dp, tp, pp, cp at 1, engine = 'native', offload = 'none'"
        )
    if spec.optim.steps < MIN_STEPS:
        raise SpecError(f"--steps {spec.optim.steps} is too few to compare; use at least {MIN_STEPS}")


def inspected_steps(steps: int) -> list[int]:
    """At a quarter, half, three quarters, and the last step."""
    return sorted({max(2, steps * quarter // 4) for quarter in (1, 2, 3, 4)})
