"""The scalars of a step, and the gate of its update: computed on the device, read by the host asynchronously.

    backward → all-reduce → within health's limits? → the optimizer, which does nothing if not
                          ↘ pinned memory → the host reads, checks, launches the next update

The device never waits for the host: the optimizer, and the passes after it (async_step.py), are launched before the
host has read a scalar. A bad step is not taken either: its limits are known before it is launched, and the device
compares with them; it is stricter than the host by a rounding error. The host checks a skipped update, and if it finds
nothing, launches it after all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..parallel.data_parallel import Shard

CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


@dataclass(frozen=True)
class UpdateGate:
    """Inputs of the optimizer beside gradients; PyTorch's fused optimizers and ours read both on the device."""

    grad_divisor: Tensor | None  # of every gradient, fp32: loss scale × max(1, norm / clip); None: 1
    skip: Tensor  # fp32: 1 leaves weights, optimizer state and step counts unchanged


def make_gate(
    sums: Tensor, tokens: int, scale: float, clip: float, limits: tuple[float, float], weight_device: torch.device
) -> tuple[UpdateGate, Tensor]:
    """The gate on `weight_device`, and (loss, norm, skip) for the host. `sums`: loss, squared norm.

    In fp64, as the host computes it: both compare the same numbers.
    """
    loss, norm = sums[0] / max(1, tokens), sums[1].sqrt() / scale  # NaN stays NaN
    fine = loss.isfinite() & norm.isfinite() & (loss <= limits[0]) & (norm <= limits[1])
    skip = (~fine).to(torch.float64)
    grad_divisor = None
    if clip or scale != 1.0:
        clip_divisor = ((norm + CLIP_EPS) / clip).clamp(min=1.0) if clip else torch.ones_like(norm)
        grad_divisor = (scale * clip_divisor).to(weight_device, torch.float32)
    return UpdateGate(grad_divisor, skip.to(weight_device, torch.float32)), torch.stack([loss, norm, skip])


class ScalarReader:
    """Copies a few numbers to the host: `start` when they are computed, `finish` when they are needed.

    On a GPU they are copied to pinned memory, and `finish` waits for that copy only, not for later kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self.values: Tensor | None = None
        self.waited = 0.0  # seconds, last time: if 0, the host is the bottleneck
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


def squared_norm(shards: list[Shard], replicas: Callable[[Shard], int]) -> Tensor:
    """This rank's share of ‖g‖²; the caller sums it over the world, together with other scalars.

    Every element of the gradient counts once, under any layout: squares are divided by the number of ranks that hold
    the same elements.

        ‖g‖ = √( Σ over ranks  Σ over its shards  ‖g_shard‖² / replicas(shard) )
    """
    by_count: dict[int, list[Tensor]] = {}
    for shard in shards:
        if shard.leaf.grad is not None:
            by_count.setdefault(replicas(shard), []).append(shard.leaf.grad)
    total = torch.zeros((), device=shards[0].leaf.device if shards else None)
    for count, gradients in by_count.items():
        norms = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32))
        total += norms.square().sum() / count
    return total
