"""Seconds of each algorithm on a cluster, split into latency (α) and bandwidth (β).

A ring, the two trees and a pairwise exchange between machines are those that the planner prices a step with
(`devices/network.py`), and the parts of a hierarchical one are collectives as it prices them (`Fabric.seconds`). The
others have the same latencies and bandwidths, multiplied by their rounds and bytes (`traffic.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...spec import Cluster, Gpu, SpecError
from ..case import Number
from ..devices.links import Fabric, read_links
from ..devices.network import Cost, Network
from ..devices.profile import profile_for
from .traffic import ALGORITHMS, COLLECTIVES, Algorithm, Traffic

GIB = 2.0**30


@dataclass(frozen=True)
class Group:
    """Ranks of a collective and where they stand: `members` of them in each machine."""

    fabric: Fabric
    net: Network
    ranks: int
    stride: int
    members: int
    switch_adds: bool  # NVLS
    network_adds: bool  # SHARP

    @classmethod
    def of(cls, cluster: Cluster, gpu: Gpu, ranks: int, stride: int = 1) -> Group:
        if ranks < 2:
            raise SpecError(f"--ranks {ranks}: a collective needs at least 2")
        if ranks * stride > cluster.gpus:
            what = f"{ranks} ranks" if stride == 1 else f"{ranks} ranks at a stride of {stride}"
            raise SpecError(f"--ranks {ranks}: the cluster has {cluster.gpus:,} accelerators, too few for {what}")
        measured = profile_for(gpu, cluster.profile, cluster.catalogue).curve if cluster.profile else None
        fabric = Fabric.of(cluster, gpu, measured)
        if fabric.kind == "torus":
            raise SpecError(f"--cluster: {gpu.name} has a torus; algorithms are compared on switched machines")
        members = int(fabric.members(ranks, stride))
        if ranks % members:
            raise SpecError(f"--ranks {ranks}: they do not fill machines, of which each has {members} of them")
        net = fabric.network
        if members < ranks and net is None:
            fabric.seconds("all-reduce", 1.0, ranks, stride)  # says what is missing
        net = net or Network.of(read_links()["network"], cluster.network, math.inf)
        return cls(fabric, net, ranks, stride, members, gpu.nvls, cluster.network == "infiniband")

    @property
    def machines(self) -> int:
        return self.ranks // self.members

    @property
    def link_rate(self) -> float:
        """Bytes a second that a rank sends to its neighbour in the machine."""
        return float(self.fabric.rates_within[self.members])

    def planned(self, collective: str, nbytes: Number) -> Number:
        """What the planner takes for this collective in a step."""
        return self.fabric.seconds(collective.replace("_", "-"), nbytes, self.ranks, self.stride)


def why_not(group: Group, collective: str, algorithm: str) -> str:
    """Why this group cannot use an algorithm; empty: it can."""
    if algorithm == "hierarchical" and (group.machines == 1 or group.members == 1):
        return "one level: all ranks are in one machine" if group.machines == 1 else "one level: a rank in each machine"
    if collective == "all_gather" and algorithm == "recursive_doubling" and group.ranks & (group.ranks - 1):
        return f"{group.ranks} ranks are no power of two"
    if algorithm == "in_network":
        if group.members > 1 and not group.switch_adds:
            return f"the links of {group.fabric.gpu} do not add up (NVLS: NVSwitch from Hopper on)"
        if group.machines > 1 and not group.network_adds:
            return "the network does not add up (SHARP: InfiniBand)"
    return ""


def cost(group: Group, collective: str, algorithm: Algorithm, nbytes: Number) -> Cost:
    """Of `nbytes`, the whole buffer; they may be an array."""
    nbytes = np.asarray(nbytes, float)
    name, traffic = algorithm.name, algorithm.traffic(group.ranks, group.members)
    if name == "hierarchical":
        return two_levels(group, collective, nbytes)
    if name == "in_network":
        return in_network(group, nbytes)
    if group.machines > 1 and name in ("ring", "tree", "double_tree", "pairwise"):
        return between_machines(group, collective, name, nbytes, traffic)
    if name in ("ring", "tree", "double_tree"):
        return pipelined(group, collective, nbytes, traffic)
    return round_by_round(group, nbytes, traffic)


def between_machines(group: Group, collective: str, name: str, nbytes: Number, traffic: Traffic) -> Cost:
    """By the planner's own formulas."""
    fabric, net, kind = group.fabric, group.net, collective.replace("_", "-")
    members = np.asarray(group.members)
    if name == "pairwise":
        inside = fabric.within(kind, nbytes * group.members / group.ranks, members)
        return net.exchange(nbytes, group.ranks, members, inside)
    local = fabric.within(kind, nbytes, members)
    if name == "ring":
        return fabric.ring_between(net, kind, nbytes, group.ranks, members, local)
    if kind == "all-reduce":
        return net.tree(nbytes, group.ranks, members, fabric.split(kind, local, members), 2 if "double" in name else 1)
    return pipelined(group, collective, nbytes, traffic)


