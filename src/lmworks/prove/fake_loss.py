"""The memory of the GPU's chunked loss, on fake tensors and without a GPU.

Kernels cannot run on fake tensors. The in-place loss kernel allocates only the loss of a chunk, so a stub that does the
same replaces it; gradients are scaled by PyTorch instead of the kernel.
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
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def fake_loss_for(device: str) -> Iterator[None]:
    """Patch the loss to allocate as on a "cuda" or "cpu" device."""
    with ExitStack() as patches:
        if device == "cuda" and software.IN_PLACE:
            patches.enter_context(patched(cross_entropy, "pick", lambda *_, **__: "triton"))
            patches.enter_context(patched(cross_entropy, "chunk_loss", zero_loss))
            patches.enter_context(patched(VocabLoss, "in_place", exchange_only))
            patches.enter_context(patched(cross_entropy, "scaled", scaled_by_torch))
            patches.enter_context(patched(OuterSum, "add", mark_written))
        elif device == "cuda":
            patches.enter_context(patched(cross_entropy, "CHUNK_LOGITS", cross_entropy.CHUNK_LOGITS_GPU))
        yield


def zero_loss(logits: Tensor, *_: Any, **__: Any) -> Tensor:
    return logits.new_zeros((), dtype=torch.float32)


def exchange_only(loss: VocabLoss, logits: Tensor, _index: Tensor, counted: Tensor, _graded: bool) -> Tensor:
    return loss.of_all(logits.new_zeros(2, logits.shape[0], dtype=torch.float32), counted)[0]


def mark_written(total: OuterSum, _grad: Tensor, _hidden: Tensor) -> None:
    total.empty = False


def scaled_by_torch(x: Tensor, factor: Tensor, dtype: torch.dtype, _implementation: str) -> Tensor:
    return scaled(x, factor, dtype, "torch")
