"""AdamW over 16 bits: the split is exact, rounding right on average, and the kernel the reference to the last bit.

The kernel runs on a GPU, or on a CPU through Triton's interpreter (`test_interpreted` starts these with it).
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lmworks.kernels.training import adamw
from lmworks.kernels.training.adamw import AdamWConfig, ParamState
from lmworks.spec import SpecError
from variations import with_slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
runs_kernels = pytest.mark.skipif(
    not (DEVICE == "cuda" or INTERPRETED), reason="needs a GPU, or triton and TRITON_INTERPRET=1"
)
BF16, FP32 = torch.bfloat16, torch.float32
RULE = AdamWConfig(lr=0.01, weight_decay=0.1)


def from_bits(*bits: int) -> Tensor:
    return torch.tensor([b - (b >> 31 << 32) for b in bits], dtype=torch.int32).view(FP32)


# --- formats ---


def test_split_and_join_round_trip() -> None:
    """All 65,536 low halves, under high halves of every kind: odd and even, negative, denormal, the largest."""
    highs = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x8000, 0x8001, 0xBF80, 0xBF81, 0xFF7F]
    lows = torch.arange(2**16, dtype=torch.int64)
    for high in highs:
        wide = ((high << 16) + lows).to(torch.int32).view(FP32)  # wraps as bits do
        weight, low = adamw.split(wide)
        assert torch.equal(adamw.join_master(weight, low).view(torch.int32), wide.view(torch.int32)), hex(high)
        # The nearest bf16, as PyTorch rounds, but for ties: those go away from zero.
        nearest, tie = wide.to(BF16), lows == 0x8000
        assert torch.equal(weight[~tie].view(torch.int16), nearest[~tie].view(torch.int16)), hex(high)
        assert weight[tie].float().abs() > wide[tie].abs()


def test_infinities_and_nans_survive_split() -> None:
    ends = from_bits(0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000)
    weight, low = adamw.split(ends)
    for back in (weight.float(), adamw.join_master(weight, low)):
        assert torch.equal(back[:2], ends[:2]) and back[2:].isnan().all()
    largest = from_bits(0x7F7FFFFF)  # its nearest bf16 is infinite, and the pair still knows better
    weight, low = adamw.split(largest)
    assert weight.isinf() and torch.equal(adamw.join_master(weight, low), largest)


def test_stochastic_rounding_is_unbiased() -> None:
    wide = torch.full((40_000,), 1.0 + 2.0**-9)  # a quarter of the way from 1 to the next bf16
    slot = ParamState(torch.empty(40_000, dtype=BF16), torch.empty(0), torch.tensor(3.0), seed=5)
    rounded = adamw.round_to(wide, BF16, adamw.random_bits(slot)).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert abs((rounded > 1).float().mean() - 0.25) < 0.01
    exact = torch.tensor([0.5, -3.0, 0.0, float("inf"), float("-inf")])
    assert torch.equal(adamw.round_to(exact, BF16, torch.full((5,), -1, dtype=torch.int32)).float(), exact)
    assert adamw.round_to(from_bits(0x7FFFFFFF), BF16, torch.tensor([1], dtype=torch.int32)).isnan()


# --- the update ---


def slot_of(
    size: int, weights: torch.dtype, states: torch.dtype | None, master: bool, grads: torch.dtype
) -> ParamState:
    draw = torch.Generator().manual_seed(size)
    wide, grad = torch.randn(size, generator=draw), torch.randn(size, generator=draw)
    weight, low = adamw.split(wide) if master else (wide.to(weights), None)
    mean = square = None
    if states is not None:
        mean, square = (torch.randn(size, generator=draw) / 10).to(states), torch.rand(size, generator=draw).to(states)
    step = torch.tensor(7.0)
    made = [weight, grad.to(grads), step, mean, square, low]
    weight, grad, step, mean, square, low = (t if t is None else t.to(DEVICE) for t in made)  # type: ignore[assignment]
    return ParamState(weight, grad, step, 2**62 + size, mean, square, low)


def copied(slot: ParamState) -> ParamState:
    return replace(slot, **{name: value.clone() for name, value in vars(slot).items() if isinstance(value, Tensor)})


def equal(a: ParamState, b: ParamState) -> bool:
    pairs = [(getattr(a, name), getattr(b, name)) for name in ("weight", "exp_avg", "exp_avg_sq", "low")]
    return all(torch.equal(x, y) for x, y in pairs if x is not None)


CASES = {
    "master": (BF16, FP32, True, BF16, False),
    "master-bf16-states": (BF16, BF16, True, BF16, False),
    "stochastic": (BF16, BF16, False, BF16, True),
    "nearest": (BF16, FP32, False, BF16, False),
    "fp32-weights": (FP32, BF16, False, FP32, False),
    "master-fp32-grads": (BF16, FP32, True, FP32, False),
    "sgd": (BF16, None, True, BF16, False),
    "nothing to draw: a master": (BF16, FP32, True, BF16, True),
    "nothing to draw: fp32 weights": (FP32, BF16, False, FP32, True),
}
OTHERS = ("master-bf16-states", "nearest", "master-fp32-grads", "nothing to draw: a master")


@runs_kernels
@pytest.mark.parametrize("case", with_slow(CASES, OTHERS))
def test_kernel_equals_reference(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three small tensors in one launch and one of its own, whose two programs take two and three tiles; none is a
    multiple of a tile; scaled gradients."""
    from lmworks.kernels.training import adamw_triton

    monkeypatch.setattr(adamw_triton, "SMALL", 2000)
    monkeypatch.setattr(adamw_triton, "PROGRAMS", 1)
    monkeypatch.setattr(adamw_triton, "multiprocessors", lambda _: 1)
    monkeypatch.setattr(adamw, "REFERENCE_CHUNK", 1000)
    weights, states, master, grads, stochastic = CASES[case]
    rule = replace(RULE, stochastic=stochastic)
    slots = [slot_of(size, weights, states, master, grads) for size in (5, 1030, 2049, 1)]
    scale = torch.tensor(3.0, device=DEVICE)
    expected, found = [copied(slot) for slot in slots], [copied(slot) for slot in slots]
    adamw.adamw(expected, rule, grad_scale=scale, implementation="torch")
    adamw.adamw(found, rule, grad_scale=scale, implementation="triton")
    for before, a, b in zip(slots, expected, found, strict=True):
        assert not torch.equal(before.weight, a.weight) or before.weight.numel() < 10
        assert equal(a, b), f"{a.weight.numel()} elements"


@runs_kernels
def test_kernel_skips_update_on_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.kernels.training import adamw_triton

    monkeypatch.setattr(adamw_triton, "SMALL", 100)
    for size in (50, 150):
        slot = slot_of(size, BF16, BF16, True, BF16)
        for found_inf, same in ((1.0, True), (0.0, False)):
            after = copied(slot)
            adamw.adamw([after], RULE, found_inf=torch.tensor(found_inf, device=DEVICE), implementation="triton")
            assert equal(slot, after) == same


def test_unknown_implementation_is_rejected() -> None:
    with pytest.raises(SpecError, match=r"adamw has no implementation 'tritn'; did you mean 'triton'\?"):
        adamw.adamw([slot_of(5, BF16, BF16, True, BF16)], RULE, implementation="tritn")


def test_reference_skips_update_on_overflow() -> None:
    slot = slot_of(50, BF16, BF16, True, BF16)
    for found_inf, same in ((1.0, True), (0.0, False)):
        after = copied(slot)
        adamw.adamw([after], RULE, found_inf=torch.tensor(found_inf, device=DEVICE), implementation="torch")
        assert equal(slot, after) == same
