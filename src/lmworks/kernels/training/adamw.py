"""AdamW over weights and moments of 16 bits, without losing what 16 bits cannot hold.

bf16 keeps 8 binary digits. A weight of 1 moves by a step of 1e-3 or not at all, and most updates are smaller. Two ways
to keep them:

    split master    a bf16 weight and 16 more bits are one fp32 number, exactly: 4 bytes, where a bf16 copy beside an
                    fp32 master has 6. The weight is that number rounded to the nearest, ties away from zero:

                        weight = (bits + 0x8000) >> 16        low = bits − (weight << 16), from −32768 to 32767

                    (Ties to even would not do: 65,537 numbers round to an even weight, and 16 bits tell 65,536 apart.)
    stochastic      no more bits: an update is rounded up with the probability that makes it right on average. Sixteen
                    random bits are added below the last digit, and what is below it is cut off.

Moments of 16 bits are always rounded so. To the nearest, a second moment could not fall: v · 0.999 rounds back to v.

The random bits are a hash of (seed of the weight, step, element), as in `counter_rng.py`: a run that is resumed draws
those of the run that never stopped, and copies of a weight stay equal. Ranks that hold different rows of a weight draw
the same bits for them: each is still rounded up as often as it should be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import counter_rng
from ..dispatch import TORCH, pick

IMPLEMENTATIONS = ("torch", "triton")
HALF, LAST_16 = 0x8000, 0xFFFF
QUIET = 0x7FC0  # bf16's NaN
SPAN = 2**16  # elements that the reference takes at once: its dozen temporaries stay in a cache


@dataclass(frozen=True)
class Slot:
    """A weight and what its optimizer keeps, all of one shape and contiguous. Without moments the rule is plain SGD."""

    weight: Tensor  # fp32 or bf16
    grad: Tensor  # fp32 or bf16
    step: Tensor  # fp32 scalar: the updates of this weight, this one included
    seed: int  # of its random bits
    mean: Tensor | None = None  # of gradients, fp32 or bf16
    square: Tensor | None = None  # of their squares
    low: Tensor | None = None  # int16: what makes a bf16 weight an fp32 number


@dataclass(frozen=True)
class Rule:
    lr: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    stochastic: bool = False  # how a bf16 weight without `low` is rounded


def adamw(
    slots: Sequence[Slot],
    rule: Rule,
    *,
    grad_scale: Tensor | None = None,  # fp32 scalar that gradients are divided by
    found_inf: Tensor | None = None,  # fp32 scalar: 1 leaves everything as it is
    implementation: str | None = None,
) -> None:
    """Update all slots in place, without waiting for the device. A GPU's kernel reads and writes each byte once."""
    if not slots:
        return
    device = slots[0].weight.device
    usual = "triton" if device.type == "cuda" else TORCH  # not measured first: PyTorch has none for 16 bits
    if pick("adamw", implementation or usual, IMPLEMENTATIONS, device) == "triton":
        from .adamw_triton import launch

        launch(slots, corrections(slots, rule), rule, grad_scale, found_inf)
        return
    for slot, (rate, root) in zip(slots, corrections(slots, rule).unbind(), strict=True):
        for first, part in spans(slot):
            reference(part, rule, rate, root, grad_scale, found_inf, first)


def spans(slot: Slot) -> Iterator[tuple[int, Slot]]:
    """Parts of it with the place of their first element: what is in between needs no more memory than one of them."""
    names = [name for name in ("weight", "grad", "mean", "square", "low") if getattr(slot, name) is not None]
    for first in range(0, slot.weight.numel(), SPAN):
        part = slice(first, first + SPAN)
        yield first, replace(slot, **{name: getattr(slot, name).view(-1)[part] for name in names})


def corrections(slots: Sequence[Slot], rule: Rule) -> Tensor:
    """Of each slot lr / (1 − β1ᵗ) and 1 / √(1 − β2ᵗ), (slots, 2) in fp32: the step t is known on the device alone."""
    steps = torch.stack([slot.step for slot in slots]).double()
    rates = rule.lr / (1 - rule.beta1**steps)
    return torch.stack([rates, (1 - rule.beta2**steps).rsqrt()], dim=1).float()


@torch.no_grad()
def reference(
    slot: Slot,
    rule: Rule,
    rate: Tensor,
    root: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    first: int = 0,  # the place of its first element in the weight
) -> None:
    """One operation a line, each rounded to fp32, as the kernel does it: their results are the same to the last bit."""
    grad = slot.grad.float() if grad_scale is None else slot.grad.float() * (1 / grad_scale)
    wide = slot.weight.float() if slot.low is None else join_master(slot.weight, slot.low)
    by_chance = rule.stochastic or any(t is not None and t.dtype == torch.bfloat16 for t in (slot.mean, slot.square))
    random = random_bits(slot, first) if by_chance else None
    wide = wide * (1 - rule.lr * rule.weight_decay)
    if slot.mean is None or slot.square is None:
        wide = wide - rule.lr * grad
    else:
        mean, square = slot.mean.float(), slot.square.float()
        mean = mean + (grad - mean) * (1 - rule.beta1)
        square = square * rule.beta2 + (grad * (1 - rule.beta2)) * grad
        wide = wide - (rate * mean) / (exact_sqrt(square) * root + rule.eps)
        high, more = (None, None) if random is None else (random >> 16, counter_rng.third_half(random))
        keep(slot.mean, narrow(mean, slot.mean.dtype, high), found_inf)
        keep(slot.square, narrow(square, slot.square.dtype, more), found_inf)
    if slot.low is None:
        rounded = narrow(wide, slot.weight.dtype, random if rule.stochastic else None)
    else:
        rounded, low = split(wide)
        keep(slot.low, low, found_inf)
    keep(slot.weight, rounded, found_inf)


def exact_sqrt(x: Tensor) -> Tensor:
    """The nearest fp32 to √x. What PyTorch has for it on a CPU is off by a digit of the last place at times."""
    return x.double().sqrt().float()


def keep(here: Tensor, new: Tensor, found_inf: Tensor | None) -> None:
    here.copy_(new if found_inf is None else torch.where(found_inf > 0, here, new))


def random_bits(slot: Slot, first: int = 0) -> Tensor:
    """32 for each element, as int32. The low half rounds the weight, the high half the mean."""
    ids = torch.arange(first, first + slot.weight.numel(), device=slot.weight.device).to(torch.int32)
    seed = torch.tensor([slot.seed], device=slot.weight.device)
    return counter_rng.quick_bits(seed, slot.step.to(torch.int64).view(1), ids).view(slot.weight.shape)


# --- formats ------------------------------------------------------------------------------------------


def split(wide: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as (bf16, int16); `join_master` restores the same bits. A NaN becomes quiet and positive."""
    bits = wide.contiguous().view(torch.int32)
    high = torch.where(wide.isnan(), QUIET, (bits + HALF) >> 16)
    low = torch.where(wide.isnan(), 0, bits - (high << 16))
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join_master(weight: Tensor, low: Tensor) -> Tensor:
    bits = (weight.contiguous().view(torch.int16).to(torch.int32) << 16) + low
    return bits.view(torch.float32)


def narrow(wide: Tensor, dtype: torch.dtype, random: Tensor | None) -> Tensor:
    """In the format that it is kept in: to the nearest, or with the low 16 of `random` bits up or down."""
    if dtype == torch.float32:
        return wide
    if random is None:
        return split(wide)[0]
    bits = (wide.view(torch.int32) + (random & LAST_16)) & ~LAST_16
    return torch.where(wide.isfinite(), bits.view(torch.float32), wide).to(dtype)  # what is left is exact in bf16
