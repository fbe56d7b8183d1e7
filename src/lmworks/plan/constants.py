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

from ..spec import Gpu, SpecError
from ..spec.errors import did_you_mean
from .software import Software

FITTED = Path(__file__).with_name("fitted.toml")


@dataclass(frozen=True)
class Constants:
    """Factors are times over what the rates of single kernels or links give; a missing name has factor 1."""

    products: Mapping[str, float] = field(default_factory=dict)  # by family of GPU: heat and power in a long run
    attention: Mapping[str, float] = field(default_factory=dict)  # by family of GPU
    software: Mapping[str, float] = field(default_factory=dict)  # what is left of a code base's own slowness
    launch_s: Mapping[str, float] = field(default_factory=dict)  # host time of one kernel of the op list, by code base
    memory: float = 1.0  # passes over memory
    uneven: float = 0.1  # share of that time by which the slowest host is slower, for every doubling of the hosts
    step_s: float = 5e-3  # host time of one step beside its kernels
    contention: float = 0.15  # what a second of hidden traffic adds to the work that hides it
    links: float = 1.0  # collectives inside a node
    network: float = 1.0  # collectives between nodes
    jitter: float = 0.005  # share of a step lost in waiting, for every doubling of the nodes
    spread: float = 0.1  # standard deviation of log(predicted / measured)

    def factors(self, gpu: Gpu) -> dict[str, float]:
        """By kind of kernel."""
        kind = family(gpu)
        attention = self.attention.get(kind, 1.0)
        passes = dict.fromkeys(("stream", "strided", "exp", "tanh", "optimizer"), self.memory)
        products = self.products.get(gpu.name, self.products.get(kind, 1.0))
        return {"gemm": products, "attention": attention, "attention_backward": attention, **passes}

    def launch(self, software: Software) -> float:
        """Seconds of the host for one kernel: compiled code launches as many as the list says, other code more."""
        usual = "compiled" if software.fused else "eager"
        return self.launch_s.get(software.name, self.launch_s.get(usual, 10e-6))

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        known = {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in table.items() if name in known})


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
    """H100-SXM-80GB and H100-NVL are both an H100; a GB200 has the same chip as a B200."""
    name = gpu.name.replace(" ", "-").split("-")[0].upper()
    return name.removeprefix("G") if name.startswith(("GB", "GH")) else name
