"""What rounding alone may do to a layout in low precision: the scale on which its error is judged.

Two orders of summation do not agree in bf16 or fp16, so the oracle is one rank in fp32, and the yardstick is the error
of one rank in the same precision. That is one draw of chance. It may be small, or zero, where a layout's is not: a
norm's weight stays near 1 and is off by single last places of fp32. So what one more rounding would leave is added to
it, in quadrature, and how many times that a layout may be off follows from how often it rounds a sum, and from how many
numbers the draw is of. The derivation, and what was measured over seeds and CPUs, stand in docs/parity.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..spec import PrecisionSpec, RunSpec
from .compare import gradient_errors, rms_error, weight_errors, whole
from .trial import Trial

# The largest relative error of a rounding to nearest: half a unit in the last place of a number just above a power
# of two.
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}
# Its root mean square in units of that. An error that is uniform within half a last place is 1/√3 of it; relative to
# the number that is 1/√3 just above a power of two, half as much just below the next, and 1/√6 between them.
ONCE = 1 / math.sqrt(6)
SPREAD = 5  # standard deviations that a draw may be off


@dataclass(frozen=True)
class Times:
    """An error in units of one rank's and one rounding, and how many of them it may have."""

    what: str
    value: float
    most: float

    @property
    def inside(self) -> bool:
        return self.value <= self.most


@dataclass(frozen=True)
class Judgement:
    worst: Times | None  # of its bound; None where nothing can be said
    failure: str = ""
    cause: str = ""  # why less was judged than usual


def judged(one: Trial, many: list[Trial], oracle: Trial, spec: RunSpec) -> Judgement:
    """Whether every error is what rounding explains.

    A token whose experts score alike goes to another one after a rounding. That is a jump, and no rounding error: where
    jumps lie outside of the bound, only steps before the first of them are judged.
    """
    found = worst_of(times_one_rank(one, many, oracle, spec))
    if found.inside:
        return Judgement(found)
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
        found = worst_of(times_one_rank(one, many, oracle, spec))
        cause = (
            f"in {dtype} rounding sends tokens to other experts than in fp32 from step {alike + 1} on, a jump: "
            f"gradients and losses of {alike} of {steps} steps are compared"
        )
    far = f"{found.what} is {found.value:.2f} times as far from fp32 as on one rank, more than {found.most:.2f}"
    return Judgement(found, "" if found.inside else far, cause)


def worst_of(found: list[Times]) -> Times:
    """The one that is furthest outside of its bound, or nearest to it; NaN is worst."""
    return max(found, key=lambda times: times.value / times.most if times.value == times.value else math.inf)


def times_one_rank(one: Trial, many: list[Trial], oracle: Trial, spec: RunSpec) -> list[Times]:
    """Of the loss, and of each gradient and weight: the error against fp32."""
    rounding, mean, steps = ONCE * UNIT[spec.precision.dtype], rounded_sums(spec), len(oracle.losses)
    # The loss is a mean over tokens, whose roundings are independent.
    least = rounding / math.sqrt(oracle.tokens / steps)
    loss = max(rms_error(oracle.losses, trial.losses) for trial in many)
    times = loss / math.hypot(rms_error(oracle.losses, one.losses), least)
    found = [Times("the loss", times, mean * chance(oracle.tokens))]
    sizes = {piece.name: piece.index.numel() for piece in oracle.pieces}
    ours, its = gradient_errors(oracle, many), gradient_errors(oracle, [one])
    for name, size in sizes.items():
        times = ours[name] / math.hypot(its[name], rounding)
        found.append(Times(f"the gradient of {name}", times, mean * chance(steps * size)))
    if oracle.weights:
        sizes |= {name: value.numel() for name, value in oracle.buffers.items()}
        ours, its, kept = weight_errors(oracle, many), weight_errors(oracle, [one]), of_weights(oracle, spec)
        for name, size in sizes.items():
            times = ours[name] / math.hypot(its[name], kept[name])
            found.append(Times(f"the weight of {name}", times, mean * chance(size)))
    return found


def rounded_sums(spec: RunSpec) -> float:
    """By how much more roundings a layout's mean error is larger, if every sum on the way to a result were cut.

    One rank rounds a sum once. Cut into p parts it is rounded in each of them, as much as once in all, and again at
    every addition of one part more: the k-th leaves a sum of k/p of the variance. Σ k/p over k = 2 … p.
    """
    ranks = spec.parallel.dp * spec.parallel.cp if spec.precision.reduce == "bf16" else 1
    parts = max(2, spec.parallel.tp, ranks)
    return math.sqrt(1 + (parts + 1) / 2 - 1 / parts)


def chance(numbers: int) -> float:
    """How far the ratio of two errors, each the norm of as many independent draws, is from its mean at the most.

    The logarithm of such a norm has the standard deviation 1/√(2n), that of a ratio of two 1/√n.
    """
    return math.exp(SPREAD / math.sqrt(numbers))


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
