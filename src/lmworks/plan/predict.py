"""The prediction of a run before its first step (prediction.json): FLOPs, memory sheet, step time.

The path of a step time: `predict` → `step.price.timeline` (GPUs by name, any layout) or `step.one_device.step_time`
(one measured machine) or `step.cpu_ranks.ranks_step_time` (data-parallel ranks on such machines). The path of a memory
figure: `memory.sheet.memory`.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from ..spec import RunSpec
from .case import Case
from .devices.machine import Machine
from .devices.profile import profile_of
from .exact.hand_over import HandOverBytes, hand_over_bytes
from .flops import hardware_flops_per_token, model_flops_per_token, run_flops_per_token
from .memory.sheet import MemorySheet, memory
from .ops import device_of
from .policies import policies
from .step.cpu_ranks import not_priced, ranks_step_time
from .step.one_device import StepTime, step_time
from .step.price import timeline


@dataclass(frozen=True)
class StepFlops:
    """One optimizer step, all ranks together."""

    tokens: int
    model: float
    hardware: float


def step_flops(spec: RunSpec) -> StepFlops:
    """Blocks may have different policies. A budget is a stage's: the first stands for all."""
    model, tokens, seq, layout = spec.model, spec.tokens_per_step, spec.data.seq, spec.parallel
    stages = layout.pp * layout.virtual_stages if layout.recompute == "budget" else 1
    blocks = Counter(policies(spec, range(max(1, model.layers // stages))))
    hardware = statistics.fmean((hardware_flops_per_token(model, seq, each) for each in blocks), blocks.values())
    needed = run_flops_per_token(spec)
    return StepFlops(tokens, tokens * needed, tokens * (hardware + needed - model_flops_per_token(model, seq)))


# --- memory and time -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    params: int
    flops: StepFlops
    memory: MemorySheet
    time: StepTime | None  # None where it is unknown
    machine: Machine | None
    hand_over: HandOverBytes | None = None  # of online methods, from the second round on

    def to_dict(self) -> dict[str, Any]:
        time, machine, moved = self.time, self.machine, self.hand_over
        return {
            "params": self.params,
            "tokens_per_step": self.flops.tokens,
            "model_flops_per_step": self.flops.model,
            "hardware_flops_per_step": self.flops.hardware,
            "memory_bytes": self.memory.total,
            "memory_moment": self.memory.moment,
            "memory": [asdict(row) for row in self.memory.rows],
            "memory_moments": self.memory.peaks,
            "host_bytes": self.memory.host,
            "host_parts": self.memory.host_parts.to_dict(),
            "step_s": time.total if time else None,
            "interval": list(time.interval) if time else None,
            "tokens_per_s": time.tokens_per_s if time else None,
            "quiet": machine.quiet if machine and machine.tag == "measured" else None,
            "noise": machine.noise if machine and machine.tag == "measured" else None,
            "step_parts": time.parts if time else None,
            "hand_over_bytes": (moved.broadcast or moved.copied) if moved else None,  # as the run measures it
            "hand_over_received_bytes": moved.received if moved else None,
            "machine": {"name": machine.name, "device": machine.device, "tag": machine.tag} if machine else None,
            "tags": {"memory": "modelled", **(time.tags if time else {})},
            "notes": [*self.memory.notes, *(time.notes if time else ())],
        }


def predict(spec: RunSpec, machine: Machine | None = None) -> Prediction:
    """Memory is that of rank 0, which has the most micro-batches in flight under a pipeline."""
    device = machine.device if machine else device_of(spec)
    moved = hand_over_bytes(spec) if spec.align.online else None
    return Prediction(spec.model.params, step_flops(spec), memory(spec, device), time_of(spec, machine), machine, moved)


def time_of(spec: RunSpec, machine: Machine | None) -> StepTime | None:
    """By the fitted model of a named GPU, or by the rates of one measured machine.

    None without a machine, where its rate for this precision is unknown, for CPU ranks without measured collectives,
    and for a pipeline with an activation budget, whose stages may have different recompute policies.
    """
    gpu = spec.cluster.accelerator
    if machine is None or not machine.covers(spec.precision.dtype):
        return None
    if spec.parallel.recompute == "budget":
        return within_budget(spec, machine)
    if gpu is not None and (machine.tag != "measured" or spec.parallel.world > 1):
        price = timeline(Case.of(spec, gpu))
        parts = {name: float(seconds) for name, seconds in price.parts.items()}
        low, high = price.interval
        return StepTime(parts, price.tags, spec.tokens_per_step, (float(low), float(high)), price.notes)
    if spec.parallel.world == 1:
        return step_time(spec, machine)
    profile = profile_of(spec.cluster) if spec.cluster.profile else None
    if machine.device != "cpu" or profile is None or not_priced(spec, profile):
        return None
    return ranks_step_time(spec, machine, profile)


def within_budget(spec: RunSpec, machine: Machine) -> StepTime | None:
    """The mean over recompute policies, weighted by their number of blocks."""
    if spec.parallel.pp > 1:
        return None
    parts: dict[str, float] = defaultdict(float)
    tags: dict[str, str] = {}
    low = high = 0.0
    for policy, blocks in Counter(policies(spec, range(spec.model.layers))).items():
        uniform = spec.replace(parallel=spec.parallel.replace(recompute=policy, recompute_budget=0.0))
        time = time_of(uniform, machine)
        if time is None:
            return None
        tags |= time.tags
        share = blocks / spec.model.layers
        low, high = (sum(each) for each in zip((low, high), (share * end for end in time.interval), strict=True))
        for part, seconds in time.parts.items():
            parts[part] += seconds * share
    return StepTime(dict(parts), tags, spec.tokens_per_step, (low, high))
