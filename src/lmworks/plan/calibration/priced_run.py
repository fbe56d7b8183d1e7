"""Runs whose step was measured, each with its price as a function of the constants that are fitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...spec import RunSpec
from ..case import Case
from ..devices.profile import Profile
from ..predict import time_of
from ..step.constants import constants
from ..step.cpu_ranks import not_priced, ranks_step_time
from ..step.price import price_uncalibrated
from ..step.uncalibrated import Uncalibrated
from .factors import Factors, slower_constants, slower_profile

Price = Callable[[Factors], float]


@dataclass(frozen=True)
class PricedRun:
    label: str
    measured: float  # seconds of a step
    price: Price  # what the planner says of them


def price_of_case(case: Case) -> Price:
    """Of a layout of GPUs: kernels and collectives are timed once."""
    timed = Uncalibrated.of(case)

    def seconds(factors: Factors) -> float:
        host = timed.case.replace(host=timed.case.host * factors.launches)
        slower = replace(timed, case=host, comm=timed.comm.scaled(factors.links, factors.network))
        return float(price_uncalibrated(slower, slower_constants(constants(), factors)).seconds)

    return seconds


def price_of_run(spec: RunSpec, prior: Profile, path: str = "") -> Price | None:
    """Of a run of our own trainer on the machine of a profile, whose file is `path`. None: it has no price."""
    gpu, machine = spec.cluster.accelerator, prior.machine
    if gpu is not None and (machine.tag != "measured" or spec.parallel.world > 1):
        if spec.parallel.recompute == "budget":
            return None
        return price_of_case(Case.of(spec.replace(cluster=spec.cluster.replace(profile=path)), gpu))
    if spec.parallel.world > 1:
        if machine.device != "cpu" or not machine.covers(spec.precision.dtype) or not_priced(spec, prior):
            return None
    elif time_of(spec, machine) is None:
        return None

    def seconds(factors: Factors) -> float:
        slower = slower_profile(prior, factors)
        if spec.parallel.world > 1:
            return ranks_step_time(spec, slower.machine, slower).total
        time = time_of(spec, slower.machine)
        assert time is not None
        return time.total

    return seconds
