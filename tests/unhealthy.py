"""Numeric faults (NaN, spikes, bit flips) injected into runs by tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lmworks.data import Batch
from lmworks.train import Trainer

WATCH = (
    "health.window=8", "health.warmup=6", "health.z=4", "optim.steps=20", "checkpoint.every=4", "checkpoint.keep=0",
    "health.rewind_steps=2",
)  # fmt: skip


def see_data(trainer: Trainer, change: Callable[[int], int], bad: int | None = None) -> Trainer:
    """Read the window `change(cursor)` in place of each cursor; that of `bad` has targets that nobody can guess."""
    read = trainer.batches.at

    def at(cursor: int) -> list[Batch]:
        found = read(change(cursor))
        if change(cursor) != bad:
            return found
        noise = torch.Generator().manual_seed(1)
        return [
            Batch(batch.tokens, torch.randint(128, 250, batch.targets.shape, generator=noise), batch.documents)
            for batch in found
        ]

    trainer.batches.at = at  # type: ignore[method-assign]
    return trainer


def as_it_is(cursor: int) -> int:
    return cursor


def spoil_output(trainer: Trainer, name: str, when: Callable[[], bool], value: float = float("nan")) -> None:
    """A module of a built trainer that gives one bad number wherever `when` says so."""

    def spoil(_module: Any, _inputs: Any, output: Tensor) -> Tensor | None:
        if not when():
            return None
        output = output.clone()
        output.view(-1)[0] = value
        return output

    for part in trainer.parallel_model.parts.values():
        for found, module in part.named_modules():
            if found == name:
                module.register_forward_hook(spoil)


def flip(tensor: Tensor, bit: int = 1) -> None:
    """One low bit of the first number: nothing that a loss would show."""
    with torch.no_grad():
        tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)
