"""The batches of a run, by data.kind."""

from __future__ import annotations

from ..spec.align import PROMPTS
from ..spec.run import DataSpec
from .example_batches import ExampleBatches, PromptBatches
from .loader import Batches, BatchSource
from .progress import Progress, silent


def open_batches(
    data: DataSpec,
    init: str = "",
    *,
    seed: int,
    split: str = "train",
    rank: int = 0,
    world: int = 1,
    shuffle: bool | None = None,
    progress: Progress = silent,
) -> BatchSource:
    """`init`: checkpoint.init of the run, whose tokenizer post-training uses where data.tokenizer names none."""
    if data.kind in ("auto", "tokens"):
        return Batches(data, seed=seed, split=split, rank=rank, world=world, shuffle=shuffle, progress=progress)
    rows = PromptBatches if data.kind == PROMPTS else ExampleBatches
    return rows(data, init, seed=seed, split=split, rank=rank, world=world, shuffle=shuffle, progress=progress)
