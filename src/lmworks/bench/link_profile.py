"""Measured collectives as tables of a machine's profile: µs by size, and fits of α and β, for later plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..plan.devices.alpha_beta import AlphaBeta, fit_alpha_beta
from ..plan.devices.profile import Profile
from ..spec import SpecError, recognise
from .collectives import Row, monotone
from .kernel_timing import device_name, digits

IN_PLACE = ("all-reduce", "broadcast", "all-gather")  # as DDP and FSDP2 call them; a reduce-scatter has two buffers
MIN_FIT_SIZES = 4  # fewer points are interpolated


def fits_of(rows: Iterable[Row]) -> list[tuple[Row, AlphaBeta]]:
    """One fit for each op, group, dtype and place with enough sizes; the first row of each stands for it."""
    series: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        series.setdefault((row.op, row.group, row.ranks, row.dtype, row.in_place), []).append(row)
    return [
        (points[0], fit_alpha_beta([row.bytes for row in points], [1e-6 * row.time_us for row in points]))
        for points in series.values()
        if len({row.bytes for row in points}) >= MIN_FIT_SIZES
    ]


def links_table(rows: Sequence[Row], sizes: Sequence[int], device: torch.device) -> dict[str, Any]:
    """For `Curve.from_dict`, from the first number format that was measured."""
    rows = [row for row in rows if row.dtype == rows[0].dtype]
    times: dict[str, dict[str, list[float]]] = {}
    fits: dict[str, dict[str, Any]] = {}
    for op in dict.fromkeys(row.op for row in rows):
        places = {row.in_place for row in rows if row.op == op}
        place = op in IN_PLACE if op in IN_PLACE and True in places else min(places)
        chosen = [row for row in rows if row.op == op and row.in_place == place]
        for ranks in dict.fromkeys(row.ranks for row in chosen):
            points = [row for row in chosen if row.ranks == ranks][: len(sizes)]  # a send: of the first group
            times.setdefault(op, {})[str(ranks)] = monotone([row.time_us for row in points])
            for _, fit in fits_of(points):
                fits.setdefault(op, {})[str(ranks)] = fit.to_dict()
    gpu = recognise(device_name(device)) if device.type == "cuda" else None
    most = max((row for row in rows if row.op == "all-reduce"), key=lambda row: (row.ranks, row.bytes))
    table = {
        "gpus": [gpu.name if gpu else device_name(device)],
        "fabric": gpu.fabric if gpu else "pcie",
        "link_gbs": digits(most.busbw),  # the largest all-reduce over all ranks
        "sizes": list(sizes),
        "tag": "measured",
        **times,
    }
    return {**table, "fit": fits} if fits else table


def check_profile(profile: Profile, device: torch.device, ops: Sequence[str]) -> None:
    """Before the measurement: whether it can go into this profile."""
    here = device_name(device)
    if profile.machine.name != here:
        raise SpecError(f"--profile was measured on {profile.machine.name!r}, and this machine is {here!r}")
    if "all-reduce" not in ops:
        raise SpecError("--profile: a plan needs all-reduce; add it to --ops")


def with_measured(
    profile: Profile, rows: Sequence[Row], sizes: Sequence[int], device: torch.device, nodes: int
) -> Profile:
    """The profile with what was measured inside a node, between nodes, or both; the rest stays."""
    crossing = {"inter"} | ({"all"} if nodes > 1 and all_on_own_node(rows, nodes) else set())
    between = [row for row in rows if row.group in crossing and nodes > 1]
    inside = [row for row in rows if row.group == "intra" or (nodes == 1 and row.group != "inter")]
    if inside:
        profile = replace(profile, links=links_table(inside, sizes, device))
    if between:
        profile = replace(profile, network=links_table(between, sizes, device))
    return profile


def all_on_own_node(rows: Sequence[Row], nodes: int) -> bool:
    return any(row.group == "all" and row.ranks == nodes for row in rows)