def pipelined(group: Group, collective: str, nbytes: Number, traffic: Traffic) -> Cost:
    """Chunks follow one another along a ring or a tree: latency and transfer overlap in the protocol for large ones."""
    net, slow = group.net, group.net.plateau if collective == "all_reduce" else 1.0
    alpha, beta = latency(group, traffic), transfer(group, nbytes, traffic, overlap=True)
    small = Cost.total(alpha["small"], beta / net.small_share)
    large = Cost(alpha["large"] * slow, beta, net.together(alpha["large"] * slow, beta))
    return small.or_faster(large, net.start)


def round_by_round(group: Group, nbytes: Number, traffic: Traffic) -> Cost:
    """Every round waits for the one before it."""
    alpha, beta = latency(group, traffic), transfer(group, nbytes, traffic, overlap=False)
    small = Cost.total(alpha["small"], beta / group.net.small_share)
    return small.or_faster(Cost.total(alpha["large"], beta), group.net.start)


def latency(group: Group, traffic: Traffic) -> dict[str, float]:
    """Of all rounds, by protocol."""
    net = group.net
    return {
        protocol: traffic.inside_rounds * net.ring_inside[protocol]
        + traffic.across_rounds * net.ring_across[protocol] * net.hops
        for protocol in ("small", "large")
    }


def transfer(group: Group, nbytes: Number, traffic: Traffic, overlap: bool) -> Number:
    inside = nbytes * traffic.inside / group.link_rate if traffic.inside else 0.0 * nbytes
    across = nbytes * traffic.across / group.net.nic
    return np.maximum(inside, across) if overlap else inside + across


def two_levels(group: Group, collective: str, nbytes: Number) -> Cost:
    """Collectives inside each machine and between ranks of the same place, one after another."""
    m, near, far = group.members, group.stride, group.stride * group.members

    def part(kind: str, size: Number, ranks: int, stride: int) -> Cost:
        seconds = group.fabric.seconds(kind, size, ranks, stride)
        alpha = np.minimum(seconds, group.fabric.seconds(kind, 1.0, ranks, stride))
        return Cost(alpha, seconds - alpha, np.asarray(seconds))

    if collective == "all_to_all":
        return part("all-to-all", nbytes, m, near) + part("all-to-all", nbytes, group.machines, far)
    between = part(collective.replace("_", "-"), nbytes / m, group.machines, far)
    if collective != "all_reduce":
        return part(collective.replace("_", "-"), nbytes, m, near) + between
    return part("reduce-scatter", nbytes, m, near) + between + part("all-gather", nbytes, m, near)


def in_network(group: Group, nbytes: Number) -> Cost:
    """An all-reduce that switches add up: in a machine at the rate that NVLS was measured with, between machines a port
    sends its share of the machine's sum once.
    """
    table, net = read_links()["in_network"], group.net
    alpha, inside = 0.0, 0.0 * nbytes
    if group.members > 1:
        alpha += table["inside"] * 1e-6
        step = group.fabric.within("all-reduce", 2 * GIB, np.asarray(group.members)) - group.fabric.within(
            "all-reduce", GIB, np.asarray(group.members)
        )
        inside = nbytes * step / GIB
    if group.machines == 1:
        return Cost.total(alpha, inside)
    alpha += table["across"] * 1e-6 * net.hops
    across = nbytes / group.members / net.nic
    return Cost.total(alpha, net.together(inside, across))


def algorithms(collective: str) -> list[Algorithm]:
    if collective not in COLLECTIVES:
        raise SpecError(f"collective {collective!r} is not one of: {', '.join(COLLECTIVES)}")
    return ALGORITHMS[collective]
