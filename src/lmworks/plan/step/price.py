"""The time of a training step on any layout: one candidate, or thousands at once.

`price` is a closed form over arrays:

    uncalibrated.py  kernels at benchmarked rates, collectives on idle links (comm.py), optimizer, copies
    micro_batch.py   one micro-batch of one rank with the fitted constants (constants.py), overlap and host launches
    pipeline.py      the slowest rank, and the step time with the pipeline bubble
    here             exposed data-parallel communication, optimizer, stragglers; the parts add up to the step

`timeline` prices one candidate the same way, with its pipeline simulated action by action.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from ..case import Case, Number
from ..devices.profile import profile_for
from ..flops import adapted_flops_per_token, hardware_flops_per_token, model_flops_per_token
from ..pipelines.schedule import Span, simulate, total
from .constants import Constants, chip_family, constants, factor
from .micro_batch import Calibrated, MicroBatch, Traffic, overlap
from .pipeline import SlowestRank, StageSplit, pipeline_actions, pipeline_seconds
from .uncalibrated import Uncalibrated


@dataclass(frozen=True)
class Price:
    """Seconds of a step and its parts; every number may be an array, one element per candidate."""

    case: Case
    seconds: Number
    parts: dict[str, Number]  # they add up to `seconds`
    tags: dict[str, str]  # of each part: measured, fitted or modelled
    hidden: dict[str, Number]  # seconds of overlapped communication, by axis
    interval: tuple[Number, Number]  # 90 % interval
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> Number:
        return self.case.tokens_per_step / self.seconds

    @property
    def mfu(self) -> Number:
        """Model FLOPs utilization; NaN where the peak of the GPU is not known."""
        case = self.case
        return self.tokens_per_s * adapted_flops_per_token(case.model, case.seq, case.adapters) / self.peak_flops

    @property
    def hfu(self) -> Number:
        """Hardware FLOPs utilization."""
        model, seq = self.case.model, self.case.seq
        again = hardware_flops_per_token(model, seq, self.case.recompute) - model_flops_per_token(model, seq)
        return self.mfu + self.tokens_per_s * again / self.peak_flops

    @property
    def peak_flops(self) -> Number:
        """FLOP/s of all GPUs together, by their datasheet."""
        return self.case.world * (self.case.gpu.peak_flops(self.case.dtype) or np.nan)


@dataclass(frozen=True)
class Step:
    """What `price` and `timeline` have in common."""

    calibrated: Calibrated
    micro_batch: MicroBatch
    split: StageSplit
    rank: SlowestRank
    send: Number  # seconds from one pipeline stage to the next

    @classmethod
    def of(cls, uncalibrated: Uncalibrated, fitted: Constants) -> Self:
        case = uncalibrated.case
        factors = fitted.factors(case.gpu, case.software, case.world)
        calibrated = Calibrated(case, uncalibrated, fitted, factors, *fitted.host_seconds(case.software))
        work, block, split = uncalibrated.work, calibrated.block(), StageSplit.of(case)
        ends = calibrated.vocab_parallel(*work.stem), calibrated.vocab_parallel(*work.loss)
        share = 0.0 if case.recompute != "none" else weight_gradient_share(case)
        weight_gradients = block.backward.parts["matmul"] * share
        micro_batch = MicroBatch(block, *ends, weight_gradients)
        send = calibrated.comm_seconds(uncalibrated.comm.send)
        return cls(calibrated, micro_batch, split, SlowestRank.of(case, split, micro_batch), send)


def weight_gradient_share(case: Case) -> float:
    """Of the products of a backward pass: one of two, or those of adapters alone, two of six FLOPs of theirs."""
    if not case.adapters:
        return 0.5
    adapters = sum(weight.size for weight in case.adapters if len(weight.shape) > 1)
    return float(adapters / (case.model.block_matmul_params + 2 * adapters))


def price(case: Case, fitted: Constants | None = None) -> Price:
    return price_uncalibrated(Uncalibrated.of(case), fitted or constants())


def price_uncalibrated(uncalibrated: Uncalibrated, fitted: Constants) -> Price:
    """`price` with kernels and collectives already timed: cheap to repeat with other constants."""
    step, case = Step.of(uncalibrated, fitted), uncalibrated.case
    without_sends = pipeline_seconds(case, step.split, step.rank, step.micro_batch, 0.0)
    if not np.any(case.pp > 1):
        return assemble(step, without_sends, without_sends)
    with_sends = pipeline_seconds(case, step.split, step.rank, step.micro_batch, step.send)
    return assemble(step, without_sends, with_sends)


def timeline(case: Case, fitted: Constants | None = None) -> Price:
    """`price` of one candidate, with its pipeline simulated."""
    if case.pp == 1:
        return price(case, fitted)
    step = Step.of(Uncalibrated.of(case), fitted or constants())
    orders, times = pipeline_actions(case, step.micro_batch)
    return assemble(step, total(simulate(orders, times)), total(simulate(orders, times, float(step.send))))


def pipeline_spans(case: Case, fitted: Constants | None = None) -> list[Span]:
    """The simulated pipeline of one candidate."""
    step = Step.of(Uncalibrated.of(case), fitted or constants())
    return simulate(*pipeline_actions(case, step.micro_batch), float(step.send))


def assemble(step: Step, without_sends: Number, with_sends: Number) -> Price:
    """All parts of a step, from the seconds of its passes without and with pipeline sends."""
    calibrated, micro_batch, rank = step.calibrated, step.micro_batch, step.rank
    case, fitted, uncalibrated = calibrated.case, calibrated.fitted, calibrated.uncalibrated
    batches = case.accumulation
    parts: dict[str, Number] = defaultdict(float)
    hidden: dict[str, Number] = defaultdict(float)
    for count, both in ((rank.layers, micro_batch.block), (rank.stem, micro_batch.stem), (rank.head, micro_batch.loss)):
        for cost in (both.forward, both.backward):
            for name, seconds in cost.parts.items():
                parts[name] = parts[name] + batches * count * seconds
            for name, seconds in cost.hidden.items():
                hidden[name] = hidden[name] + batches * count * seconds
    rank_s = batches * rank.seconds
    without_sends = np.maximum(without_sends, rank_s)  # the closed form may be a little short
    parts["bubble"] = without_sends - rank_s
    parts["pp"] = np.maximum(0.0, with_sends - without_sends)
    tail = data_parallel_tail(calibrated, rank, micro_batch)
    parts["dp"] = parts["dp"] + tail.exposed
    hidden["dp"] = hidden["dp"] + tail.hidden
    parts["optimizer"] = sum(uncalibrated.optimizer.parts(calibrated.factors).values())
    parts["offload"] = parts["offload"] + uncalibrated.offload
    parts["host"] = parts["host"] + calibrated.step_s * case.host
    if np.any(one_gpu := np.equal(case.world, 1)):
        waited = calibrated.host_wait_seconds(micro_batch, parts["optimizer"] + uncalibrated.offload)
        parts["host"] = np.where(one_gpu, waited, parts["host"])[()]

    software = factor(fitted.software, case.software.name)
    nodes = np.ceil(case.world / case.cluster.gpus_per_node)
    parts = {name: software * seconds for name, seconds in parts.items()}
    parts["stragglers"] = sum(parts.values()) * fitted.stragglers * np.log2(np.maximum(nodes, 1))
    step_s = sum(parts.values())
    deviation, missing = fitted.uncertainty(case)
    notes = tuple(f"no run {reason} was fitted: the interval is wider" for reason in missing)
    margin = np.exp(1.645 * deviation)
    interval = (step_s / margin, step_s * margin)
    gpu_fitted = chip_family(case.gpu) in fitted.gemm
    return Price(case, step_s, parts, tags(case, gpu_fitted, parts), dict(hidden), interval, notes)


def data_parallel_tail(calibrated: Calibrated, rank: SlowestRank, micro_batch: MicroBatch) -> Traffic:
    """Data-parallel communication beside that of each block.

    ZeRO-3: the first all-gather and the last reduce-scatter, which nothing overlaps. ZeRO 0 to 2: all gradients.
    """
    case, comm, contention = calibrated.case, calibrated.uncalibrated.comm, calibrated.fitted.contention
    if case.zero == 3:
        first = calibrated.comm_seconds(comm.all_gather_root + comm.all_gather)
        last = calibrated.comm_seconds(comm.reduce_scatter_root + comm.reduce_scatter)
        return Traffic(case.accumulation * (first + comm.reductions * last))
    gradients = calibrated.comm_seconds(comm.gradients)
    weights = calibrated.comm_seconds(comm.weight_all_gather)
    if not case.software.overlap:
        return Traffic(gradients + weights)
    # With several stages on a rank, gradients of one are reduced while the others have their last micro-batches.
    layers = rank.layers * (1 + (np.minimum(case.pp, case.accumulation) - 1) * (1 - 1 / case.virtual))
    reduced = overlap(gradients, layers * micro_batch.block.backward.seconds, contention)
    gathered = Traffic(weights)
    if case.software.master:  # new weights are gathered block by block in the next forward pass
        gathered = overlap(weights, layers * micro_batch.block.forward.seconds, contention)
    times = case.accumulation if case.sync_each_pass else 1
    return Traffic(times * reduced.exposed + gathered.exposed, times * reduced.hidden + gathered.hidden)


def tags(case: Case, gpu_fitted: bool, parts: Iterable[str]) -> dict[str, str]:
    """What each figure rests on. Inter-node links and bubbles were never measured on their own."""
    work, path = "fitted" if gpu_fitted else "modelled", case.cluster.profile
    one_node = bool(np.all(case.world <= case.cluster.gpus_per_node))
    found = dict.fromkeys(parts, profile_for(case.gpu, path, case.cluster.catalogue).machine.tag if path else work)
    found |= dict.fromkeys(("tp", "cp", "ep", "dp", "pp"), "fitted" if one_node else "modelled")
    return {**found, "host": "fitted", "bubble": "modelled", "offload": "modelled", "stragglers": "fitted"}
