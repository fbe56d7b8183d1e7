"""FLOPs of one optimizer step: what the model needs, and what is computed, blocks that run again among it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from ..spec import RunSpec
from .flops import hardware_flops_per_token, model_flops_per_token
from .policies import policies


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
    each = policies(spec, range(max(1, model.layers // stages)))
    hardware = statistics.fmean(hardware_flops_per_token(model, seq, policy) for policy in each)
    return StepFlops(tokens, tokens * model_flops_per_token(model, seq), tokens * hardware)
