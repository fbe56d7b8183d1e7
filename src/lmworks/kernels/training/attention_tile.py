"""Attention of some queries over some of their keys, and how such tiles are merged.

A tile gives its output and the log-sum-exp of its scores. Two tiles of the same queries over different keys merge
exactly (the online softmax of Milakov & Gimelshein 2018, as in FlashAttention):

    lse = log(e^lse₁ + e^lse₂),   out = out₁·e^(lse₁ − lse) + out₂·e^(lse₂ − lse)

In the backward pass a tile needs only the *final* out and lse of its queries: P = exp(S − lse) are its columns of the
whole softmax, and with D = rowsum(dO ∘ O)

    dV = Pᵀ·dO,   dS = P ∘ (dO·Vᵀ − D),   dQ = scale·dS·K,   dK = scale·dSᵀ·Q

so tiles can be computed in any order, on any rank, and their gradients summed.

All tensors here are (batch, heads, seq, head_dim), k and v with kv_heads; lse is (batch, heads, seq) in fp32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..scores import soft_cap

aten = torch.ops.aten

# Added to a masked score. Finite, so that a row without visible keys in a tile has weight e^(−1e30) = 0 and not 0/0;
# below any sum with a score. fp16 ends at −65504.
MASKED_SCORE = -1e30


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge a tile into the fp32 accumulators `out` and `lse`, in place; they start as 0 and −∞."""
    both = torch.logaddexp(lse, more_lse)
    out.mul_((lse - both).exp().unsqueeze(-1)).add_(more * (more_lse - both).exp().unsqueeze(-1))
    lse.copy_(both)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Merge attention sinks (heads), keys whose value is 0, into the accumulators after the last tile.

    The backward pass of tiles needs nothing else: P and D come from the final out and lse.
    """
    both = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
    out.mul_((lse - both).exp().unsqueeze(-1))
    lse.copy_(both)


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of the sinks (heads), from the final out and lse: −Σ e^(sink − lse) · D."""
    share = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp()
    return -(share * (upcast(grad) * upcast(out)).sum(dim=-1)).sum(dim=(0, 2)).to(sinks.dtype)


# A custom op: selective activation checkpointing would otherwise save the result of every tile.
@torch.library.custom_op(
    "lmworks::attention_tile",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor? bias, bool causal, bool fused, float softcap=0.0) -> (Tensor, Tensor)"
    ),
)
def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, fused: bool, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(out, lse). `bias` is fp32, (1 or batch, 1 or heads, queries, keys); `causal`: the tile lies on the diagonal.

    Soft-capped scores (before bias and mask) are computed by the plain formulas.
    """
    kernel = choose_kernel(q, k, bias) if fused and not softcap else "plain"
    if kernel == "plain":
        return plain_forward(q, k, v, bias, causal, softcap)
    k, v = repeat_kv(k, q), repeat_kv(v, q)
    if kernel == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias)
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    expanded = expand_bias(bias, q, k)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, expanded, True, 0.0, causal)
    return out, lse


@forward.register_fake
def forward_fake(
    q: Tensor, k: Tensor, _v: Tensor, bias: Tensor | None, _causal: bool, fused: bool, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of `forward`."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    is_plain = not fused or softcap > 0 or choose_kernel(q, k, bias) == "plain"
    return q.new_empty(q.shape, dtype=wide if is_plain else q.dtype), q.new_empty(q.shape[:3], dtype=wide)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,  # final output of these queries, over all their keys
    lse: Tensor,  # its log-sum-exp
    bias: Tensor | None,
    causal: bool,
    fused: bool,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tile's contributions to the gradients of q, k and v."""
    kernel = choose_kernel(q, k, bias) if fused and not softcap else "plain"
    if kernel == "plain":
        return plain_backward(grad, q, k, v, out, lse, bias, causal, softcap)
    groups = q.shape[1] // k.shape[1]
    k, v = repeat_kv(k, q), repeat_kv(v, q)
    lse = lse.contiguous()
    if kernel == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias
        )
    else:
        unused = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout's random state
        if kernel == "flash":
            dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused
            )
        else:
            expanded = expand_bias(bias, q, k)
            wanted = [True, True, True, False]
            dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
                grad, q, k, v, expanded, out, lse, unused, unused, 0.0, wanted, causal
            )
    if groups > 1:  # in fp32: not rounded for every head of the group
        dk, dv = (x.unflatten(1, (-1, groups)).float().sum(dim=2) for x in (dk, dv))
    return dq, dk, dv


def choose_kernel(q: Tensor, k: Tensor, bias: Tensor | None) -> str:
    """PyTorch's fused kernel that supports this tile, or `plain`."""
    if q.device.type == "cpu":
        return "cpu" if q.dtype in (torch.float32, torch.bfloat16, torch.float16) else "plain"
    if q.device.type != "cuda" or q.shape[-1] % 8 or q.shape[-1] > 256:
        return "plain"
    half = q.dtype in (torch.bfloat16, torch.float16)
    if half and bias is None:
        return "flash"
    # It pads the log-sum-exp to 32 queries, and needs a bias that is aligned to 16 keys.
    fits = not (q.shape[2] % 32 or k.shape[2] % 16) and (half or q.dtype == torch.float32)
    return "efficient" if fits else "plain"


def repeat_kv(x: Tensor, q: Tensor) -> Tensor:
    """One key/value head for every query head."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def expand_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """For the memory-efficient kernel: in q's dtype, expanded to the full shape without a copy."""
    if bias is None:
        return None
    least = torch.finfo(q.dtype).min / 2
    return bias.clamp(min=least).to(q.dtype).expand(*q.shape[:3], k.shape[2])


def plain_scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, softcap: float) -> tuple[Tensor, Tensor]:
    """Scores (batch, kv_heads, groups, queries, keys) in fp32, with soft cap, bias and mask; and the raw ones."""
    raw = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = soft_cap(raw, softcap)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, MASKED_SCORE)
    if bias is not None:
        per_head = bias.shape[1] > 1
        scores = scores + (bias.unflatten(1, scores.shape[1:3]) if per_head else bias.unsqueeze(1))
    return scores, raw


def group_heads(q: Tensor, k: Tensor) -> Tensor:
    """Query heads by the key/value head they share: (batch, kv_heads, groups, …) in fp32 (fp64 stays)."""
    return upcast(q.unflatten(1, (k.shape[1], -1)))


def upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def plain_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, softcap: float
) -> tuple[Tensor, Tensor]:
    scores, _ = plain_scores(group_heads(q, k), upcast(k).unsqueeze(2), bias, causal, softcap)
    lse = scores.logsumexp(dim=-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ upcast(v).unsqueeze(2)
    return out.flatten(1, 2), lse.flatten(1, 2)


def plain_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    scale = 1 / math.sqrt(q.shape[-1])
    q, grad, out, lse = group_heads(q, k), group_heads(grad, k), group_heads(out, k), group_heads(lse, k)
    k, v = upcast(k).unsqueeze(2), upcast(v).unsqueeze(2)
    scores, raw = plain_scores(q, k, bias, causal, softcap)
    p = (scores - lse.unsqueeze(-1)).exp()
    ds = p * (grad @ v.transpose(-1, -2) - (grad * out).sum(dim=-1, keepdim=True)) * scale
    if softcap:
        ds = ds * (1 - torch.tanh(raw / softcap).square())
    dq = ds @ k
    dk = (ds.transpose(-1, -2) @ q).sum(dim=2)
    dv = (p.transpose(-1, -2) @ grad).sum(dim=2)
    return dq.flatten(1, 2), dk, dv
