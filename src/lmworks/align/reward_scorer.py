"""Scores of answers by a reward model: its value at their last token, normalised as when it was trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..data import Batch
from ..model.reward_stats import read_stats
from ..parallel.parallel_model import ParallelModel
from ..parallel.world import all_gather_object
from .rollouts import Rollout

Packed = Callable[[Sequence[Rollout]], list[tuple[Batch, list[int]]]]


class RewardScorer:
    def __init__(self, model: ParallelModel, folder: str) -> None:
        """`folder` has the statistics of the model's rewards."""
        self.model, self.stats = model, read_stats(Path(folder))

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout], packed: Packed) -> list[float]:
        """Of all answers, on all ranks; `packed` makes this rank's micro-batches of them."""
        own: list[tuple[int, float]] = []
        for batch, numbers in packed(rollouts):
            values = self.model.forward(batch).flatten()
            mask, index = batch.extras["mask"], batch.extras["index"]
            last = (index * mask).amax(dim=1) + 1  # an index is of the position before its token
            scores = ((values[last.to(values.device)] - self.stats.mean) / self.stats.std).tolist()
            own += zip(numbers, scores, strict=False)  # a filler has no answers
        group = None if self.model.mesh is None else self.model.mesh.group("dp")
        found = dict(pair for share in all_gather_object(own, group) for pair in share)
        return [found[number] for number in range(len(rollouts))]
