"""What a training run costs: hours, GPU-hours, dollars, kilowatt-hours, and what failures take of them.

A cluster of N GPUs stops N times as often as one GPU. Whoever saves every τ seconds loses a save δ each time, and at
every stop the work since the last save, τ/2 on average, and a restart R. With a mean time M between stops the best τ is
√(2δM) (Young 1974), and a stretch of τ takes M·e^(R/M)·(e^((τ+δ)/M) − 1) seconds on average (Daly 2006).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..spec import SpecError
from .case import Number

# Llama 3 405B (arXiv 2407.21783, section 3.3.4): 419 unplanned stops of 16,384 H100s in 54 days; over 90% of the time
# was training.
STOPS_PER_GPU_HOUR = 419 / (54 * 24 * 16_384)


@dataclass(frozen=True)
class Site:
    """Where a run takes place; all of it modelled but the rate of stops, and all of it to be set."""

    stops_per_gpu_hour: Number = STOPS_PER_GPU_HOUR  # measured, by the run above
    save_s: Number = 30.0  # that a checkpoint holds up training
    restart_s: Number = 300.0  # from a stop to the next step: to notice, start all ranks, load
    idle_power: float = 0.1  # of a GPU's rated power, while it waits
    full_power: float = 0.95  # the same while it computes
    host_power: float = 0.5  # of everything around it; 8 H100s with theirs draw up to 8.4 kW (arXiv 2412.08602)
    pue: Number = 1.2  # power of the building over that of its computers


@dataclass(frozen=True)
class Bill:
    """Of a whole run; every number may be an array, one element a candidate."""

    hours: Number  # from start to end, stops and saves included
    gpu_hours: Number
    dollars: Number
    kwh: Number
    stops: Number
    save_every_s: Number
    goodput: Number  # share of the hours that trains


def bill(
    tokens: Number,
    tokens_per_s: Number,
    gpus: Number,
    price_hour: Number = 0.0,
    tdp_w: Number = 0.0,
    busy: Number = 0.9,
    site: Site | None = None,
) -> Bill:
    """Of training on so many tokens, at a speed without stops; `busy` is the share of a step in which a GPU computes.

    A price or a power of 0 is one that is not known: dollars or kilowatt-hours are 0 then.
    """
    site = site or Site()
    for key, value in {"tokens": tokens, "tokens_per_s": tokens_per_s, "gpus": gpus}.items():
        refuse(key, value, np.any(np.asarray(value) <= 0), "more than 0")
    for key, value in {"price_hour": price_hour, "tdp_w": tdp_w, "restart_s": site.restart_s}.items():
        refuse(key, value, np.any(np.asarray(value) < 0), "0 or more")
    refuse("busy", busy, np.any((np.asarray(busy) < 0) | (np.asarray(busy) > 1)), "a share from 0 to 1")
    refuse("pue", site.pue, np.any(np.asarray(site.pue) < 1), "1 or more")
    useful = goodput(gpus, site)
    hours = tokens / tokens_per_s / 3600 / useful
    gpu_hours = hours * gpus
    return Bill(
        hours,
        gpu_hours,
        gpu_hours * price_hour,
        gpu_hours * watts(tdp_w, busy, site) / 1000,
        gpu_hours * site.stops_per_gpu_hour,
        save_every(gpus, site),
        useful,
    )


def between_stops(gpus: Number, site: Site) -> Number:
    """Mean seconds from one stop of the cluster to the next."""
    refuse("stops_per_gpu_hour", site.stops_per_gpu_hour, np.any(np.asarray(site.stops_per_gpu_hour) < 0), "0 or more")
    return 3600 / (gpus * np.maximum(site.stops_per_gpu_hour, 1e-15))


def save_every(gpus: Number, site: Site) -> Number:
    """Seconds between two checkpoints that lose least: Young's √(2δM)."""
    refuse("save_s", site.save_s, np.any(np.asarray(site.save_s) <= 0), "more than 0")
    return np.sqrt(2 * site.save_s * between_stops(gpus, site))


def goodput(gpus: Number, site: Site, every: Number | None = None) -> Number:
    """Share of the time that trains, with a checkpoint after `every` seconds of training (the best interval)."""
    mean = between_stops(gpus, site)
    stretch = save_every(gpus, site) if every is None else every
    return stretch / (mean * np.exp(site.restart_s / mean) * np.expm1((stretch + site.save_s) / mean))


def watts(tdp_w: Number, busy: Number, site: Site) -> Number:
    """What one GPU draws from the grid, with its part of host, network, fans and building."""
    share = site.idle_power + (site.full_power - site.idle_power) * busy + site.host_power
    return tdp_w * share * site.pue


def refuse(key: str, value: Number, wrong: bool | np.bool_, what_works: str) -> None:
    if wrong:
        raise SpecError(f"{key} = {value}: give {what_works}")
