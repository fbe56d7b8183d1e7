"""The few numbers of a step's time that no datasheet and no benchmark of single kernels gives.

They are fitted to other people's runs (`benchmarks/fit_time.py`) and live in `fitted.toml`: one set fitted to all
sources, and for every source a set that has never seen it, so that a prediction of that source is a blind one.
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
from ..case import Number
from ..software import Software

WATTS = {"A100": 400.0, "H100": 700.0, "H200": 700.0, "B200": 1000.0}  # of the boards that the factors are fitted to
SAME_CHIP = {"GH200": "H200", "H800": "H100", "A800": "A100", "GB200": "B200"}
FITTED = Path(__file__).with_name("fitted.toml")
USUAL_LAUNCH = 6e-6  # seconds of a bare op on the host that the constants are of; rates.toml has it too


@dataclass(frozen=True)
class Constants:
    """Factors are times over what rates of single kernels and links give; "*" is for what has none of its own."""

    products: Mapping[str, float] = field(default_factory=dict)  # by family of GPU: heat and power in a long run
    attention: Mapping[str, float] = field(default_factory=dict)  # by family of GPU, or family and kernel: H100-fa1
    software: Mapping[str, float] = field(default_factory=dict)  # what is left of a code base's own slowness
    launch_s: Mapping[str, float] = field(default_factory=dict)  # host time of one kernel of the op list, by code base
    alone: float = 0.95  # products of a GPU that nothing else shares a machine, its power and its air with
    power: float = 0.5  # products slow down as (usual watts / watts) to this power
    memory: float = 1.0  # passes over memory
    casts: float = 1.0  # of these, casts to 8 bits, which may be fused with what comes before
    uneven: float = 0.1  # share of that time by which the slowest host is slower, for every doubling of the hosts
    step_s: Mapping[str, float] = field(default_factory=dict)  # host time of one step beside its kernels, by code base
    contention: float = 0.15  # what a second of hidden traffic adds to the work that hides it
    pieces: float = 0.5  # the same of tensor-parallel traffic cut into pieces, which makes products smaller too
    links: float = 1.0  # collectives inside a node
    network: float = 1.0  # collectives between nodes
    jitter: float = 0.005  # share of a step lost in waiting, for every doubling of the nodes
    # Standard deviation of log(predicted / measured): of code bases and GPUs that were fitted, and of others.
    spread: float = 0.1
    unseen: float = 0.2

    def factors(self, gpu: Gpu, software: Software, world: Number = 1) -> dict[str, Any]:
        """By kind of kernel."""
        kind, flash = family(gpu), software.flash
        capped = (WATTS[kind] / gpu.tdp_w) ** self.power if gpu.tdp_w and kind in WATTS else 1.0
        attention = self.attention.get(f"{kind}-{flash}", factor(self.attention, kind)) * capped
        passes = dict.fromkeys(("stream", "strided", "widen", "exp", "tanh", "optimizer"), self.memory)
        products = factor(self.products, kind) * capped * np.where(world == 1, self.alone * software.dense, 1.0)
        return {
            "gemm": products,
            "attention": attention,
            "attention_backward": attention,
            **passes,
            "casts": self.memory * self.casts,
        }

    def launch(self, software: Software) -> float:
        """Seconds of the host for one kernel: compiled code launches as many as the list says, other code more.

        The list of our own blocks has every launch in it, compiled or not.
        """
        usual = "compiled" if software.fused or software.name.startswith("lmworks") else "eager"
        return self.launch_s.get(software.name, self.launch_s.get(usual, 10e-6))

    def beside(self, software: Software) -> float:
        """Seconds of the host for one step, beside its launches; a compiled code base is its eager one here."""
        return self.step_s.get(software.name.removesuffix("-compile"), self.step_s.get("*", 5e-3))

    def knows(self, gpu: Gpu, software: Software) -> bool:
        return family(gpu) in self.products and software.name in self.software

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        """A key that is missing or not known is a mistake of whoever wrote the file, not a default."""
        if table.keys() != (names := {entry.name for entry in fields(cls)}):
            raise LMWorksError(f"{FITTED.name} and its reader differ in: {', '.join(sorted(table.keys() ^ names))}")
        return cls(**table)


def factor(table: Mapping[str, float], name: str) -> float:
    return table.get(name, table.get("*", 1.0))


@functools.cache
def constants(without: str = "") -> Constants:
    """Fitted to all sources, or to all but one."""
    tables = tomllib.loads(FITTED.read_text(encoding="utf-8"))
    if not without:
        return Constants.from_dict(tables["all"])
    if without not in tables["without"]:
        raise SpecError(f"no fit leaves out the source {without!r}{did_you_mean(without, tables['without'])}")
    return Constants.from_dict(tables["without"][without])


def family(gpu: Gpu) -> str:
    """Boards with the same chip: H100-SXM-80GB and H100-NVL are H100s, a GB200 is a B200."""
    name = gpu.name.replace(" ", "-").split("-")[0].upper()
    return SAME_CHIP.get(name, name)
