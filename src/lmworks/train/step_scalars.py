"""The figures of a step, and a gate for its update: made on the device, and read by the host while the device goes on.

    backward → sums over the ranks → is it within health's limits? → the optimizer, which does nothing if it is not
                                   ↘ pinned memory → the host reads, judges, launches the next update

The host is never waited for: the optimizer, and the passes after it (async_step.py), were launched before the host
has seen a figure. Nor is a step taken that the host would refuse: the limits are known by then, the device compares
with them, and is stricter than the host by a rounding error. What it held back the host judges, and if there is nothing
to it, has the update made after all.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


@dataclass(frozen=True)
class Gate:
    """What the optimizer is given beside gradients; PyTorch's fused ones, and ours, take both from the device."""

    divisor: Tensor | None  # of every gradient, fp32: the loss scale, times what clipping asks for; None: 1
    held: Tensor  # fp32: 1 leaves weights, states and counts of steps as they are


def make_gate(
    sums: Tensor, tokens: int, scale: float, clip: float, limits: tuple[float, float], home: torch.device
) -> tuple[Gate, Tensor]:
    """The gate, where the weights are (`home`), and (loss, norm, held) for the host. `sums`: fp64 loss, squared norm.

    In fp64, as the host would compute it: both see the same two numbers.
    """
    loss, norm = sums[0] / max(1, tokens), sums[1].sqrt() / scale  # of a NaN it is one
    fine = loss.isfinite() & norm.isfinite() & (loss <= limits[0]) & (norm <= limits[1])
    held = (~fine).to(torch.float64)
    divisor = None
    if clip or scale != 1.0:
        excess = ((norm + CLIP_EPS) / clip).clamp(min=1.0) if clip else torch.ones_like(norm)
        divisor = (scale * excess).to(home, torch.float32)
    return Gate(divisor, held.to(home, torch.float32)), torch.stack([loss, norm, held])


class Reader:
    """Brings a few numbers to the host: `start` where they are made, `finish` where they are needed.

    On a GPU they are copied to pinned memory, and `finish` waits for that copy alone, not for what was launched after.
    """

    def __init__(self, device: torch.device) -> None:
        self.values: Tensor | None = None
        self.waited = 0.0  # seconds, the last time: a host that never waits is what the device waits for
        self.copied = torch.cuda.Event() if device.type == "cuda" else None

    def start(self, values: Tensor) -> None:
        if self.copied is None:
            self.values = values
            return
        if self.values is None:
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self.values.copy_(values, non_blocking=True)
        self.copied.record()

    def finish(self) -> list[float]:
        assert self.values is not None, "nothing was started"
        if self.copied is not None:
            began = time.perf_counter()
            self.copied.synchronize()
            self.waited = time.perf_counter() - began
        numbers: list[float] = self.values.tolist()
        return numbers
