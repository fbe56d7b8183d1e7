"""The loss as a GPU computes it, where there is none and tensors have no numbers: its chunks, and what each holds.

Kernels cannot run on such tensors. Where the loss is computed in place they take nothing and leave nothing behind but
the loss of a chunk, and that is what stands in for them; gradients are scaled by PyTorch, where the kernel would.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..kernels.training import cross_entropy
from ..kernels.training.cross_entropy import OuterSum, scaled
from ..parallel.vocab_parallel import VocabLoss
from ..plan import software


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def loss_of(device: str) -> Iterator[None]:
    """Of a "cuda" or a "cpu" device."""
    with ExitStack() as changed:
        if device == "cuda" and software.IN_PLACE:
            changed.enter_context(replaced(cross_entropy, "pick", lambda *_, **__: "triton"))
            changed.enter_context(replaced(cross_entropy, "chunk_loss", nothing))
            changed.enter_context(replaced(VocabLoss, "in_place", exchange))
            changed.enter_context(replaced(cross_entropy, "scaled", scaled_by_torch))
            changed.enter_context(replaced(OuterSum, "add", written))
        elif device == "cuda":
            changed.enter_context(replaced(cross_entropy, "CHUNK_LOGITS", cross_entropy.CHUNK_LOGITS_GPU))
        yield


def nothing(logits: Tensor, *_: Any, **__: Any) -> Tensor:
    return logits.new_zeros((), dtype=torch.float32)


def exchange(loss: VocabLoss, logits: Tensor, _index: Tensor, counted: Tensor, _graded: bool) -> Tensor:
    return loss.of_all(logits.new_zeros(2, logits.shape[0], dtype=torch.float32), counted)[0]


def written(total: OuterSum, _grad: Tensor, _hidden: Tensor) -> None:
    total.empty = False


def scaled_by_torch(x: Tensor, factor: Tensor, dtype: torch.dtype, _implementation: str) -> Tensor:
    return scaled(x, factor, dtype, "torch")
