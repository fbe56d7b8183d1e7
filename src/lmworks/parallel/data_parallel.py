"""The interface of data-parallel strategies; ddp.py, fsdp1.py, fsdp2.py, zero.py and single_rank.py implement it.

A step is: for each micro-batch, `with strategy.micro_batch(last): loss = strategy(…); (loss · loss_factor).backward()`,
then `finish()`, after which every shard's `leaf.grad` is the sum over all data-parallel (and context-parallel) ranks of
what they computed; the optimizer updates the leaves; `after_step()` brings the update to the model.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..spec.lora import adapter_of


@dataclass
class Shard:
    """The part of one weight that this rank's optimizer updates."""

    name: str  # of the parameter in the model
    leaf: Tensor  # a plain local tensor with .grad; it shares its memory with the model's weight, or is copied to it
    shape: torch.Size  # of the weight before data-parallel sharding (after tensor and expert parallelism)
    # The mesh axis over which its rows (dim 0, chunked as torch.chunk does) are cut; None: the leaf is whole; "flat": a
    # run of elements, and the ranks of "shard" joined in their order have them all (FSDP1).
    rows: str | None
    # The 16 bits below a bf16 leaf with which it is an fp32 number, where its optimizer keeps a master
    # (kernels.training.adamw).
    low: Tensor | None = None


def trained_parameters(part: nn.Module, adapter: str = "") -> dict[str, nn.Parameter]:
    """What a strategy updates: all that is trained, or that of one adapter where several over one base are."""
    named = {name: weight for name, weight in part.named_parameters() if weight.requires_grad}
    return {name: weight for name, weight in named.items() if not adapter or adapter_of(name) == adapter}


def take_low_bits(weight: Tensor) -> Tensor | None:
    """The bits that rounding cut off a weight (`initial_weights.materialise`); removed from it."""
    low: Tensor | None = vars(weight).pop("low_bits", None)
    return low


def unwrapped(name: str) -> str:
    """The model's own name of a parameter, buffer or module. FSDP1 alone adds to it, where it has wrapped a block."""
    return name.replace("_fsdp_wrapped_module.", "").removesuffix("._fsdp_wrapped_module")


class DataParallel(Protocol):
    loss_factor: float  # the loss is multiplied by this, so that an average of gradients becomes their sum

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass."""

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Around one forward and backward pass; gradients need to be reduced only after the last."""

    def finish(self) -> None:
        """After the last backward pass: every leaf has its whole gradient."""

    def shards(self) -> list[Shard]:
        """What this rank updates; the same objects each time."""

    def after_step(self) -> None:
        """After the optimizer: fetch what other ranks have updated."""

    def zero_grad(self) -> None:
        """Drop all gradients."""
