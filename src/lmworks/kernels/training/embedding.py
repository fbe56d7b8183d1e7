"""A row of a table for each token. The work is its gradient: row i is the sum of ∂loss/∂result over the places of i.

On an H200 PyTorch takes 0.55 ms for that of GPT-2's table with 65,536 tokens in bf16, Triton 0.12; to read what is
summed and to write the sums takes 0.04. In Triton places are sorted by token and cut into chunks (`embedding_triton`),
so that a token that stands everywhere is no more work than many that stand once. Every sum has one order: the same
gradients give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..dispatch import pick, pick_alone

OP = "embedding_gradient"
IMPLEMENTATIONS = ("torch", "triton")


def embedding(tokens: Tensor, weight: Tensor, implementation: str | None = None) -> Tensor:
    """As F.embedding: tokens (…), weight (vocab, hidden) → (…, hidden). `implementation` is that of the gradient."""
    if torch.is_grad_enabled() and weight.requires_grad:
        shape = shape_of(tokens, *weight.shape)
        if pick_alone(OP, implementation, IMPLEMENTATIONS, weight.device, **shape) == "triton":
            return Embedding.apply(tokens, weight)
    return F.embedding(tokens, weight)


def embedding_gradient(grad: Tensor, tokens: Tensor, vocab: int, implementation: str | None = None) -> Tensor:
    """Of the table, (vocab, hidden), from that of the result, (…, hidden), in its precision."""
    shape = shape_of(tokens, vocab, grad.shape[-1])
    if pick(OP, implementation, IMPLEMENTATIONS, grad.device, **shape) == "triton":
        from .embedding_triton import launch

        return launch(grad, tokens, vocab)
    return reference(grad, tokens, vocab)


def shape_of(tokens: Tensor, vocab: int, hidden: int) -> dict[str, int]:
    return {"tokens": tokens.numel(), "vocab": vocab, "hidden": hidden}


def reference(grad: Tensor, tokens: Tensor, vocab: int) -> Tensor:
    """What F.embedding does in the backward pass."""
    return torch.ops.aten.embedding_dense_backward(grad, tokens, vocab, -1, False)


class Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.vocab = weight.shape[0]
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        return None, embedding_gradient(grad, tokens, ctx.vocab, "triton")
