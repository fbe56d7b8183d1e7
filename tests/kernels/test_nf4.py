"""NF4 against the paper's formulas, a search over all levels, and bitsandbytes (`make test-trl`)."""

from __future__ import annotations

from statistics import NormalDist

import pytest
import torch

from lmworks.kernels import nf4


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_levels_are_the_quantiles_of_the_paper() -> None:
    """Equation 4 and appendix E: 8 quantiles of the negative half, 9 of the positive, one zero, scaled to [−1, 1]."""
    offset, quantile = 0.9677083, NormalDist().inv_cdf
    positive = [quantile(offset + (0.5 - offset) * i / 8) for i in range(8)]
    negative = [-quantile(offset + (0.5 - offset) * i / 7) for i in range(7)]
    expected = sorted([*positive, *negative, 0.0])
    largest = max(expected)
    assert [level / largest for level in expected] == pytest.approx(nf4.LEVELS, abs=2e-6)


def test_every_number_takes_the_nearest_level() -> None:
    weights = draw(2, 640)
    weights[1, 64:128] = 0  # a block of zeros has no scale
    stored = nf4.quantize(weights)
    back = nf4.dequantize(stored, 640)
    largest = weights.view(2, -1, 64).abs().amax(-1, keepdim=True)
    choices = torch.tensor(nf4.LEVELS) * largest.unsqueeze(-1)
    best = (weights.view(2, -1, 64, 1) - choices).abs().argmin(-1)
    codes = torch.stack((stored.codes >> 4, stored.codes & 15), dim=-1).view(2, -1, 64)
    assert torch.equal(codes[largest.squeeze(-1) > 0].long(), best[largest.squeeze(-1) > 0])
    scale = back.view(2, -1, 64).abs().amax(-1)  # magnitudes come back from 8 bits
    torch.testing.assert_close(scale[0], largest[0, :, 0], rtol=0.02, atol=0)
    assert torch.equal(back[1, 64:128].abs() < 1e-3, torch.ones(64, dtype=torch.bool))


def test_pieces_are_quantized_on_their_own() -> None:
    weights = draw(4, 1000)  # a last block of 40
    whole = nf4.dequantize(nf4.quantize(weights), 1000)
    for row in range(4):
        assert torch.equal(whole[row], nf4.dequantize(nf4.quantize(weights[row : row + 1]), 1000)[0])
    error = (whole - weights).norm() / weights.norm()
    assert 0.05 < error < 0.1  # of NF4 on normal weights


@pytest.mark.trl
@pytest.mark.parametrize("shape", [(96, 64), (128, 130 * 64)])
def test_bitsandbytes(shape: tuple[int, int]) -> None:
    """Codes are equal. A few scales are one level apart: its search on a CPU does not always find the nearest."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weights = draw(*shape)
    codes, state = quantize_4bit(weights, blocksize=64, compress_statistics=True, quant_type="nf4")
    mine = nf4.quantize(weights.view(1, -1))
    assert torch.equal(codes.flatten(), mine.codes[0])
    torch.testing.assert_close(state.state2.code, nf4.dynamic_levels(), rtol=0, atol=0)
    torch.testing.assert_close(state.state2.absmax, mine.group_scales[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(state.offset, mine.offset[0, 0], rtol=1e-6, atol=0)
    differ = (state.absmax != mine.scales[0]).float().mean()
    assert float(differ) < 0.005
    same = (state.absmax == mine.scales[0]).repeat_interleave(64)
    back = nf4.dequantize(mine, weights.numel())[0]
    torch.testing.assert_close(dequantize_4bit(codes, state).flatten()[same], back[same], rtol=1e-6, atol=0)
