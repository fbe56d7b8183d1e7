"""Linear layer and cross-entropy, chunked so that the logits are never materialised as a whole.

The logits of a batch are its largest tensor by far: tokens × vocab, several times over once softmax and its gradient
are saved. The loss is a sum over tokens, so each chunk of tokens can be finished at once: its logits, its loss, and,
with p = softmax(logits), the gradient of the logits, p − onehot(target), which overwrites the logits, is multiplied
into the gradients of hidden states and weight, and is dropped. The backward pass only scales those two.

On a GPU `cross_entropy_triton` turns logits into their gradient in one kernel: 2 bytes a logit, read twice and written
once. In plain torch the same is five passes over fp32, and up to 10 bytes a logit.

Tensor cores need rows of 16 bytes: with GPT-2's 50,257 tokens the three products run at a third of their rate. Such a
vocabulary is padded with tokens of probability zero while the loss is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...spec import LMWorksError
from ...spec.precision import FP8_ALIGNED
from ..dispatch import pick
from ..scores import soft_cap
from . import float8

IGNORE = -100  # a target that is not counted, as in torch's cross_entropy
# Elements of a chunk of logits: small beside a batch, large enough for products at full rate.
CHUNK_LOGITS = 2**21  # on a CPU: 8 MiB in fp32
CHUNK_LOGITS_GPU = 2**27  # 512 MiB in fp32: at least a thousand tokens of a vocabulary of 128k
# Bytes of a chunk that is overwritten by its gradient. Every chunk accumulates into the head's gradient, of a 2-byte
# weight 4 bytes read and written: with hidden = 4096 and a vocabulary of 128k 0.5 ms at 4.3 TB/s beside 9 ms of
# products for the 2,048 tokens of 0.5 GiB. On an H200 34.8 ms with hidden = 2048, where 1 GiB and sums in fp32 took
# 36.1; other sizes were not timed with such sums (benchmarks/loss_tune.py).
CHUNK_BYTES_IN_PLACE = 2**29
MAX_16BIT_CHUNKS = 16  # chunks that are accumulated in 16 bits at most: see `sum_dtype`
TILE_ROWS = 256  # tokens of a large chunk are a multiple: matmul tiles have up to so many rows
ALIGNED, VOCAB_PADDING = 8, 64  # a vocabulary that is not a multiple of the first is padded to one of the second
CAP_PIECES = 8  # of a chunk, soft-capped one at a time
IMPLEMENTATIONS = ("torch", "triton")

Chunk = Callable[[Tensor, Tensor, bool, str], Tensor]
"""(logits, targets, with_grad, implementation) → loss of a chunk; `with_grad`: its gradient overwrites the logits."""


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float = 0.0) -> Tensor:
    """Sum over tokens of −log softmax(hidden · weightᵀ)[target], with soft-capped logits if `softcap`."""
    logits = soft_cap(F.linear(hidden, weight).float(), softcap)
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: Chunk | None = None,
    *,
    fp8: bool = False,
    softcap: float = 0.0,
    implementation: str | None = None,
) -> Tensor:
    """As `reference`: hidden (tokens, width), weight (vocab, width), targets (tokens) → a float32 scalar.

    `chunk` replaces `chunk_loss` where the vocabulary is sharded over ranks. `fp8`: logits are a product of e4m3
    operands. Their gradient keeps the dtype of `hidden`: its rows sum to zero, and range from the target's −1 to
    probabilities near 0, which 8 bits cannot represent.
    """
    device = hidden.device
    if torch.is_autocast_enabled(device.type):
        hidden = hidden.to(torch.get_autocast_dtype(device.type))
    if not torch.is_grad_enabled():  # an autograd.Function would compute gradients regardless
        hidden, weight = hidden.detach(), weight.detach()
    shape = {"tokens": hidden.shape[0], "vocab": weight.shape[0], "hidden": weight.shape[1]}
    chosen = pick("linear_cross_entropy", implementation, IMPLEMENTATIONS, device, **shape)
    return LinearCrossEntropy.apply(hidden, weight, targets, chunk, fp8, softcap, chosen)


def chunk_rows(tokens: int, vocab: int, device_type: str, itemsize: int, in_place: bool) -> int:
    """Tokens of a chunk. Large chunks are nearly equal: a short last one would not fill a GPU."""
    if not in_place:
        return max(1, (CHUNK_LOGITS if device_type == "cpu" else CHUNK_LOGITS_GPU) // vocab)
    chunks = -(-tokens // max(1, CHUNK_BYTES_IN_PLACE // itemsize // vocab))
    rows = max(1, -(-tokens // max(1, chunks)))
    return rows if rows < TILE_ROWS or chunks == 1 else -(-rows // TILE_ROWS) * TILE_ROWS


def sum_dtype(hidden: Tensor, weight: Tensor, chunks: int, in_place: bool) -> torch.dtype:
    """Dtype in which the head's gradient is accumulated: fp32, or, over few chunks, that of the weight.

    A 2-byte gradient is rounded in any case. A product adds to it in fp32 and rounds once, so n chunks round n times,
    partial sums that are still smaller: √((n + 1)/2) times the error of one rounding for independent chunks, 2.1 for 8
    and 2.9 for 16, and less for correlated ones. The error of 2-byte logits is as large as one rounding. Not in plain
    torch, whose chunks are many and small.
    """
    few = MAX_16BIT_CHUNKS if in_place and hidden.dtype == weight.dtype else 1
    return weight.dtype if chunks <= few else torch.promote_types(weight.dtype, torch.float32)


def padded_vocab(vocab: int, hidden: Tensor, fp8: bool = False) -> int:
    """Rows of the head's weight in the products."""
    aligned = vocab % (FP8_ALIGNED if fp8 else ALIGNED) == 0
    padding_unneeded = aligned or hidden.device.type == "cpu" or hidden.dtype == torch.float32
    return vocab if padding_unneeded else -(-vocab // VOCAB_PADDING) * VOCAB_PADDING


def cast_rows(weight: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """weight in another dtype, padded with zeros to so many rows."""
    if rows == weight.shape[0]:
        return weight.to(dtype)
    cast = weight.new_empty(rows, weight.shape[1], dtype=dtype)
    cast[: weight.shape[0]] = weight
    cast[weight.shape[0] :] = 0
    return cast


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: Chunk | None,
        fp8: bool,
        softcap: float,
        implementation: str,
    ) -> Tensor:
        want_hidden, want_weight, *_ = ctx.needs_input_grad
        tokens, (vocab, width) = hidden.shape[0], weight.shape
        seen = padded_vocab(vocab, hidden, fp8) if chunk is None else vocab
        chunk = chunk or partial(chunk_loss, vocab=vocab)
        rows = chunk_rows(tokens, seen, hidden.device.type, hidden.itemsize, implementation == "triton")
        cast_weight = cast_rows(weight, seen, hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        wide = sum_dtype(hidden, weight, -(-tokens // rows), implementation == "triton")
        fused = implementation == "triton" and weight.device.type == "cuda" and wide == torch.float32
        grad_weight = WeightGradient(weight.new_empty(seen, width, dtype=wide), fused) if want_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            head = float8.fp8_linear(cast_weight) if fp8 else partial(F.linear, weight=cast_weight)
            for start in range(0, tokens, rows):
                part = slice(start, start + rows)
                states, into = hidden[part], None if grad_hidden is None else grad_hidden[part]
                logits, with_grad = head(states), want_hidden or want_weight
                slope = soft_cap_in_place(logits, softcap, with_grad) if softcap else None
                loss += chunk(logits, targets[part], with_grad, implementation)
                if slope is not None:
                    logits.mul_(slope)
                    del slope
                if into is not None:
                    torch.mm(logits, cast_weight, out=into)
                if grad_weight is not None:
                    grad_weight.add(logits, states)
                del logits  # before the next chunk is allocated
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.rows(vocab))
        ctx.weight_dtype, ctx.implementation = weight.dtype, implementation
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: saved gradients are constants
            raise LMWorksError(
                "this loss can be differentiated once; for more use lmworks.kernels.training.cross_entropy.reference"
            )
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = scaled(grad_hidden, grad_loss, grad_hidden.dtype, ctx.implementation)
        if grad_weight is not None:
            grad_weight = scaled(grad_weight, grad_loss, ctx.weight_dtype, ctx.implementation)
        return grad_hidden, grad_weight, None, None, None, None, None


def soft_cap_in_place(logits: Tensor, cap: float, with_grad: bool) -> Tensor | None:
    """Soft-cap logits in place; `with_grad`: returns the derivative 1 − tanh², a factor of their gradient.

    Computed in fp32, some rows at a time: near the cap 2 bytes cannot tell tanh from 1.
    """
    slope = torch.empty_like(logits) if with_grad else None
    rows = max(1, -(-logits.shape[0] // CAP_PIECES))
    for start in range(0, logits.shape[0], rows):
        part = slice(start, start + rows)
        tanh = (logits[part].float() / cap).tanh_()
        torch.mul(tanh, cap, out=logits[part])
        if slope is not None:
            torch.add(tanh.square_().neg_(), 1, out=slope[part])
    return slope


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype, implementation: str) -> Tensor:
    """x · factor, in place unless the graph is kept: a pipeline's split backward pass runs twice, for inputs and for
    weights. PyTorch's kernel does not vectorise loads of 2-byte numbers where the factor is wider.
    """
    again = torch._C._autograd._get_current_graph_task_keep_graph()
    out = x if x.dtype == dtype and not again else torch.empty_like(x, dtype=dtype)
    if implementation == "torch":
        return torch.mul(x, factor, out=out)
    from .cross_entropy_triton import scale_into

    return scale_into(x, factor, out)


class WeightGradient:
    """Σ over chunks of gradᵀ · hidden, accumulated by the matmuls where possible.

    `fused`: matmuls of 2-byte operands accumulate into fp32.
    """

    def __init__(self, total: Tensor, fused: bool) -> None:
        self.total, self.fused = total, fused
        self.empty = True  # not initialised: the first product is written, not added

    def add(self, grad: Tensor, hidden: Tensor) -> None:
        total, beta = self.total, 0 if self.empty else 1
        if grad.dtype == total.dtype:
            torch.addmm(total, grad.t(), hidden, beta=beta, out=total)
        elif self.fused:
            torch.addmm(total, grad.t(), hidden, out_dtype=torch.float32, beta=beta, out=total)
        elif self.empty:
            total.copy_(grad.t() @ hidden)
        else:
            total += grad.t() @ hidden
        self.empty = False

    def rows(self, count: int) -> Tensor:
        """The first rows. Not a view: autograd adds a tied embedding's gradient in place."""
        if self.empty:  # no tokens
            self.total.zero_()
        return self.total.resize_(count, self.total.shape[1])


def chunk_loss(logits: Tensor, target: Tensor, with_grad: bool, implementation: str, vocab: int) -> Tensor:
    """Loss of a chunk; columns after the first `vocab` are padding."""
    if implementation == "triton":
        from .cross_entropy_triton import loss_in_place

        return loss_in_place(logits, target, with_grad, vocab)
    counted = (target != IGNORE).unsqueeze(1)  # (rows, 1)
    index = target.clamp(min=0).unsqueeze(1)
    logits[:, vocab:] = float("-inf")
    log_p = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    loss = -(log_p.gather(1, index) * counted).sum()
    if with_grad:
        p = log_p.exp_()
        p.scatter_add_(1, index, p.new_full(index.shape, -1.0))
        # Ignored rows become zero, and the gradient is cast, in one pass.
        torch.mul(p, counted, out=logits)
    return loss
