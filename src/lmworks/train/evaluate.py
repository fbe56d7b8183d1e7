"""Loss on held-out data: a mean over tokens, the same batches every time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ..data import open_batches
from ..data.loader import IGNORED, BatchSource
from ..model import GPT
from ..parallel.parallel_model import ParallelModel
from ..spec import RunSpec
from .objective import Objective


@dataclass(frozen=True)
class Evaluation:
    loss: float  # a mean over the objective's units: nats per token
    tokens: int  # those units
    metrics: dict[str, float] = field(default_factory=dict)  # of the objective, where it has any
    unit: str = "token"

    def __str__(self) -> str:
        nats = " nats/token" if self.unit == "token" else ""
        return f"loss {self.loss:.4f}{nats} over {self.tokens:,} held-out {self.unit}s"


def held_out(spec: RunSpec) -> BatchSource:
    """The validation split in stored order, one micro-batch at a time."""
    data = spec.data.with_derived("global_batch", spec.data.micro_batch)
    return open_batches(data, spec.checkpoint.init, seed=spec.seed, split="val", shuffle=False)


def evaluation_passes(batches: BatchSource, spec: RunSpec, limit: int = 0) -> int:
    """Micro-batches of one evaluation over the first `limit` (0: as many as there are full windows)."""
    passes = -(-batches.windows // spec.data.micro_batch)
    return min(limit, passes) if limit else passes


def evaluate(
    model: GPT | ParallelModel, batches: BatchSource, spec: RunSpec, limit: int = 0, objective: Objective | None = None
) -> Evaluation:
    """Over the first `limit` micro-batches (0: as many as there are full windows; a mixture keeps its proportions)."""
    parallel_model = model if isinstance(model, ParallelModel) else ParallelModel.from_model(model, spec)
    count = evaluation_passes(batches, spec, limit)
    objective = objective or Objective()
    objective.reset_metrics()
    group = None if parallel_model.mesh is None else parallel_model.mesh.group("dp")
    if objective.needs_global_batch:
        share = parallel_model.held_out_share(count, batches.held_out_batch)
        objective.before_passes(parallel_model.forward, share, group)
    loss, units = parallel_model.evaluate(count, batches.held_out_batch, objective.loss, objective.units)
    return Evaluation(loss / max(1, units), units, objective.metrics(group), objective.unit)


@torch.no_grad()
def loss_by_window(model: GPT, batches: BatchSource, spec: RunSpec, limit: int = 0) -> Iterator[tuple[float, int]]:
    """Mean loss of each window that `evaluate` takes, and its tokens; their mean over tokens is `evaluate`'s loss."""
    forward = ParallelModel.from_model(model, spec).forward
    for index in range(evaluation_passes(batches, spec, limit)):
        batch = batches.held_out_batch(index)
        sums = -forward(batch, logprobs=True).logps.reshape(batch.targets.shape).double().sum(1)
        for loss, count in zip(sums.tolist(), (batch.targets != IGNORED).sum(1).tolist(), strict=True):
            if count:
                yield loss / count, count


@dataclass(frozen=True)
class PositionLoss:
    """Mean loss of the targets at positions `first` … `last` of their windows."""

    first: int
    last: int
    loss: float
    tokens: int


@torch.no_grad()
def loss_by_position(
    model: GPT | ParallelModel, batches: BatchSource, spec: RunSpec, limit: int = 0
) -> list[PositionLoss]:
    """Over the windows that `evaluate` takes, in bands of positions that double: 0, 1, 2–3, 4–7, …"""
    forward = (model if isinstance(model, ParallelModel) else ParallelModel.from_model(model, spec)).forward
    sums = torch.zeros(spec.data.seq, 2, dtype=torch.float64)  # of losses and of targets
    for index in range(evaluation_passes(batches, spec, limit)):
        batch = batches.held_out_batch(index)
        logps = forward(batch, logprobs=True).logps.reshape(batch.targets.shape)
        sums[:, 0] -= logps.double().sum(0).cpu()
        sums[:, 1] += (batch.targets != IGNORED).sum(0).cpu()
    edges = [0, *(2**power for power in range(spec.data.seq.bit_length()) if 2**power < spec.data.seq), spec.data.seq]
    bands = [(first, end - 1, *sums[first:end].sum(0).tolist()) for first, end in itertools.pairwise(edges)]
    return [PositionLoss(first, last, loss / count, int(count)) for first, last, loss, count in bands if count]
