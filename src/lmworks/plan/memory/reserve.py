"""From the bytes of tensors to the bytes of a GPU: what the allocator holds on to, and what is there before it.

PyTorch's allocator keeps blocks that no live tensor fits, so it reserves more than tensors ever need. How much more
depends on the order of sizes in a step, which no closed form knows: the mean and the spread are fitted to runs for
which both figures were measured (`memory.toml`).
"""

from __future__ import annotations

import functools
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from ...spec import Gpu, SpecError
from ...spec.errors import did_you_mean
from ..case import Number

RISK = 0.1  # probability of running out of memory at which a layout still counts as one that fits; chosen
# Share of a datasheet's GB, taken as GiB, that a driver reports: 79.1 GiB of an A100 or H100 with 80, 139.8 of an H200
# with 141, 95.0 of an H100 with 96.
DRIVER_SHARE = 0.99
CONSTANTS = Path(__file__).with_name("memory.toml")
# PyTorch gives cuBLAS 32 MiB for each thread that calls it (on Hopper and later; 8 MiB before), forward and backward,
# and its allocator counts them.
WORKSPACES = 2 * 32 * 2**20


@dataclass(frozen=True)
class Reserve:
    """Source: `validation/fit_memory.py`, from SimuMax's and torchtitan's runs."""

    slack: float  # reserved / allocated − 1; fitted
    spread: float  # standard deviation of log(reserved / predicted); fitted
    context: float  # bytes of the CUDA context, its kernels and NCCL's buffers, outside the allocator; modelled
    unseen: float  # the spread for code bases without a run in the fit: BLOOM's trials, which nothing is fitted to
    seen: frozenset[str]  # code bases of the fit


@functools.cache
def reserve(without: str = "") -> Reserve:
    """Fitted to all sources; or with the slack that was fitted to all but one, for a blind prediction of that one."""
    table = tomllib.loads(CONSTANTS.read_text(encoding="utf-8"))["reserve"]
    if without and without not in table["without"]:
        raise SpecError(f"no fit of memory leaves out the source {without!r}{did_you_mean(without, table['without'])}")
    slack = table["without"][without]["slack"] if without else table["slack"]
    return Reserve(slack, table["spread"], table["context_bytes"], table["unseen"], frozenset(table["seen"]))


def reserved(allocated: Number, without: str = "") -> Number:
    """As `torch.cuda.max_memory_reserved` counts."""
    return allocated * (1 + reserve(without).slack)


def capacity(gpu: Gpu) -> float:
    """Bytes that a driver reports."""
    if not gpu.memory_gb:
        raise SpecError(f"{gpu.name}: memory_gb is not in the catalogue; give it in one of your own, cluster.catalogue")
    return DRIVER_SHARE * gpu.memory_gb * 2**30


def usable(gpu: Gpu) -> float:
    """Bytes that PyTorch's allocator can have on this GPU."""
    return capacity(gpu) - reserve().context


def safe_bytes(gpu: Gpu, risk: float = RISK) -> float:
    """Predicted reserved bytes at which a step runs out of memory with this probability: what fits."""
    return safe_bytes_of(capacity(gpu), risk)


def safe_bytes_of(memory: float, risk: float = RISK) -> float:
    """The same of a device with so many bytes."""
    return (memory - reserve().context) * math.exp(reserve().spread * NormalDist().inv_cdf(risk))


def oom_probability(needed: Number, gpu: Gpu, software: str = "lmworks") -> Any:
    """That a step whose predicted reserved bytes are `needed` does not fit: log(real / predicted) is taken as normal,
    wider for a code base of which no memory was fitted.

    An allocator that runs short gives back what it does not need and tries again, so this is on the safe side.
    """
    if usable(gpu) <= 0:
        return np.ones_like(needed, dtype=float)[()]
    spread = reserve().spread if software in reserve().seen else reserve().unseen
    ratio = np.log(np.maximum(needed, 1.0) / usable(gpu)) / spread
    return np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)), otypes=[float])(ratio)[()]
