"""Flash attention, the forward pass: the scores of a tile are used where they are computed, and never stored.

    python src/kernels/attention.py

compares it with PyTorch's.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.device import DEVICE, compare, tl, triton


# exercise triton_attention() -> attention_kernel
@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, seq, scale, DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr
):
    first = tl.program_id(0) * BLOCK_Q
    head = tl.program_id(1).to(tl.int64) * seq * DIM
    query = first + tl.arange(0, BLOCK_Q)[:, None]
    column = tl.arange(0, DIM)[None, :]
    q = tl.load(q_ptr + head + query * DIM + column, mask=query < seq, other=0.0)
    largest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    out = tl.zeros((BLOCK_Q, DIM), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_Q, seq), BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        at = head + key[:, None] * DIM + column
        k = tl.load(k_ptr + at, mask=key[:, None] < seq, other=0.0)
        v = tl.load(v_ptr + at, mask=key[:, None] < seq, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(key[None, :] <= query, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new_largest[:, None])
        rescale = tl.exp(largest - new_largest)
        total = total * rescale + tl.sum(weights, 1)
        out = out * rescale[:, None] + tl.dot(weights.to(v.dtype), v)
        largest = new_largest
    tl.store(out_ptr + head + query * DIM + column, out / total[:, None], mask=query < seq)


# end triton_attention


def attention(q: Tensor, k: Tensor, v: Tensor, block_q: int = 32, block_k: int = 32) -> Tensor:
    """Causal attention of q, k and v (heads, seq, dim), contiguous; dim is a power of two. A program has `block_q`
    queries of a head."""
    heads, seq, dim = q.shape
    out = torch.empty_like(q)
    grid = triton.cdiv(seq, block_q), heads
    attention_kernel[grid](q, k, v, out, seq, 1 / math.sqrt(dim), DIM=dim, BLOCK_Q=block_q, BLOCK_K=block_k)
    return out


def pytorch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With a batch of one: PyTorch's fused kernels want four dimensions."""
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


def main() -> None:
    for heads, seq in ((2, 50), (2, 200)) if DEVICE == "cpu" else ((2, 50), (32, 4099)):
        q, k, v = torch.randn(3, heads, seq, 64, dtype=torch.float16, device=DEVICE)
        compare(f"{heads} heads, {seq} positions in fp16", attention, pytorch, q, k, v)


if __name__ == "__main__":
    main()
