"""AdamW over weights and moments in 16 bits, without losing what 16 bits cannot represent.

bf16 has 8 significant bits: a weight of 1 changes by a step of 1e-3 or not at all, and most updates are smaller. Two
ways to keep small updates:

    split master    a bf16 weight and 16 more bits are one fp32 number, exactly: 4 bytes, where a bf16 copy beside an
                    fp32 master has 6. The weight is that number rounded to nearest, ties away from zero:

                        weight = (bits + 0x8000) >> 16        low = bits − (weight << 16), from −32768 to 32767

                    (Ties to even would not do: 65,537 numbers round to an even weight, and 16 bits tell 65,536 apart.)
    stochastic      no more bits: an update is rounded up with the probability that makes it right on average. Sixteen
                    random bits are added below the last digit, and the rest is truncated.

Moments in 16 bits are always rounded stochastically. Rounded to nearest, a second moment could not fall: v · 0.999
rounds back to v.

The random bits are a hash of (seed of the weight, step, element), as in `counter_rng.py`: a resumed run draws those of
an uninterrupted one, and replicas of a weight stay equal. Ranks that hold different rows of a weight draw the same bits
for them: each is still rounded up with the right probability.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import counter_rng
from ..dispatch import TORCH, pick

IMPLEMENTATIONS = ("torch", "triton")
ROUND_HALF, LOW_16_BITS = 0x8000, 0xFFFF
BF16_NAN = 0x7FC0
REFERENCE_CHUNK = 2**16  # elements of the reference at a time: its temporaries stay in the CPU cache


@dataclass(frozen=True)
class ParamState:
    """A weight and its optimizer state, all of one shape and contiguous. Without moments: plain SGD."""

    weight: Tensor  # fp32 or bf16
    grad: Tensor  # fp32 or bf16
    step: Tensor  # fp32 scalar: updates of this weight, this one included
    seed: int  # of its random bits
    exp_avg: Tensor | None = None  # fp32 or bf16
    exp_avg_sq: Tensor | None = None
    low: Tensor | None = None  # int16: the low bits of a split master


@dataclass(frozen=True)
class AdamWConfig:
    lr: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    stochastic: bool = False  # rounding of a bf16 weight without `low`


def adamw(
    states: Sequence[ParamState],
    config: AdamWConfig,
    *,
    grad_scale: Tensor | None = None,  # fp32 scalar that gradients are divided by
    found_inf: Tensor | None = None,  # fp32 scalar: 1 skips the update
    implementation: str | None = None,
) -> None:
    """Update all weights in place, asynchronously. On a GPU each byte is read and written once."""
    if not states:
        return
    device = states[0].weight.device
    usual = "triton" if device.type == "cuda" else TORCH  # without a measurement: PyTorch has none for 16 bits
    if pick("adamw", implementation or usual, IMPLEMENTATIONS, device) == "triton":
        from .adamw_triton import launch

        launch(states, bias_corrections(states, config), config, grad_scale, found_inf)
        return
    for state, (rate, root) in zip(states, bias_corrections(states, config).unbind(), strict=True):
        for first, part in chunks(state):
            reference(part, config, rate, root, grad_scale, found_inf, first)


def chunks(state: ParamState) -> Iterator[tuple[int, ParamState]]:
    """Chunks with the index of their first element, which bound the memory of temporaries."""
    names = [name for name in ("weight", "grad", "exp_avg", "exp_avg_sq", "low") if getattr(state, name) is not None]
    for first in range(0, state.weight.numel(), REFERENCE_CHUNK):
        part = slice(first, first + REFERENCE_CHUNK)
        yield first, replace(state, **{name: getattr(state, name).view(-1)[part] for name in names})


def bias_corrections(states: Sequence[ParamState], config: AdamWConfig) -> Tensor:
    """lr / (1 − β1ᵗ) and 1 / √(1 − β2ᵗ) of each weight, (states, 2) in fp32: step t is on the device."""
    steps = torch.stack([state.step for state in states]).double()
    rates = config.lr / (1 - config.beta1**steps)
    return torch.stack([rates, (1 - config.beta2**steps).rsqrt()], dim=1).float()


@torch.no_grad()
def reference(
    state: ParamState,
    config: AdamWConfig,
    rate: Tensor,
    root: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    first: int = 0,  # index of its first element in the weight
) -> None:
    """Each operation rounded to fp32, as in the kernel: results are equal bit for bit."""
    grad = state.grad.float() if grad_scale is None else state.grad.float() * (1 / grad_scale)
    wide = state.weight.float() if state.low is None else join_master(state.weight, state.low)
    needs_random_bits = config.stochastic or any(
        t is not None and t.dtype == torch.bfloat16 for t in (state.exp_avg, state.exp_avg_sq)
    )
    random = random_bits(state, first) if needs_random_bits else None
    wide = wide * (1 - config.lr * config.weight_decay)
    if state.exp_avg is None or state.exp_avg_sq is None:
        wide = wide - config.lr * grad
    else:
        exp_avg, exp_avg_sq = state.exp_avg.float(), state.exp_avg_sq.float()
        exp_avg = exp_avg + (grad - exp_avg) * (1 - config.beta1)
        exp_avg_sq = exp_avg_sq * config.beta2 + (grad * (1 - config.beta2)) * grad
        wide = wide - (rate * exp_avg) / (exact_sqrt(exp_avg_sq) * root + config.eps)
        high, more = (None, None) if random is None else (random >> 16, counter_rng.extra_random_bits(random))
        write_unless_inf(state.exp_avg, round_to(exp_avg, state.exp_avg.dtype, high), found_inf)
        write_unless_inf(state.exp_avg_sq, round_to(exp_avg_sq, state.exp_avg_sq.dtype, more), found_inf)
    if state.low is None:
        rounded = round_to(wide, state.weight.dtype, random if config.stochastic else None)
    else:
        rounded, low = split(wide)
        write_unless_inf(state.low, low, found_inf)
    write_unless_inf(state.weight, rounded, found_inf)


def exact_sqrt(x: Tensor) -> Tensor:
    """√x correctly rounded to fp32; PyTorch's on a CPU is at times off by one ulp."""
    return x.double().sqrt().float()


