"""Attention tile by tile: PyTorch's fused operations against the plain formulas, on every device that is here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmworks.kernels.training import attention_tile

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["causal", "whole", "biased"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_fused_tile_is_the_plain_one(device: str, kind: str, dtype: torch.dtype) -> None:
    """Two tiles of the same queries; in the biased one some queries see nothing."""
    draw = torch.Generator().manual_seed(4)
    q, k, v, more_k, more_v, grad = (
        torch.randn(2, heads, 32, 16, generator=draw).to(device, dtype) for heads in (4, 2, 2, 2, 2, 4)
    )
    bias = torch.randn(2, 4, 32, 32, generator=draw).to(device)
    bias[:, :, 3] = attention_tile.MASKED_SCORE
    bias = bias.masked_fill((bias > 0.5), attention_tile.MASKED_SCORE)
    second = bias if kind == "biased" else None

    def both(fused: bool) -> list[Tensor]:
        out, lse = attention_tile.forward(q, k, v, None, kind == "causal", fused)
        out, lse = out.float(), lse.clone()
        attention_tile.merge(out, lse, *attention_tile.forward(q, more_k, more_v, second, False, fused))
        back = attention_tile.backward(grad, q, more_k, more_v, out.to(dtype), lse, second, False, fused)
        assert second is None or not back[0][:, :, 3].any()  # a query that sees nothing gets nothing from this tile
        return [out, lse, *back]

    for ours, theirs in zip(both(fused=True), both(fused=False), strict=True):
        assert (ours - theirs).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * theirs.norm()
