"""Flash attention: exact attention that never writes scores to memory (Dao et al. 2022).

    outᵢ = Σⱼ softmaxⱼ(qᵢ·kⱼ/√d) · vⱼ   over keys j ≤ i of the same document, with a sliding window

Computed naively, seq² scores a head go to memory and back several times, and attention is memory-bound. Here a tile of
scores is computed, used and dropped on the chip (`flash_forward_triton`, with an online softmax), and computed again in
the backward pass (`flash_backward_triton`). Saved in between are q, k, v, the result, and the log-sum-exp of each row.

Packed documents are separated by where each begins and ends. A query then sees one range of keys and a key is seen by
one range of queries, windows included, so that tiles of other documents are skipped.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...spec import SpecError
from ..dispatch import pick

IMPLEMENTATIONS = ("torch", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256  # head_dim
MOST_HEADS = 2**16 - 1  # of a batch: limit of the second grid dimension
ALIGNED = 8  # head_dim is padded to a multiple: TMA needs rows of whole 16 bytes


@dataclass(frozen=True)
class DocumentBounds:
    """Start and end of the document of each position: both (batch, seq) int32."""

    starts: Tensor
    ends: Tensor

    @classmethod
    def of(cls, documents: Tensor) -> DocumentBounds:
        """From a non-decreasing document index of each position, (batch, seq)."""
        seq = documents.shape[1]
        index = torch.arange(seq, device=documents.device)
        changes = documents[:, 1:] != documents[:, :-1]
        begins, ends = F.pad(changes, (1, 0), value=True), F.pad(changes, (0, 1), value=True)
        starts = torch.where(begins, index, 0).cummax(dim=1).values
        ends = torch.where(ends, index + 1, seq).flip(1).cummin(dim=1).values.flip(1)
        return cls(starts.to(torch.int32), ends.to(torch.int32))


def flash_attention(
    q: Tensor,  # (batch, seq, heads, head_dim)
    k: Tensor,  # (batch, seq, kv_heads, head_dim)
    v: Tensor,
    *,
    window: int = 0,  # keys that a query sees, itself included; 0: all before it
    documents: Tensor | DocumentBounds | None = None,  # (batch, seq) document indices, or bounds that layers share
    implementation: str | None = None,
) -> Tensor:
    """As `reference`, in the shape and precision of q; under autocast in its precision, as PyTorch's attention."""
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    check_inputs(q, k, v, documents)
    if isinstance(documents, Tensor):
        documents = DocumentBounds.of(documents)
    op = "sparse_attention" if window or documents is not None else "flash_attention"
    chosen = pick(op, implementation, IMPLEMENTATIONS, q.device, seq=q.shape[1], head_dim=q.shape[3])
    if chosen == "torch":
        return sdpa(q, k, v, window, documents)
    if q.shape[0] * q.shape[2] > MOST_HEADS:
        raise SpecError(
            f"flash attention takes at most {MOST_HEADS:,} heads of all sequences together; {q.shape[0]:,} × "
            f"{q.shape[2]} are more: lower data.micro_batch, or use model.attention = 'sdpa'"
        )
    if not supports_device(q.device):
        raise SpecError(
            f"flash attention's kernels run on a GPU, and these tensors are on {q.device.type}; "
            "use model.attention = 'sdpa'"
        )
    head_dim = q.shape[3]
    if head_dim % ALIGNED:  # padding with zeros changes no score
        q, k, v = (F.pad(x, (0, -head_dim % ALIGNED)) for x in (q, k, v))
    starts, ends = (None, None) if documents is None else (documents.starts, documents.ends)
    out, _ = forward(q, k, v, starts, ends, window, 1 / math.sqrt(head_dim))
    return out[..., :head_dim]


def supports_device(device: torch.device) -> bool:
    """Whether the kernels run: on a GPU, or on a CPU in Triton's interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def check_inputs(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | DocumentBounds | None) -> None:
    batch, seq, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    if k.shape != v.shape or k.shape != (batch, seq, kv_heads, head_dim) or heads % kv_heads:
        raise SpecError(
            f"flash attention takes q (batch, seq, heads, head_dim) and k, v of as many positions with a divisor of "
            f"its heads; got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if {q.dtype, k.dtype, v.dtype} - {q.dtype} or q.dtype not in DTYPES:
        raise SpecError(f"flash attention takes one of fp32, bf16 and fp16; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise SpecError(f"flash attention takes heads of at most {MAX_HEAD_DIM}; head_dim is {head_dim}")
    indices = documents.starts if isinstance(documents, DocumentBounds) else documents
    if indices is not None and indices.shape != (batch, seq):
        raise SpecError(f"documents must be (batch, seq) = {(batch, seq)}; they are {tuple(indices.shape)}")


def attention_mask(seq: int, window: int, bounds: DocumentBounds | None, device: torch.device) -> Tensor:
    """(seq, seq), or (batch, 1, seq, seq) with documents; true: visible."""
    index = torch.arange(seq, device=device)
    query, key = index.unsqueeze(1), index
    allowed = key <= query
    if window:
        allowed &= key > query - window
    if bounds is not None:
        allowed = (allowed & (key >= bounds.starts.unsqueeze(2))).unsqueeze(1)
    return allowed


def reference(q: Tensor, k: Tensor, v: Tensor, window: int = 0, documents: Tensor | None = None) -> Tensor:
    """The formula, with all scores in memory."""
    bounds = None if documents is None else DocumentBounds.of(documents)
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)))
    scores = (q @ k.transpose(2, 3)).float() / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~attention_mask(q.shape[2], window, bounds, q.device), -math.inf)
    return (scores.softmax(dim=-1).type_as(v) @ v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, window: int, bounds: DocumentBounds | None) -> Tensor:
    """PyTorch's attention: fast if plainly causal, else with a mask."""
    plain = not window and bounds is None
    mask = None if plain else attention_mask(q.shape[1], window, bounds, q.device)
    gqa = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=plain, enable_gqa=gqa).transpose(1, 2)


# Custom ops: opaque to torch.compile, and selective activation checkpointing can save their results.
@torch.library.custom_op(
    "lmworks::flash_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? starts, Tensor? ends, int window, float scale) -> (Tensor, Tensor)",
)
def forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, _ends: Tensor | None, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp). `ends` is for the backward pass."""
    from .flash_forward_triton import launch

    return launch(q, k, v, starts, window, scale)


@forward.register_fake
def forward_fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, seq, heads, _head_dim = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, seq), dtype=torch.float32)


@torch.library.custom_op(
    "lmworks::flash_attention_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? starts, Tensor? ends, int window, "
        "float scale) -> (Tensor, Tensor, Tensor)"
    ),
)
def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    from .flash_backward_triton import launch

    return launch(grad, q, k, v, out, lse, starts, ends, window, scale)


@backward.register_fake
def backward_fake(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts, ends, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, starts, ends)
    ctx.set_materialize_grads(False)  # the log-sum-exp has no gradient


def autograd_backward(ctx: Any, grad: Tensor, _grad_lse: None) -> tuple[Tensor | None, ...]:
    dq, dk, dv = backward(grad, *ctx.saved_tensors, ctx.window, ctx.scale)
    return dq, dk, dv, None, None, None, None


forward.register_autograd(autograd_backward, setup_context=setup_context)
OPERATION = torch.ops.lmworks.flash_attention.default
