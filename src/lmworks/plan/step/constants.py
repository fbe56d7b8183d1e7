"""Fitted constants of the step time: what no datasheet and no benchmark of single kernels gives.

Source: `validation/fit_time.py` fits them to published and own runs (validation/) and writes `fitted.toml`: one
set fitted to all sources, and per source a set fitted without it, for blind predictions of that source.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...spec import Gpu, LMWorksError, SpecError
from ...spec.errors import did_you_mean
from ..case import Case, Number
from ..software import Software

# TDP in watts of the boards that the GEMM factors are fitted to; datasheets.
FITTED_WATTS = {"A100": 400.0, "H100": 700.0, "H200": 700.0, "B200": 1000.0}
SAME_CHIP = {"GH200": "H200", "H800": "H100", "A800": "A100", "GB200": "B200"}
FITTED = Path(__file__).with_name("fitted.toml")
REFERENCE_LAUNCH_S = 6e-6  # seconds per launch of a bare op on the host the constants were fitted on; as in rates.toml


@dataclass(frozen=True)
class Seen:
    """What runs that constants were fitted to had."""

    software: frozenset[str] = frozenset()
    gpus: frozenset[str] = frozenset()  # chip families
    dtypes: frozenset[str] = frozenset()
    experts: bool = False

    def union(self, other: Seen) -> Seen:
        return Seen(
            self.software | other.software,
            self.gpus | other.gpus,
            self.dtypes | other.dtypes,
            self.experts or other.experts,
        )

    def knows(self, case: Case) -> bool:
        return case.software.name in self.software and chip_family(case.gpu) in self.gpus

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        software, gpus, dtypes = (frozenset(table[key]) for key in ("software", "gpus", "dtypes"))
        return cls(software, gpus, dtypes, table["experts"])


@dataclass(frozen=True)
class Constants:
    """Factors multiply the time that rates of single kernels and idle links give; "*" is the default of a table.

    All are fitted (see the module). Values here are the priors of the fit. What each is worth, the error without it:
    `validation/ablate_constants.py`, and a table of it in docs/log.md.
    """

    gemm: Mapping[str, float] = field(default_factory=dict)  # factor by chip family: heat and power in a long run
    attention: Mapping[str, float] = field(default_factory=dict)  # factor by family, or family and kernel: H100-fa1
    software: Mapping[str, float] = field(default_factory=dict)  # factor by code base, on the whole step
    launch_s: Mapping[str, float] = field(default_factory=dict)  # host seconds per kernel of the op list, by code base
    single_gpu: float = 0.95  # GEMM factor of one GPU alone in a node, with more power and cooling
    power: float = 0.5  # exponent: GEMMs slow down as (fitted watts / watts) ** power
    memory: float = 1.0  # factor of memory-bound kernels
    casts: float = 1.0  # further factor of fp8 casts, which may be fused with the kernel before
    host_skew: float = 0.1  # share of launch time by which the slowest host is slower, per doubling of tp
    step_s: Mapping[str, float] = field(default_factory=dict)  # host seconds per step beside launches, by code base
    contention: float = 0.15  # slowdown of compute per second of overlapped communication
    async_tp_contention: float = 0.5  # the same of async TP (smaller GEMMs); from torchtitan's runs only
    links: float = 1.0  # factor of collectives inside a node
    network: float = 1.0  # factor of collectives between nodes
    stragglers: float = 0.005  # share of a step lost to stragglers, per doubling of the nodes
    # Standard deviation of log(predicted / measured) on a source that was left out of the fit: where the others have
    # its code base and its GPU, and where not.
    spread: float = 0.1
    unseen: float = 0.2
    seen: Seen = Seen()

    def uncertainty(self, case: Case) -> tuple[float, list[str]]:
        """Standard deviation of log(predicted / measured), and what no fitted run had.

        Errors of what was never seen are taken for independent: a number format or experts on top of a code base that
        was fitted cost as much as a code base that was not.
        """
        seen = self.seen
        known = seen.knows(case)
        variance = (self.spread if known else self.unseen) ** 2
        missing = [] if known else [f"of {case.software.name} on {case.gpu.name}"]
        if case.dtype not in seen.dtypes:
            missing.append(f"in {case.dtype}")
        if case.model.experts and not seen.experts:
            missing.append("with experts")
        if case.adapters:  # published runs do not tell which layers have them
            missing.append("with low-rank adapters")
        variance += self.unseen**2 * (len(missing) - (not known))
        return float(np.sqrt(variance)), missing

    def factors(self, gpu: Gpu, software: Software, world: Number = 1) -> dict[str, Any]:
        """By kind of kernel."""
        kind, flash = chip_family(gpu), software.flash
        capped = (FITTED_WATTS[kind] / gpu.tdp_w) ** self.power if gpu.tdp_w and kind in FITTED_WATTS else 1.0
        attention = self.attention.get(f"{kind}-{flash}", factor(self.attention, kind)) * capped
        passes = dict.fromkeys(("stream", "strided", "widen", "exp", "tanh", "optimizer"), self.memory)
        products = (
            factor(self.gemm, kind) * capped * np.where(world == 1, self.single_gpu * software.gemm_slowdown, 1.0)
        )
        return {
            "gemm": products,
            "attention": attention,
            "attention_backward": attention,
            **passes,
            "casts": self.memory * self.casts,
        }

    def host_seconds(self, software: Software) -> tuple[float, float]:
        """Host seconds per kernel of the op list, and of a step beside its launches.

        Compiled code launches as many kernels as listed, eager code more; the op list of our own blocks has every
        launch, compiled or not. Beside its launches a compiled code base takes as long as its eager one.
        """
        default = "compiled" if software.fused or software.name.startswith("lmworks") else "eager"
        launch_s = self.launch_s.get(software.name, self.launch_s.get(default, 10e-6))
        return launch_s, self.step_s.get(software.name.removesuffix("-compile"), self.step_s.get("*", 5e-3))

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], seen: Seen) -> Self:
        """Missing and unknown keys are errors."""
        if table.keys() != (names := {entry.name for entry in fields(cls)} - {"seen"}):
            raise LMWorksError(f"{FITTED.name} and its reader differ in: {', '.join(sorted(table.keys() ^ names))}")
        return cls(**table, seen=seen)


def factor(table: Mapping[str, float], name: str) -> float:
    """Of this name, else of the family that it begins with (megatron-bridge: megatron), else of all."""
    while name not in table and "-" in name:
        name = name.rpartition("-")[0]
    return table.get(name, table.get("*", 1.0))


@functools.cache
def constants(without: str = "") -> Constants:
    """Fitted to all sources, or to all but one."""
    tables = tomllib.loads(FITTED.read_text(encoding="utf-8"))
    if without and without not in tables["without"]:
        raise SpecError(f"no fit leaves out the source {without!r}{did_you_mean(without, tables['without'])}")
    seen = [Seen.from_dict(table) for source, table in tables["seen"].items() if source != without]
    chosen = tables["without"][without] if without else tables["all"]
    return Constants.from_dict(chosen, functools.reduce(Seen.union, seen))


def chip_family(gpu: Gpu) -> str:
    """H100-SXM-80GB and H100-NVL are H100, GB200 is B200."""
    name = gpu.name.replace(" ", "-").split("-")[0].upper()
    return SAME_CHIP.get(name, name)
