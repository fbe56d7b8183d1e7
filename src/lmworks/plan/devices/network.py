"""Time of a collective between nodes: a model of NCCL's rings and trees, as a latency and a bandwidth term.

A ring goes through all ranks (whole bandwidth, as many steps as ranks); of an all-reduce there are trees between nodes,
too. Each has a low-latency protocol for small messages and one for large. Latencies are those of NCCL's own tuner
(src/graph/tuning.cc), in `links.toml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..case import Number


@dataclass(frozen=True, eq=False)
class Cost:
    """Seconds of a collective, and the two terms it is made of: `alpha`, latency of its rounds, and `beta`, bytes over
    bandwidth. Where chunks follow one another the terms overlap, and `seconds` is less than their sum.
    """

    alpha: Number
    beta: Number
    seconds: Number

    @classmethod
    def total(cls, alpha: Number, beta: Number) -> Self:
        return cls(alpha, beta, alpha + beta)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.alpha + other.alpha, self.beta + other.beta, self.seconds + other.seconds)

    def or_faster(self, other: Cost, start: Number) -> Cost:
        """The faster of two protocols; either begins with a latency of `start`."""
        first = np.less_equal(self.seconds, other.seconds)
        alpha, beta = np.where(first, self.alpha, other.alpha), np.where(first, self.beta, other.beta)
        return Cost(start + alpha, beta, start + np.minimum(self.seconds, other.seconds))


@dataclass(frozen=True)
class Network:
    """What joins machines. Times in seconds; `small` and `large` are the two protocols."""

    nic: float  # bytes a second of one accelerator's share, as reached
    hops: float  # latency of this network beside InfiniBand's
    start: float  # of any collective
    ring_inside: Mapping[str, float]  # one step of the ring between neighbours in a machine
    ring_across: Mapping[str, float]  # and from one machine to the next
    tree_across: Mapping[str, float]
    small_share: float  # of the bandwidth that the quick protocol leaves, on a ring
    small_share_tree: float
    plateau: float  # steps of a large all-reduce take longer by this
    peer: float  # each further peer of an all-to-all
    overlap: float  # how sharply the slower of two overlapped parts wins: the exponent of a norm

    @classmethod
    def of(cls, table: Mapping[str, Any], network: str, nic_gbs: float) -> Self:
        """From `links.toml`, where times stand in microseconds."""
        kind, steps = table["kind"][network], dict[str, dict[str, float]]()
        for name in ("ring_inside", "ring_across", "tree_across"):
            steps[name] = {protocol: us * 1e-6 for protocol, us in table[name].items()}
        return cls(
            nic=nic_gbs * 1e9 * kind["efficiency"],
            hops=kind["hops"],
            start=table["start"] * 1e-6,
            small_share=table["small_share"],
            small_share_tree=table["small_share_tree"],
            plateau=table["plateau"],
            peer=table["peer"] * 1e-6,
            overlap=table["overlap"],
            **steps,
        )

    def together(self, first: Number, second: Number) -> Number:
        """Two parts that overlap, chunk by chunk: a little more than the slower one."""
        most = np.maximum(np.maximum(first, second), 1e-12)
        return most * ((first / most) ** self.overlap + (second / most) ** self.overlap) ** (1 / self.overlap)

    def ring(self, kind: str, wire: Number, ranks: Number, members: Number, inside_rate: Number) -> Cost:
        """Every rank sends `wire` bytes. `members` of them share a machine, each with its network port; `inside_rate`
        is the links' there.
        """
        turns = 2 if kind == "all-reduce" else 1
        across = turns * (np.ceil(ranks / members) - 1)
        inside = turns * (ranks - 1) - across
        moving = wire / np.minimum(members * self.nic, inside_rate)
        quick = inside * self.ring_inside["small"] + across * self.ring_across["small"] * self.hops
        wait = inside * self.ring_inside["large"] + across * self.ring_across["large"] * self.hops
        wait = wait * (self.plateau if kind == "all-reduce" else 1.0)
        large = Cost(wait, moving, self.together(wait, moving))
        return Cost.total(quick, moving / self.small_share).or_faster(large, self.start)

    def tree(self, nbytes: Number, ranks: Number, members: Number, inside: Cost, trees: int = 2) -> Cost:
        """An all-reduce over two trees, each with half of the bytes, or over one; `inside`: within one machine.

        Between two machines every byte crosses once each way. Among more, a machine in the middle of one tree sends
        three bytes for each: one up, two down; with two trees it is at the end of the other, and sends two.
        """
        machines = np.ceil(ranks / members)
        hops = 2 * np.log2(machines) * self.hops
        moving = nbytes * np.where(machines > 2, 4 - trees, 1) / (members * self.nic)
        small = inside + Cost.total(hops * self.tree_across["small"], moving / self.small_share_tree)
        wait = hops * self.tree_across["large"]
        beta = self.together(inside.beta, moving)
        large = Cost(inside.alpha + wait, beta, wait + self.together(inside.seconds, moving))
        return small.or_faster(large, np.where(members > 1, 0, self.start))

    def exchange(self, nbytes: Number, ranks: Number, members: Number, inside: Number) -> Cost:
        """An all-to-all: everyone's share for other machines leaves through its own port."""
        moving = nbytes * (ranks - members) / ranks / self.nic
        wait = self.start + self.ring_across["large"] * self.hops + (ranks - members) * self.peer
        return Cost.total(wait, self.together(inside, moving))

    def send(self, nbytes: Number) -> Number:
        small = self.ring_across["small"] * self.hops + nbytes / (self.nic * self.small_share)
        return self.start + np.minimum(small, self.ring_across["large"] * self.hops + nbytes / self.nic)
