"""What rounding alone may do to a layout in low precision: the scale on which its error is judged.

Two orders of summation do not agree in bf16 or fp16, so the oracle is one rank in fp32, and the yardstick is the error
of one rank in the same precision. That is one draw of chance. It may be small, or zero, where a layout's is not: a
norm's weight stays near 1 and is off by single last places of fp32. So what one more rounding would leave is added to
it, in quadrature. The derivation, and how far errors spread over seeds and CPUs, stand in docs/parity.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..spec import PrecisionSpec, RunSpec
from .compare import Worst, gradient_errors, rms_error, weight_errors, whole, worst
from .trial import Trial

# The largest relative error of a rounding to nearest: half a unit in the last place of a number just above a power
# of two.
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}
# Its root mean square in units of that. An error that is uniform within half a last place is 1/√3 of it; relative to
# the number that is 1/√3 just above a power of two, half as much just below the next, and 1/√6 between them.
ONCE = 1 / math.sqrt(6)


@dataclass(frozen=True)
class Judgement:
    times: float | None  # what one rank's error and one rounding make; None where nothing can be said
    failure: str = ""
    cause: str = ""  # why less was judged than usual


def judged(one: Trial, many: list[Trial], oracle: Trial, spec: RunSpec, most: float) -> Judgement:
    """Whether the error is at most `most` times what one rank's and one rounding make.

    A token whose experts score alike goes to another one after a rounding. That is a jump, and no rounding error: where
    jumps lie outside of the bound, only steps before the first of them are judged.
    """
    found = times_one_rank(one, many, oracle, spec)
    if found.value <= most:
        return Judgement(found.value)
    alike = min(steps_alike(oracle, trial) for trial in (one, *many))
    dtype, steps = spec.precision.dtype, len(oracle.losses)
    if alike == 0:
        moved, alone = (max(choices_moved(oracle, trial) for trial in trials) for trials in (many, [one]))
        times = f"in the first step {moved} times, on one rank {alone}"
        told = f"in {dtype} rounding changes which experts are chosen ({times})"
        why = f"a jump and no rounding error, so the layout cannot be judged in {dtype}; use precision.dtype = 'fp32'"
        return Judgement(None, f"{told}: {why}")
    cause = ""
    if alike < steps:
        one, oracle, *many = (first_steps(trial, alike) for trial in (one, oracle, *many))
        found = times_one_rank(one, many, oracle, spec)
        cause = (
            f"in {dtype} rounding sends tokens to other experts than in fp32 from step {alike + 1} on, a jump: "
            f"gradients and losses of {alike} of {steps} steps are compared"
        )
    failure = f"{found.name} is {found.value:.2f} times as far from fp32 as on one rank, more than {most:g}"
    return Judgement(found.value, "" if found.value <= most else failure, cause)


def times_one_rank(one: Trial, many: list[Trial], oracle: Trial, spec: RunSpec) -> Worst:
    """The largest error against fp32 of the loss, a gradient or a weight, in units of one rank's and one rounding."""
    rounding = ONCE * UNIT[spec.precision.dtype]
    # The loss is a mean over tokens, whose roundings are independent.
    tokens = oracle.tokens / len(oracle.losses)
    loss = max(rms_error(oracle.losses, trial.losses) for trial in many)
    ratios = {"the loss": loss / math.hypot(rms_error(oracle.losses, one.losses), rounding / math.sqrt(tokens))}
    ours, its = gradient_errors(oracle, many), gradient_errors(oracle, [one])
    ratios |= {f"the gradient of {name}": ours[name] / math.hypot(its[name], rounding) for name in its}
    if oracle.weights:
        ours, its, least = weight_errors(oracle, many), weight_errors(oracle, [one]), of_weights(oracle, spec)
        ratios |= {f"the weight of {name}": ours[name] / math.hypot(its[name], least[name]) for name in its}
    return worst(ratios)


def of_weights(oracle: Trial, spec: RunSpec) -> dict[str, float]:
    """‖Δ‖ / ‖w‖ that roundings leave in each weight: one of every update in low precision, and those of storing it.

    A buffer counts as stored like a weight; it is the sum of its updates in fp32.
    """
    updates = [min(1.0, spec.optim.clip / max(size, 1e-30)) * spec.optim.lr for size in oracle.norms]
    moved: dict[str, float] = {}
    for rate, gradients in zip(updates, oracle.gradients, strict=True):
        for piece, gradient in zip(oracle.pieces, gradients, strict=True):
            moved[piece.name] = math.hypot(moved.get(piece.name, 0.0), rate * float(gradient.norm()))
    sizes = {name: float(value.norm()) for name, value in whole(oracle.pieces, oracle.weights).items()}
    kept = stored(spec.precision, len(oracle.losses))
    product = ONCE * UNIT[spec.precision.dtype]
    least = {name: math.hypot(kept, product * moved[name] / max(sizes[name], 1e-30)) for name in sizes}
    return least | {name: ONCE * UNIT["fp32"] * math.sqrt(2 * len(oracle.losses)) for name in oracle.buffers}


def stored(precision: PrecisionSpec, steps: int) -> float:
    """Of rounding a weight to what it is kept in, in two runs: at every update, or once where a master is kept."""
    times = 1 if precision.weights == "bf16" and precision.master else steps
    return ONCE * UNIT[precision.weights] * math.sqrt(2 * times)


# --- experts --------------------------------------------------------------------------------------------


def steps_alike(oracle: Trial, trial: Trial) -> int:
    """Steps before the first in which an expert was chosen more or less often than in the oracle."""
    for step, loads in enumerate(trial.loads):
        if any(not load.equal(oracle.loads[step][block]) for block, load in loads.items()):
            return step
    return len(oracle.losses)


def choices_moved(oracle: Trial, trial: Trial) -> int:
    """In the first step, at least: two that changed places are not seen."""
    return sum(int((load - oracle.loads[0][block]).abs().sum()) for block, load in trial.loads[0].items()) // 2


def first_steps(trial: Trial, steps: int) -> Trial:
    """Without weights: those are of the last step."""
    tokens = trial.tokens * steps // len(trial.losses)
    kept = {key: getattr(trial, key)[:steps] for key in ("losses", "norms", "gradients", "loads")}
    return replace(trial, tokens=tokens, weights=[], buffers={}, **kept)
