"""Loss on held-out data: a mean over tokens, the same batches every time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..data import Batches
from ..kernels.cross_entropy import IGNORE
from ..spec import RunSpec
from .precision import autocast


@dataclass(frozen=True)
class Evaluation:
    loss: float  # nats per token
    tokens: int


def held_out(spec: RunSpec) -> Batches:
    """The validation split in stored order, one micro-batch at a time."""
    data = spec.data.replace(global_batch=spec.data.micro_batch)
    return Batches(data, seed=spec.seed, split="val", shuffle=False)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches, spec: RunSpec, limit: int = 0) -> Evaluation:
    """Over the first `limit` micro-batches (0: as many as there are full windows; a mixture keeps its proportions)."""
    device = next(model.parameters()).device
    passes = -(-batches.windows // spec.data.micro_batch)  # the last one may hold windows of the next epoch
    total, tokens = 0.0, 0
    for index in range(min(limit, passes) if limit else passes):
        rows = min(spec.data.micro_batch, batches.windows - index * spec.data.micro_batch)
        for batch in batches.at(index):
            targets = batch.targets[:rows].to(device)
            documents = None if batch.documents is None else batch.documents[:rows].to(device)
            with autocast(spec.precision, device):
                _, loss = model(
                    batch.tokens[:rows].to(device), targets, documents=documents, reduction="sum", keep_logits=False
                )
            total += loss.item()
            tokens += int((targets != IGNORE).sum())
    return Evaluation(total / max(1, tokens), tokens)
