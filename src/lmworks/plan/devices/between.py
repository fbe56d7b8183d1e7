"""How long a collective takes between machines: modelled, since the tables at hand end at the machine's door.

Two ways to go round, as NCCL has them, and the faster one counts:
- a ring through all ranks: whole bandwidth, but as many steps as ranks, so thousands of ranks wait for each other;
- for all-reduce, a tree between machines: reduced inside each, a few hops across, and handed out inside again.
Each has a quick protocol for small messages and a thrifty one for large. The latencies are those of NCCL's own tuner
(src/graph/tuning.cc); `links.toml` holds them, and what published runs on 2 to 128 machines say of the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..case import Number
from .curves import wire_share


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
        kind = table["kind"][network]
        figures: dict[str, Any] = {
            name: table[name] for name in ("small_share", "small_share_tree", "plateau", "overlap")
        }
        figures |= {name: table[name] * 1e-6 for name in ("start", "peer")}
        for steps in ("ring_inside", "ring_across", "tree_across"):
            figures[steps] = {protocol: us * 1e-6 for protocol, us in table[steps].items()}
        return cls(nic=nic_gbs * 1e9 * kind["efficiency"], hops=kind["hops"], **figures)

    def together(self, first: Number, second: Number) -> Number:
        """Two parts that overlap, chunk by chunk: a little more than the slower one."""
        most = np.maximum(np.maximum(first, second), 1e-12)
        return most * ((first / most) ** self.overlap + (second / most) ** self.overlap) ** (1 / self.overlap)

    def ring(self, kind: str, nbytes: Number, ranks: Number, members: Number, inside_rate: Number) -> Number:
        """`members` of the ranks share a machine, each with its network port; `inside_rate` is the links' there."""
        turns = 2 if kind == "all-reduce" else 1
        across = turns * (np.ceil(ranks / members) - 1)
        inside = turns * (ranks - 1) - across
        moving = nbytes * wire_share(kind, ranks) / np.minimum(members * self.nic, inside_rate)
        wait = {
            protocol: inside * self.ring_inside[protocol] + across * self.ring_across[protocol] * self.hops
            for protocol in ("small", "large")
        }
        slow = self.plateau if kind == "all-reduce" else 1.0
        small = wait["small"] + moving / self.small_share
        return self.start + np.minimum(small, self.together(wait["large"] * slow, moving))

    def tree(self, nbytes: Number, ranks: Number, members: Number, inside: Number) -> Number:
        """An all-reduce; `inside` is what it takes within one machine.

        Between two machines every byte crosses once each way. Among more, a machine in the middle of one tree and
        at the end of the other sends two bytes for each.
        """
        machines = np.ceil(ranks / members)
        hops = 2 * np.log2(machines) * self.hops
        moving = nbytes * np.where(machines > 2, 2, 1) / (members * self.nic)
        small = hops * self.tree_across["small"] + inside + moving / self.small_share_tree
        large = hops * self.tree_across["large"] + self.together(inside, moving)
        return np.where(members > 1, 0, self.start) + np.minimum(small, large)

    def exchange(self, nbytes: Number, ranks: Number, members: Number, inside: Number) -> Number:
        """An all-to-all: everyone's share for other machines leaves through its own port."""
        moving = nbytes * (ranks - members) / ranks / self.nic
        wait = self.ring_across["large"] * self.hops + (ranks - members) * self.peer
        return self.start + wait + self.together(inside, moving)

    def send(self, nbytes: Number) -> Number:
        small = self.ring_across["small"] * self.hops + nbytes / (self.nic * self.small_share)
        return self.start + np.minimum(small, self.ring_across["large"] * self.hops + nbytes / self.nic)
