"""What a training run costs: hours, GPU-hours, dollars, kilowatt-hours, and what failures take of them.

How often a cluster stops and what that takes is `reliability`'s; here it becomes hours and dollars.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .case import Number
from .reliability import RATES, Recovery, ettr, mtbf, refuse, young


@dataclass(frozen=True)
class Site:
    """Where a run takes place; all of it modelled but the rate of stops, and all of it to be set."""

    stops_per_gpu_hour: Number = RATES["llama3"]  # measured
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
    return mtbf(gpus, site.stops_per_gpu_hour)


def save_every(gpus: Number, site: Site) -> Number:
    """Seconds between two checkpoints that lose least."""
    refuse("save_s", site.save_s, np.any(np.asarray(site.save_s) <= 0), "more than 0")
    return young(site.save_s, between_stops(gpus, site))


def goodput(gpus: Number, site: Site, every: Number | None = None) -> Number:
    """Share of the time that trains, with a checkpoint after `every` seconds of training (the best interval)."""
    recovery = Recovery(between_stops(gpus, site), site.save_s, restart_s=site.restart_s)
    return ettr(save_every(gpus, site) if every is None else every, recovery)


def watts(tdp_w: Number, busy: Number, site: Site) -> Number:
    """What one GPU draws from the grid, with its part of host, network, fans and building."""
    share = site.idle_power + (site.full_power - site.idle_power) * busy + site.host_power
    return tdp_w * share * site.pue
