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
    """Blocks may have different policies; those of the first stage stand for all."""
    model, tokens, seq = spec.model, spec.tokens_per_step, spec.data.seq
    stages = spec.parallel.pp * spec.parallel.virtual_stages
    each = policies(spec, range(max(1, model.layers // stages)))
    hardware = statistics.fmean(hardware_flops_per_token(model, seq, policy) for policy in each)
    return StepFlops(tokens, tokens * model_flops_per_token(model, seq), tokens * hardware)
