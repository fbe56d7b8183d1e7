"""Further exercises, `src/precision/`: gradients that overflow, and every way that a number may be rounded."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..checking.expect import Mismatch, expect_at_most, expect_close, expect_equal


def scaled_step(scaler: Any, gradient: float) -> tuple[bool, float]:
    """One step of SGD from 1 with a rate of 1: what `step` returned, and the weight after it."""
    one, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    frozen = torch.nn.Parameter(torch.ones(2))  # has no gradient
    one.grad = torch.full((2,), gradient if math.isfinite(gradient) else 0.5) * scaler.scale
    other.grad = torch.tensor([1.0, gradient]) * scaler.scale
    said = scaler.step(torch.optim.SGD([one, other, frozen], lr=1.0), [one, other, frozen])
    if not isinstance(said, bool):
        raise Mismatch("what is returned", "True or False", said)
    expect_equal("a parameter without a gradient", frozen.tolist(), [1.0, 1.0])
    return said, one.tolist()[0]


def loss_scale(module: ModuleType) -> None:
    scaler = module.LossScaler(scale=8.0, window=2)
    inf, nan = float("inf"), float("nan")
    for number, (gradient, updated, weight, scale, remark) in enumerate((
        (0.25, True, 0.75, 8.0, "the gradient is divided by the scale before the update"),
        (0.5, True, 0.5, 16.0, "after two good steps the scale is doubled"),
        (inf, False, 1.0, 8.0, "overflow: no update, half of the scale"),
        (nan, False, 1.0, 4.0, "NaN is an overflow, too"),
        (-inf, False, 1.0, 2.0, "and so is −∞"),
        (0.25, True, 0.75, 2.0, "one good step after an overflow"),
        (inf, False, 1.0, 1.0, "overflow"),
        (0.25, True, 0.75, 1.0, "the overflow has begun the count anew: one good step"),
        (0.25, True, 0.75, 2.0, "two good steps in a row"),
        (0.25, True, 0.75, 2.0, "the count begins anew when the scale has changed"),
        (0.25, True, 0.75, 4.0, "two more good steps"),
    )):  # fmt: skip
        case = f"window 2, step {number}, gradient {gradient:g} · scale"
        expect_equal(f"{case}: updated, the weight", scaled_step(scaler, gradient), (updated, weight), remark=remark)
        expect_equal(f"{case}: scale after it", float(scaler.scale), scale, remark=remark)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fp8(module: ModuleType) -> None:
    for case, listed, values, scale, remark in (
        ("[448, 1]", [448.0, 1.0], [448.0, 1.0], 1.0, "the largest of the format: 448"),
        ("[2, −4]", [2.0, -4.0], [224.0, -448.0], 4 / 448, "the largest absolute value becomes 448"),
        ("[1e-6, 5e-7]", [1e-6, 5e-7], [448.0, 224.0], 1e-6 / 448, "small tensors fill the range, too"),
        ("[448, 17]", [448.0, 17.0], [448.0, 16.0], 1.0, "three bits of mantissa: 16, 18, 20"),
        ("[0, 0]", [0.0, 0.0], [0.0, 0.0], None, "zeros: the scale must not be 0"),
    ):
        given = torch.tensor(listed)
        found = module.quantize_fp8(given)
        if not isinstance(found, tuple) or len(found) != 2:
            raise Mismatch("what is returned", "a tuple (values, scale)", found)
        got, by = found
        expect_equal(f"{case}: dtype", str(getattr(got, "dtype", None)), "torch.float8_e4m3fn")
        expect_close(f"{case}: values", got.float(), torch.tensor(values), remark=remark, x=given)
        if scale is not None:
            expect_close(f"{case}: scale", by, torch.tensor(scale), remark=remark)
    for seed in range(40):
        x = numbers(64, seed=seed) * 10.0 ** (seed % 9 - 4)
        got, by = module.quantize_fp8(x)
        worst = ((got.float() * by - x).abs() / (x.abs() + x.abs().max() / 448 / 64)).max().item()
        remark = "relative, with three bits of mantissa 1/16 at most; NaN where a rounded scale leaves 448.0001"
        expect_equal(
            f"64 numbers, seed {seed}: all are finite", bool(got.float().isfinite().all()), True, remark=remark
        )
        expect_at_most(f"64 numbers, seed {seed}: error", worst, 0.0626, remark=remark)
    got, by = module.quantize_fp8(numbers(8).bfloat16())
    expect_equal("x in bf16: dtype of the scale", str(by.dtype), "torch.float32")


def stochastic_rounding(module: ModuleType) -> None:
    step = 2.0**-7  # of bf16 between 1 and 2
    for x, random, expected, remark in (
        (1.0, 0, 1.0, "representable: stays"),
        (1.0, 65535, 1.0, "representable: stays whatever is drawn"),
        (1.0 + step / 2, 0, 1.0, "half-way, the smallest draw: down"),
        (1.0 + step / 2, 65535, 1.0 + step, "half-way, the largest draw: up"),
        (1.0 + step / 2, 32767, 1.0, "half-way: down with a draw below 32,768"),
        (1.0 + step / 2, 32768, 1.0 + step, "half-way: up with a draw of 32,768"),
        (1.0 + step / 4, 40000, 1.0, "a quarter: up with every fourth draw"),
        (1.0 + step / 4, 49152, 1.0 + step, "a quarter: up from 49,152 on"),
        (-1.0 - step / 2, 65535, -1.0 - step, "away from zero, as positive numbers"),
        (-1.0 - step / 2, 0, -1.0, ""),
        (2.0 - step / 2, 65535, 2.0, "into the next binary exponent"),
        (float("inf"), 65535, float("inf"), "infinity stays"),
    ):
        given = torch.tensor([x])
        got = module.stochastic_round(given, torch.tensor([random], dtype=torch.int32))
        wanted = torch.tensor([expected]).bfloat16()
        expect_close(f"{x:.6g} with the draw {random:,}", got, wanted, rtol=0, atol=0, remark=remark)
    patterns = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32)
    for random in (0, 65535):
        got = module.stochastic_round(patterns.view(torch.float32), torch.full((3,), random, dtype=torch.int32))
        remark = "with few bits set, or all of them"
        expect_equal(f"three NaNs stay, with the draw {random:,}", got.isnan().tolist(), [True] * 3, remark=remark)
    everything = torch.arange(65536, dtype=torch.int32)
    for x in (0.1, -3.3, 1e-20, 12345.678):
        given = torch.full((65536,), x)
        got = module.stochastic_round(given, everything)
        remark = "the mean over all draws is the number itself"
        mean = got.double().mean().float()
        expect_close(f"{x:g}, over all 65,536 draws", mean, given[0], rtol=1e-5, atol=0, remark=remark)
        expect_equal(f"{x:g}: roundings that occur", len(got.unique()), 2, remark="its two neighbours, no others")


CHECKS = {"loss_scale": loss_scale, "fp8": fp8, "stochastic_rounding": stochastic_rounding}