def write_unless_inf(here: Tensor, new: Tensor, found_inf: Tensor | None) -> None:
    here.copy_(new if found_inf is None else torch.where(found_inf > 0, here, new))


def random_bits(state: ParamState, first: int = 0) -> Tensor:
    """32 for each element, as int32. The low half rounds the weight, the high half exp_avg."""
    ids = torch.arange(first, first + state.weight.numel(), device=state.weight.device).to(torch.int32)
    seed = torch.tensor([state.seed], device=state.weight.device)
    return counter_rng.fast_random_bits(seed, state.step.to(torch.int64).view(1), ids).view(state.weight.shape)


# --- formats ------------------------------------------------------------------------------------------


def split(wide: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as (bf16, int16); `join_master` restores the same bits. A NaN becomes a positive quiet one."""
    bits = wide.contiguous().view(torch.int32)
    high = torch.where(wide.isnan(), BF16_NAN, (bits + ROUND_HALF) >> 16)
    low = torch.where(wide.isnan(), 0, bits - (high << 16))
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join_master(weight: Tensor, low: Tensor) -> Tensor:
    bits = (weight.contiguous().view(torch.int16).to(torch.int32) << 16) + low
    return bits.view(torch.float32)


def round_to(wide: Tensor, dtype: torch.dtype, random: Tensor | None) -> Tensor:
    """Round to nearest, or stochastically with the low 16 of `random` bits."""
    if dtype == torch.float32:
        return wide
    if random is None:
        return split(wide)[0]
    bits = (wide.view(torch.int32) + (random & LOW_16_BITS)) & ~LOW_16_BITS
    return torch.where(wide.isfinite(), bits.view(torch.float32), wide).to(dtype)  # exact in bf16 by now
