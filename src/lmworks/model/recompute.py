"""Recompute: throw activations away after the forward pass and compute them again for the backward pass.

`full` keeps only a block's input. `selective` keeps what is dear to compute, the results of matrix products and of
attention, and computes the cheap rest (norms, activations, rotations) again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten
DEAR = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
}


def keep_dear(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in DEAR else CheckpointPolicy.PREFER_RECOMPUTE


class Kept(torch.autograd.Function):
    """Holds tensors the way autograd holds them: inside a recomputed block they are dropped and come back."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> None:
        raise NotImplementedError("nothing is computed from kept tensors")


def through(activation: Callable[..., Tensor], *inputs: Tensor, into: Callable[[Tensor], Tensor]) -> Tensor:
    """`into(activation(*inputs))`, keeping `inputs` for the backward pass but not what lies between.

    The activation of an MLP is as wide as its input, which is saved anyway, and costs next to nothing to compute
    again. A compiled block decides such things by itself.
    """
    middle = activation(*inputs)
    if torch.compiler.is_compiling() or not middle.requires_grad:
        return into(middle)
    address, size = middle.data_ptr(), middle.numel()
    keeper: Any = Kept.apply(*inputs)  # the tensor, not its node: torch 2.11 empties a node whose tensor is gone

    def pack(saved: Tensor) -> Tensor | torch.Size:
        same = saved.data_ptr() == address and saved.numel() == size
        return saved.shape if same else saved

    def unpack(kept: Tensor | torch.Size) -> Tensor:
        return kept if isinstance(kept, Tensor) else activation(*keeper.grad_fn.saved_tensors).view(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return into(middle)


def recomputed(block: Callable[..., Tensor], policy: str) -> Callable[..., Tensor]:
    """`block` under the named policy: none, full or selective."""
    if policy == "none":
        return block
    again = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)  # no block draws random numbers
    if policy == "full":
        return again
    return partial(again, context_fn=partial(create_selective_checkpoint_contexts, keep_dear))
