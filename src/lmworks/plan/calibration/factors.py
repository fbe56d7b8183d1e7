"""Constants that runs can tell: factors on the seconds of each kind of work, and a profile that has them.

A profile with factors is read as any other: its rates are those of the prior over the factor. Of a GPU of the
catalogue, which was not measured, two points of each law are written, both off by the factor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..devices.machine import Machine, Rate, law_rate
from ..devices.profile import Profile
from ..ops import GEMM_ONLY
from ..step.constants import Constants

CONSTANTS = {
    "kernels": "all kernels",
    "attention": "attention, beside that",
    "passes": "memory-bound kernels, beside that",
    "launches": "launches by the host",
    "links": "collectives inside a machine",
    "network": "collectives between machines",
}
LAW_SHAPES: dict[str, tuple[tuple[float, ...], ...]] = {
    "gemm": ((4096, 4096, 4096), (8192, 8192, 8192)),
    "attention": ((4096, 128), (8192, 128)),
    "attention_backward": ((4096, 128), (8192, 128)),
}
LAW_BYTES = ((2.0**20,), (2.0**28,))  # of a pass


@dataclass(frozen=True)
class Factors:
    """On seconds, in the order of CONSTANTS: 1 is what the prior says.

    A machine that is slower than its prior is mostly so in everything (its clock, its neighbours), so attention and
    passes over memory have factors on top of that of all kernels, which is also that of matrix products.
    """

    kernels: float = 1.0
    attention: float = 1.0
    passes: float = 1.0
    launches: float = 1.0
    links: float = 1.0
    network: float = 1.0

    @classmethod
    def of_logs(cls, logs: NDArray[np.float64]) -> Self:
        return cls(*np.exp(logs).tolist())

    @property
    def logs(self) -> NDArray[np.float64]:
        return np.log(astuple(self))

    def of_rates(self, table: str) -> float:
        """Of a table of a machine's rates: gemm.bf16, attention_backward.fp32, stream …"""
        kind = table.partition(".")[0]
        own = {"gemm": 1.0, "attention": self.attention, "attention_backward": self.attention}
        return self.kernels * own.get(kind, self.passes)


def slower_machine(machine: Machine, factors: Factors) -> Machine:
    return replace(
        machine,
        rates={
            name: tuple(replace(point, rate=point.rate / factors.of_rates(name)) for point in points)
            for name, points in machine.rates.items()
        },
        gains={
            name: tuple(gain / factors.of_rates(name) for gain in gains) for name, gains in machine.gains.items()
        },
        launch_s=machine.launch_s * factors.launches,
        launch_backward_s=machine.launch_backward_s * factors.launches,
    )  # fmt: skip


def slower_profile(profile: Profile, factors: Factors) -> Profile:
    links, network = profile.link_factors
    slower = links * factors.links, network * factors.network
    return replace(profile, machine=slower_machine(profile.machine, factors), link_factors=slower)


def slower_constants(fitted: Constants, factors: Factors) -> Constants:
    """As a profile with these factors slows kernels down, where they are timed already."""
    return replace(
        fitted,
        gemm={name: value * factors.of_rates("gemm") for name, value in fitted.gemm.items()},
        attention={name: value * factors.of_rates("attention") for name, value in fitted.attention.items()},
        memory=fitted.memory * factors.of_rates("stream"),
    )


def law_profile(machine: Machine, dtypes: Iterable[str]) -> Profile:
    """Of a GPU of the catalogue, with points on its laws for what runs in these number formats is made of."""
    laws = machine.laws
    assert laws is not None
    formats = sorted({*dtypes, *(["bf16"] if {*dtypes} & {*GEMM_ONLY} else [])})
    shapes = {f"{kind}.{dtype}": found for kind, found in LAW_SHAPES.items() for dtype in formats}
    shapes |= dict.fromkeys(laws.bandwidth, LAW_BYTES)
    rates = {name: tuple(Rate(shape, law_rate(laws, name, shape)) for shape in found) for name, found in shapes.items()}
    return Profile(replace(machine, tag="fitted", rates=rates).fitted_launch(laws))
