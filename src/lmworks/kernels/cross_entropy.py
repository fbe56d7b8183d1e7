"""Linear layer + cross-entropy that never holds all the logits.

The logits of a batch are its largest tensor by far: tokens × vocab, several times over once softmax and its
gradient are saved. Here the loss is a sum over tokens, so each chunk of tokens can be finished at once: its
logits, its loss, and, with p = softmax(logits), the gradient of the logits, p − onehot(target), which is
multiplied into the gradients of hidden states and weight and then thrown away. Backward only scales those two.

Tensor cores want rows of 16 bytes: with GPT-2's 50,257 tokens the three products run at a third of their rate. Such a
vocabulary is filled up with tokens of probability zero while the loss is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # a target that is not counted, as in torch's cross_entropy
# Elements of one chunk of logits: small beside a batch, large enough that its products run at full rate.
CHUNK_LOGITS = 2**21  # on a CPU: 8 MiB in fp32
CHUNK_LOGITS_GPU = 2**27  # 512 MiB in fp32: at least a thousand tokens of a vocabulary of 128k
ALIGNED, FILLED = 8, 64  # 2-byte numbers in 16 bytes; what a vocabulary that does not divide by it is filled up to


def reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum over tokens of −log softmax(hidden · weightᵀ)[target]."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, ignore_index=IGNORE, reduction="sum")


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: Callable[..., Tensor] | None = None
) -> Tensor:
    """As `reference`: hidden (tokens, width), weight (vocab, width), targets (tokens) → a float32 scalar.

    `chunk` stands in for `chunk_loss` where a rank holds only some rows of the vocabulary.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    return LinearCrossEntropy.apply(hidden, weight, targets, chunk)


def chunk_rows(vocab: int, device_type: str) -> int:
    """Tokens in one chunk."""
    return max(1, (CHUNK_LOGITS if device_type == "cpu" else CHUNK_LOGITS_GPU) // vocab)


def filled(vocab: int, hidden: Tensor) -> int:
    """Rows of the head's weight as the products see it."""
    fits = vocab % ALIGNED == 0 or hidden.device.type == "cpu" or hidden.dtype == torch.float32
    return vocab if fits else -(-vocab // FILLED) * FILLED


def cast_rows(weight: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """weight in another precision, filled up with zeros to so many rows."""
    if rows == weight.shape[0]:
        return weight.to(dtype)
    cast = weight.new_empty(rows, weight.shape[1], dtype=dtype)
    cast[: weight.shape[0]] = weight
    cast[weight.shape[0] :] = 0
    return cast


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: Callable[..., Tensor] | None
    ) -> Tensor:
        want_hidden, want_weight, *_ = ctx.needs_input_grad
        vocab, width = weight.shape
        seen = filled(vocab, hidden) if chunk is None else vocab
        chunk = chunk or partial(chunk_loss, vocab=vocab)
        cast_weight = cast_rows(weight, seen, hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = weight.new_zeros(seen, width) if want_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        rows = chunk_rows(seen, hidden.device.type)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], rows):
                part = slice(start, start + rows)
                into = None if grad_hidden is None else grad_hidden[part]
                loss += chunk(hidden[part], cast_weight, targets[part], into, grad_weight)
        if grad_weight is not None:
            grad_weight.resize_(vocab, width)  # not a view: autograd adds a tied embedding's gradient to it in place
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad_loss).to(grad_hidden.dtype)
        if grad_weight is not None:
            # A pipeline's split backward pass comes twice, for inputs and for weights, and keeps the graph in between.
            again = torch._C._autograd._get_current_graph_task_keep_graph()
            grad_weight = grad_weight * grad_loss if again else grad_weight.mul_(grad_loss)
        return grad_hidden, grad_weight, None, None


def chunk_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    vocab: int,
) -> Tensor:
    """Loss of one chunk; its gradients are written to grad_hidden and added to grad_weight where they are wanted.

    Rows of the weight after the first `vocab` are no tokens. A function of its own, so that a chunk's logits are gone
    before the next chunk's are made.
    """
    counted = (target != IGNORE).unsqueeze(1)  # (rows, 1)
    index = target.clamp(min=0).unsqueeze(1)
    log_p = log_probabilities(hidden, weight, vocab)
    loss = -(log_p.gather(1, index) * counted).sum()
    if grad_hidden is None and grad_weight is None:
        return loss
    p = log_p.exp_()
    p.scatter_add_(1, index, p.new_full(index.shape, -1.0))
    # Rows that do not count become zero, and the gradient takes the precision of the products, in one pass.
    grad = torch.mul(p, counted, out=p if p.dtype == hidden.dtype else torch.empty_like(p, dtype=hidden.dtype))
    if grad_hidden is not None:
        torch.mm(grad, weight, out=grad_hidden)
    if grad_weight is not None:
        accumulate_outer(grad_weight, grad, hidden)
    return loss


def log_probabilities(hidden: Tensor, weight: Tensor, vocab: int) -> Tensor:
    """log softmax(hidden · weightᵀ), −∞ after the first `vocab`: (rows, rows of the weight) in fp32."""
    logits = hidden @ weight.t()
    logits[:, vocab:] = float("-inf")
    return F.log_softmax(logits, dim=-1, dtype=torch.float32)


def accumulate_outer(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """total += gradᵀ · hidden, in total's precision."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.t(), hidden)
    else:
        total += grad.t() @ hidden
