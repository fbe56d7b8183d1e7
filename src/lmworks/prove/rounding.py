"""The tolerance of parity in low precision: how large an error rounding alone explains.

Two orders of summation differ in bf16 or fp16. So the oracle is one rank in fp32, and the baseline is the error of one
rank in the same precision. That baseline is one random sample: it may be near zero where a layout's error is not (a
norm's weight stays near 1 and is off by single last places of fp32). So the error of one more rounding is added to it
in quadrature. The allowed ratio follows from how often a layout rounds a sum, and from the number of elements.
docs/parity.md has the derivation and measurements over seeds and CPUs.

Errors of a layout against one rank: every element of every tensor, on every rank that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..spec import PrecisionSpec, RunSpec
from .rank_record import IndexedShard, RankRecord

FullTensors = dict[str, Tensor]  # by name, flattened


@dataclass(frozen=True)
class Worst:
    """The largest error, and the name of its tensor."""

    value: float = 0.0
    name: str = ""


def full_tensors(shards: list[IndexedShard], values: list[Tensor]) -> FullTensors:
    """The tensors of one rank that holds all of them."""
    return {shard.name: value.flatten().double() for shard, value in zip(shards, values, strict=True)}


def abs_errors(reference: FullTensors, ranks: Iterable[tuple[list[IndexedShard], list[Tensor]]]) -> FullTensors:
    """|value − reference| of every element: the largest over replicas, ∞ for an element that no rank holds."""
    found = {name: torch.full_like(value, -1) for name, value in reference.items()}
    for shards, values in ranks:
        for shard, value in zip(shards, values, strict=True):
            off = (value.flatten().double() - reference[shard.name][shard.index]).abs()
            before = found[shard.name]
            before[shard.index] = torch.maximum(before[shard.index], off)
    return {name: torch.where(off < 0, torch.inf, off) for name, off in found.items()}


def relative_errors(reference: FullTensors, off: FullTensors, zero: tuple[str, ...] = ()) -> dict[str, float]:
    """‖Δ‖ / ‖reference‖ of each; those in `zero`, which are 0 but for rounding, are divided by the norm of all."""
    everything = norm(reference.values())
    sizes = {n: everything if zero and n.endswith(zero) else float(value.norm()) for n, value in reference.items()}
    return {name: float(value.norm()) / max(sizes[name], 1e-30) for name, value in off.items()}


def norm(values: Iterable[Tensor]) -> float:
    return float(torch.stack([value.norm() for value in values]).norm())


def worst(ratios: dict[str, float]) -> Worst:
    name = max(ratios, key=lambda name: ratios[name] if ratios[name] == ratios[name] else float("inf"))  # NaN is worst
    return Worst(ratios[name], name)


def gradient_errors(reference: RankRecord, ranks: list[RankRecord], zero: tuple[str, ...] = ()) -> dict[str, float]:
    """√(Σ‖Δ‖² / Σ‖g‖²) over the steps, by weight: in a small tensor a single batch may be far off by chance."""
    off: dict[str, list[Tensor]] = {}
    size: dict[str, list[Tensor]] = {}
    for step, gradients in enumerate(reference.gradients):
        one = full_tensors(reference.shards, gradients)
        errors = abs_errors(one, ((rank.shards, rank.gradients[step]) for rank in ranks))
        for name in one:
            size.setdefault(name, []).append(one[name])
            off.setdefault(name, []).append(errors[name])
    return relative_errors(concatenated(size), concatenated(off), zero)


def concatenated(table: dict[str, list[Tensor]]) -> FullTensors:
    return {name: torch.cat(parts) for name, parts in table.items()}


def weight_errors(reference: RankRecord, ranks: list[RankRecord], zero: tuple[str, ...] = ()) -> dict[str, float]:
    """Relative errors of weights after the last step, and of buffers."""
    one = full_tensors(reference.shards, reference.weights)
    one |= {name: value.flatten().double() for name, value in reference.buffers.items()}
    of_ranks = []
    for rank in ranks:
        buffers = [(IndexedShard(n, torch.arange(value.numel())), value) for n, value in rank.buffers.items()]
        of_ranks.append(
            ([*rank.shards, *(shard for shard, _ in buffers)], [*rank.weights, *(value for _, value in buffers)])
        )
    return relative_errors(one, abs_errors(one, of_ranks), zero)


def scalar_errors(reference: list[float], ranks: list[list[float]], least: float = 1e-30) -> float:
    """The largest |Δ| / |reference| of any step on any rank; the reference counts as at least `least`."""
    pairs = ((one, other) for values in ranks for one, other in zip(reference, values, strict=True))
    errors = [abs(one - other) / max(abs(one), least) for one, other in pairs]
    return float("nan") if any(value != value for value in errors) else max(errors)


def rms_error(reference: list[float], values: list[float]) -> float:
    squares = [((one - other) / one) ** 2 for one, other in zip(reference, values, strict=True)]
    return math.sqrt(sum(squares) / len(squares))


# --- rounding --------------------------------------------------------------------------------------------


# The largest relative error of a rounding to nearest: half a unit in the last place of a number just above a power
# of two.
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}
# Its root mean square in units of that. An error that is uniform within half a last place is 1/√3 of it; relative to
# the number that is 1/√3 just above a power of two, half as much just below the next, and 1/√6 between them.
RMS_ROUNDING = 1 / math.sqrt(6)
MAX_SIGMA = 5  # standard deviations of sampling error that are allowed


@dataclass(frozen=True)
class ErrorRatio:
    """An error relative to that of one rank and one rounding, and its limit."""

    what: str
    value: float
    limit: float

    @property
    def within_limit(self) -> bool:
        return self.value <= self.limit


@dataclass(frozen=True)
class RoundingVerdict:
    worst: ErrorRatio | None  # relative to its limit; None if nothing could be compared
    failure: str = ""
    cause: str = ""  # why fewer steps were compared than usual


def rounding_verdict(one: RankRecord, many: list[RankRecord], oracle: RankRecord, spec: RunSpec) -> RoundingVerdict:
    """Whether rounding explains every error.

    A token with nearly equal router scores may go to another expert after a rounding. That is a discontinuity and not a
    rounding error: if the errors exceed the limit, only steps before the first such change are compared.
    """
    found = worst_ratio(error_ratios(one, many, oracle, spec))
    if found.within_limit:
        return RoundingVerdict(found)
    equal_steps = min(steps_with_equal_routing(oracle, record) for record in (one, *many))
    dtype, steps = spec.precision.dtype, len(oracle.losses)
    if equal_steps == 0:
        moved, alone = (max(changed_routes(oracle, record) for record in records) for records in (many, [one]))
        times = f"in the first step {moved} times, on one rank {alone}"
        text = f"in {dtype} rounding changes which experts are chosen ({times})"
        why = f"a jump and no rounding error, so the layout cannot be judged in {dtype}; use precision.dtype = 'fp32'"
        return RoundingVerdict(None, f"{text}: {why}")
    cause = ""
    if equal_steps < steps:
        one, oracle, *many = (first_steps(record, equal_steps) for record in (one, oracle, *many))
        found = worst_ratio(error_ratios(one, many, oracle, spec))
        cause = (
            f"in {dtype} rounding sends tokens to other experts than in fp32 from step {equal_steps + 1} on, a jump: "
            f"gradients and losses of {equal_steps} of {steps} steps are compared"
        )
    far = f"{found.what} is {found.value:.2f} times as far from fp32 as on one rank, more than {found.limit:.2f}"
    return RoundingVerdict(found, "" if found.within_limit else far, cause)


def worst_ratio(found: list[ErrorRatio]) -> ErrorRatio:
    """The one that is furthest outside of its bound, or nearest to it; NaN is worst."""
    return max(found, key=lambda times: times.value / times.limit if times.value == times.value else math.inf)


def error_ratios(one: RankRecord, many: list[RankRecord], oracle: RankRecord, spec: RunSpec) -> list[ErrorRatio]:
    """Of the loss, and of each gradient and weight: the error against fp32."""
    rounding, mean, steps = RMS_ROUNDING * UNIT[spec.precision.dtype], rounding_growth(spec), len(oracle.losses)
    # The loss is a mean over tokens, whose roundings are independent.
    least = rounding / math.sqrt(oracle.tokens / steps)
    loss = max(rms_error(oracle.losses, record.losses) for record in many)
    times = loss / math.hypot(rms_error(oracle.losses, one.losses), least)
    found = [ErrorRatio("the loss", times, mean * sampling_factor(oracle.tokens))]
    sizes = {shard.name: shard.index.numel() for shard in oracle.shards}
    ours, its = gradient_errors(oracle, many), gradient_errors(oracle, [one])
    for name, size in sizes.items():
        times = ours[name] / math.hypot(its[name], rounding)
        found.append(ErrorRatio(f"the gradient of {name}", times, mean * sampling_factor(steps * size)))
    if oracle.weights:
        sizes |= {name: value.numel() for name, value in oracle.buffers.items()}
        ours, its, kept = weight_errors(oracle, many), weight_errors(oracle, [one]), weight_rounding(oracle, spec)
        for name, size in sizes.items():
            times = ours[name] / math.hypot(its[name], kept[name])
            found.append(ErrorRatio(f"the weight of {name}", times, mean * sampling_factor(size)))
    return found


def rounding_growth(spec: RunSpec) -> float:
    """By how much more roundings a layout's mean error is larger, if every sum on the way to a result were cut.

    One rank rounds a sum once. Cut into p parts it is rounded in each of them, as much as once in all, and again at
    every addition of one part more: the k-th leaves a sum of k/p of the variance. Σ k/p over k = 2 … p.
    """
    ranks = spec.parallel.dp * spec.parallel.cp if spec.precision.reduce == "bf16" else 1
    parts = max(2, spec.parallel.tp, ranks)
    return math.sqrt(1 + (parts + 1) / 2 - 1 / parts)


def sampling_factor(numbers: int) -> float:
    """How far the ratio of two errors, each the norm of as many independent draws, is from its mean at the most.

    The logarithm of such a norm has the standard deviation 1/√(2n), that of a ratio of two 1/√n.
    """
    return math.exp(MAX_SIGMA / math.sqrt(numbers))


def weight_rounding(oracle: RankRecord, spec: RunSpec) -> dict[str, float]:
    """‖Δ‖ / ‖w‖ that roundings leave in each weight: one of every update in low precision, and those of storing it.

    A buffer counts as stored like a weight; it is the sum of its updates in fp32.
    """
    updates = [min(1.0, spec.optim.clip / max(size, 1e-30)) * spec.optim.lr for size in oracle.norms]
    moved: dict[str, float] = {}
    for rate, gradients in zip(updates, oracle.gradients, strict=True):
        for shard, gradient in zip(oracle.shards, gradients, strict=True):
            moved[shard.name] = math.hypot(moved.get(shard.name, 0.0), rate * float(gradient.norm()))
    sizes = {name: float(value.norm()) for name, value in full_tensors(oracle.shards, oracle.weights).items()}
    kept = storage_rounding(spec.precision, len(oracle.losses))
    product = RMS_ROUNDING * UNIT[spec.precision.dtype]
    least = {name: math.hypot(kept, product * moved[name] / max(sizes[name], 1e-30)) for name in sizes}
    return least | {name: RMS_ROUNDING * UNIT["fp32"] * math.sqrt(2 * len(oracle.losses)) for name in oracle.buffers}


def storage_rounding(precision: PrecisionSpec, steps: int) -> float:
    """Of rounding a weight to what it is kept in, in two runs: at every update, or once where a master is kept."""
    times = 1 if precision.weights == "bf16" and precision.master else steps
    return RMS_ROUNDING * UNIT[precision.weights] * math.sqrt(2 * times)


# --- experts --------------------------------------------------------------------------------------------


def steps_with_equal_routing(oracle: RankRecord, record: RankRecord) -> int:
    """Steps before the first in which an expert was chosen more or less often than in the oracle."""
    for step, loads in enumerate(record.loads):
        if any(not load.equal(oracle.loads[step][block]) for block, load in loads.items()):
            return step
    return len(oracle.losses)


def changed_routes(oracle: RankRecord, record: RankRecord) -> int:
    """In the first step, at least: two that changed places are not seen."""
    return sum(int((load - oracle.loads[0][block]).abs().sum()) for block, load in record.loads[0].items()) // 2


def first_steps(record: RankRecord, steps: int) -> RankRecord:
    """Without weights: those are of the last step."""
    tokens = record.tokens * steps // len(record.losses)
    kept = {key: getattr(record, key)[:steps] for key in ("losses", "norms", "gradients", "loads")}
    return replace(record, tokens=tokens, weights=[], buffers={}, **kept)
