"""Gradients of three DDP ranks do not depend on how many steps their processes have taken before."""

from __future__ import annotations

from pathlib import Path

import torch

from layouts import layout
from lmworks.parallel.local_ranks import on_ranks
from lmworks.spec import RunSpec
from tiny import built


def gradients_twice(rank: int, spec: RunSpec, folder: Path) -> list[list[torch.Tensor]]:
    trainer = built(spec, folder)
    found = []
    for _ in range(2):
        trainer.parallel_model.forward_backward(trainer.batches.at(0), 1.0)
        trainer.parallel_model.finish()
        found.append([shard.leaf.grad.clone() for shard in trainer.parallel_model.shards])
        trainer.parallel_model.zero_grad()
    return found


def test_the_first_backward_pass_of_a_process_adds_up_as_the_second(dataset: Path, tmp_path: Path) -> None:
    """Else a resumed run would begin with a step that differs in the last bits from the one it repeats."""
    # Buckets of 8 KB, of which the model fills several.
    spec = layout(dataset, "parallel.dp=3", "data.global_batch=3", "parallel.bucket_mb=0.008")
    for first, second in on_ranks(3, gradients_twice, spec, tmp_path / "run"):
        assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True] * len(first)
