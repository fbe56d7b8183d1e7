"""Until rates by shape and fitted links land: rough ones, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..spec import Gpu
from .case import Case, Number
from .ops import Kernel

SMS = {"A100": 108, "H100": 132, "H200": 132, "B200": 148, "V100": 80}


@dataclass(frozen=True)
class RoughMachine:
    gpu: Gpu

    def seconds(self, kernel: Kernel, dtype: str) -> Any:
        bandwidth = 0.8e9 * self.gpu.bandwidth_gbs
        peak = self.gpu.peak_flops(dtype) or self.gpu.peak_flops("bf16") or self.gpu.peak_flops("fp16") or 1e14
        if kernel.kind == "gemm":
            m, k, n = kernel.shape
            sms = SMS.get(self.gpu.name.split("-")[0], 132)
            tiles = np.ceil(m / 128) * np.ceil(n / 128)
            waves = np.ceil(tiles / sms) * 1.0
            full = waves * sms * 128 * 128 * 2.0 * (k + 64)
            soft = 0.5 * full + 0.5 * tiles * 128 * 128 * 2.0 * (k + 64)
            moved = 2.0 * (m * k + k * n + m * n)
            return kernel.count * (np.maximum(soft / (0.8 * peak), moved / bandwidth) + 2e-6)
        if kernel.kind.startswith("attention"):
            seq, _ = kernel.shape
            best = 0.6 if "A100" in self.gpu.name else 0.45
            return kernel.flops / (best * peak * seq / (seq + 400)) * kernel.count
        return kernel.count * (kernel.bytes / bandwidth + 2e-6)


@dataclass(frozen=True)
class RoughFabric:
    gpu: Gpu
    per_node: int
    nic: float

    def seconds(self, kind: str, nbytes: Any, ranks: Any, stride: Any) -> Any:
        ranks = np.maximum(ranks, 1)
        inside = np.maximum(1, np.minimum(ranks, self.per_node // np.minimum(stride, self.per_node)))
        nodes = np.ceil(ranks / inside)
        factor = {"all-reduce": 2.0, "send": 1.0, "broadcast": 1.0}.get(kind, 1.0)
        share = (ranks - 1) / ranks if kind != "send" else np.where(ranks > 1, 1.0, 0.0)
        link = np.where(nodes > 1, np.minimum(self.gpu.link_gbs, self.nic * inside), self.gpu.link_gbs)
        return np.where(ranks > 1, factor * share * nbytes / (0.8e9 * link) + 1e-5 * (1 + np.log2(ranks)), 0.0)


def rough_fabric(case: Case) -> RoughFabric:
    return RoughFabric(case.gpu, case.gpus_per_node, case.nic_gbs or case.gpu.nic_gbs or 25.0)


def rough_bubble(schedule: str, ranks: Number, virtual: Number, micro_batches: Number, work: Number) -> Number:
    """Idle seconds of a rank with `work` seconds a micro-batch."""
    return (ranks - 1) * work / (virtual if schedule != "1f1b" else 1)
