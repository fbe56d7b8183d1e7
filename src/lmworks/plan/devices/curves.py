"""How long a collective takes inside one machine: curves fitted to measured tables, one for each kind of link.

A curve is a few knots of time over message size, for each collective and each measured number of ranks, and is
straight between them in log-log. One line (latency plus bytes over bandwidth) would miss by a fifth where NCCL
changes protocol, at about 1 to 8 MiB. `validation/fit_links.py` makes `links.toml`, which also holds the errors.

Message bytes are the whole buffer, gathered or not yet reduced, as nccl-tests counts them.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..case import Number

LINKS = Path(__file__).with_name("links.toml")
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send")
# A broadcast is a gather whose one piece goes round; a send is half of an exchange between two.
SAME_CURVE = {"broadcast": "all-gather", "send": "all-to-all"}


def wire_share(kind: str, ranks: Number) -> Number:
    """Bytes a rank sends for each byte of the message, on a ring: time depends on these, nearly alone."""
    if kind in ("broadcast", "send"):
        return np.ones_like(ranks, dtype=float)
    return (2.0 if kind == "all-reduce" else 1.0) * (ranks - 1) / ranks


@dataclass(frozen=True, eq=False)
class Curve:
    name: str
    link_gbs: float  # of the accelerators it was measured on
    gpus: tuple[str, ...]  # names in the catalogue
    fabric: str
    sizes: NDArray[Any]  # message bytes of the knots
    seconds_at: Mapping[str, Mapping[int, NDArray[Any]]]  # by collective and number of ranks
    tag: str = "fitted"  # or "measured": on the very machine

    @classmethod
    def from_dict(cls, name: str, table: Mapping[str, Any], sizes: NDArray[Any]) -> Self:
        """From `links.toml`, or from the profile of a machine, where times stand in microseconds."""
        times = {
            kind: {int(ranks): np.array(us) * 1e-6 for ranks, us in table[kind].items()}
            for kind in KINDS
            if kind in table
        }
        gpus, tag = tuple(table["gpus"]), table.get("tag", "fitted")
        return cls(name, table["link_gbs"], gpus, table["fabric"], sizes, times, tag)

    def seconds(self, kind: str, wire: Number, ranks: Number) -> Number:
        """Of a collective in which every rank sends `wire` bytes.

        Between measured numbers of ranks, log-time follows the logarithm of the ranks. Every rank beyond them adds the
        step that the last measured ones added to a message of almost nothing.
        """
        for other in (SAME_CURVE.get(kind, kind), "all-reduce"):  # as many bytes on the wire, in another message
            kind = kind if kind in self.seconds_at else other
        table = self.seconds_at[kind]
        counts = np.array(sorted(table))
        wire, ranks = np.broadcast_arrays(wire, ranks)
        known = np.stack([self.log_seconds(table[n], wire / wire_share(kind, n)) for n in counts])
        if len(counts) == 1:
            return np.exp(known[0])
        grid, place = np.log2(counts), np.log2(np.maximum(ranks, counts[0]))
        low = np.clip(np.searchsorted(grid, place, side="right") - 1, 0, len(counts) - 2)
        below, above = (np.take_along_axis(known, index[np.newaxis], axis=0)[0] for index in (low, low + 1))
        share = np.minimum((place - grid[low]) / (grid[low + 1] - grid[low]), 1)
        before, last = counts[-2:]
        step = max(0.0, table[last][0] - table[before][0]) / (last - before)
        return np.exp(below + share * (above - below)) + np.maximum(ranks - last, 0) * step

    def log_seconds(self, times: NDArray[Any], nbytes: Number) -> NDArray[Any]:
        """Log of the seconds of a message; above the last knot, time grows at the rate between the last two."""
        inside = np.interp(np.log(np.maximum(nbytes, 1)), np.log(self.sizes), np.log(times))
        if not np.any(nbytes > self.sizes[-1]):
            return inside
        rate = (times[-1] - times[-2]) / (self.sizes[-1] - self.sizes[-2])
        more = np.maximum(nbytes - self.sizes[-1], 0) * rate
        return np.log(np.exp(inside) + more)


@functools.cache
def read_links(path: Path = LINKS) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


@functools.cache
def curves() -> dict[str, Curve]:
    table = read_links()
    sizes = np.array(table["sizes"], dtype=float)
    return {name: Curve.from_dict(name, entry, sizes) for name, entry in table["curve"].items()}


def curve_for(gpu: str, fabric: str, link_gbs: float) -> Curve:
    """The one measured on this accelerator; otherwise, for its kind of fabric, the one whose links are most alike.

    A mesh has no switch that adds up, so NVSwitch machines of the last generation without one stand for it.
    """
    for curve in curves().values():
        if gpu in curve.gpus:
            return curve
    family = {"mesh": "nvlink3", "bridge": "pcie5", "pcie": "pcie5"}.get(fabric)
    if family:
        return curves()[family]
    switched = [curve for curve in curves().values() if curve.fabric == "nvswitch"]
    return min(switched, key=lambda curve: abs(np.log(curve.link_gbs / link_gbs)))
