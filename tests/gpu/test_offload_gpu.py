"""Activations in host memory on a GPU: the same losses, and as much less memory as the planner says."""

from __future__ import annotations

import gc
from contextlib import closing
from pathlib import Path

import pytest
import torch

from lmworks.bench.train import one_step, weights_on_device
from lmworks.plan.memory.sheet import memory
from lmworks.spec import load_run
from lmworks.train import Trainer
from lmworks.train.prefetcher import Prefetcher

pytestmark = pytest.mark.gpu

SMALL = (
    "model.layers=10", "model.hidden=2048", "model.heads=16", "model.kv_heads=4", "model.ffn=7168",
    "model.vocab=32000", "model.context=4096", "data.micro_batch=4", "data.seq=4096", "precision.dtype=bf16",
    "precision.weights=bf16", "precision.master=false", "precision.states=bf16", "cluster.device=cuda",
    "parallel.compile=true", "optim.lr=1e-4",
)  # fmt: skip


def run(folder: Path, *changes: str) -> tuple[list[float], int, int]:
    """Losses, the most memory that steps took, and what was planned."""
    spec = load_run("tiny", [*SMALL, *changes])
    before = torch.cuda.memory_allocated()
    trainer = Trainer(spec, folder, quiet=True)
    trainer.weights = weights_on_device(trainer.device, 0)
    trainer.build()
    with closing(Prefetcher(trainer.batches, 0, trainer.device)) as trainer.prefetcher:
        losses = [one_step(trainer, 6 - step) for step in range(3)]
        torch.cuda.reset_peak_memory_stats()
        losses += [one_step(trainer, 3 - step) for step in range(3)]
    most = torch.cuda.max_memory_allocated() - before
    del trainer
    gc.collect()
    return losses, most, memory(spec, "cuda").total


def test_offload_gives_same_losses_in_less_memory(tmp_path: Path) -> None:
    here, whole, planned = run(tmp_path / "here")
    assert whole == pytest.approx(planned, rel=0.01)
    away, less, planned = run(tmp_path / "away", "parallel.offload_activations=4")
    assert less == pytest.approx(planned, rel=0.01)
    assert whole - less == pytest.approx(4 * 2**30, rel=0.02)
    assert away == pytest.approx(here, rel=2e-4)  # two runs without it differ as much: attention adds in any order
