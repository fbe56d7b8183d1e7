"""What a collective costs on a cluster: which links it crosses follows from where its ranks stand.

A group of `ranks` members lies at global ranks first, first + stride, first + 2·stride …, and ranks fill machine
after machine. Tensor parallelism (stride 1) so stays inside one; data parallelism with a stride as long as a machine
has one member in each, and every member its own network port.

`Fabric.seconds` takes numpy arrays of bytes, ranks and strides, for the search. Groups of the same kind that run at
once do not share a link: members of a machine are in one group or each has its own port.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...spec import Cluster, Gpu, SpecError
from ..case import Number
from .between import Network
from .curves import KINDS, Curve, curve_for, read_links, wire_share


@dataclass(frozen=True, eq=False)
class Fabric:
    gpu: str
    kind: str  # nvswitch, mesh, bridge, pcie or torus
    domain: int  # accelerators joined by the fast links
    world: int
    link_gbs: float  # 0: nobody published it
    host_gbs: float
    curve: Curve | None  # none for a torus
    network: Network | None  # none where no speed is known

    @classmethod
    def of(cls, cluster: Cluster, gpu: Gpu, curve: Curve | None = None) -> Self:
        """The links of a cluster; `curve` is what was measured on it, if anything was."""
        kind = gpu.fabric if cluster.fabric == "auto" else cluster.fabric
        link = (gpu.host_gbs or gpu.link_gbs) if kind == "pcie" else gpu.link_gbs
        if kind != "torus" and link and curve is None:
            curve = curve_for(gpu.name if kind == gpu.fabric else "", kind, link)
        domain = max(cluster.gpus_per_node, cluster.domain or gpu.domain)
        nic = cluster.nic_gbs or gpu.nic_gbs
        network = Network.of(read_links()["network"], cluster.network, nic) if nic else None
        return cls(gpu.name, kind, domain, cluster.gpus, link, gpu.host_gbs, curve, network)

    def members(self, ranks: Number, stride: Number) -> NDArray[Any]:
        """How many of a group stand in one machine, or in what its fast links join."""
        return np.maximum(1, np.minimum(ranks, self.domain // stride)).astype(int)

    def inside(self, ranks: Number, stride: Number) -> Number:
        """Whether a group crosses no network."""
        return (self.members(ranks, stride) >= ranks) | (self.kind == "torus")

    def link(self, ranks: int, stride: int) -> str:
        """What a group's slowest messages go over: the fabric of a machine, or the network between them."""
        return self.kind if self.inside(ranks, stride) else "network"

    def tag(self, kind: str, ranks: int, stride: int = 1) -> str:
        """Where the figure comes from: measured here, fitted to measurements of such links, or modelled."""
        if self.curve is None or self.gpu not in self.curve.gpus or not self.inside(ranks, stride):
            return "modelled"
        known = self.curve.seconds_at.get(kind, {})
        return self.curve.tag if ranks <= max(known, default=0) else "modelled"

    def seconds(self, kind: str, nbytes: Number, ranks: Number, stride: Number = 1) -> Number:
        """Of one collective of `nbytes`, the whole buffer (of a send, the message), among `ranks` at `stride`."""
        if kind not in KINDS:
            raise SpecError(f"collective {kind!r} is not one of: {', '.join(KINDS)}")
        nbytes, ranks, stride = np.broadcast_arrays(np.asarray(nbytes, float), np.asarray(ranks, int), stride)
        if self.kind == "torus":
            took = self.on_torus(kind, nbytes, ranks)
        else:
            members = self.members(ranks, stride)
            took = self.within(kind, nbytes, np.minimum(members, 2) if kind == "send" else members)
            if np.any(members < ranks):
                took = np.where(members < ranks, self.across(kind, nbytes, ranks, members, took), took)
        took = np.where((ranks > 1) & (nbytes > 0), took, 0.0)
        return took if took.ndim else float(took)

    def within(self, kind: str, nbytes: Number, ranks: Number) -> Number:
        """Inside a machine: the curve's, at this link's speed instead of the measured one. Nothing for one rank.

        A curve that was measured on the very machine needs no other speed.
        """
        if not np.any(ranks > 1):
            return np.zeros(np.broadcast(nbytes, ranks).shape)
        if self.curve is None:
            raise SpecError(f"{self.gpu}: link_gbs is not in the catalogue; give it in cluster.catalogue")
        several = np.maximum(ranks, 2)
        slower = 1.0 if self.curve.tag == "measured" else self.curve.link_gbs / self.link_between(several)
        took = self.curve.seconds(kind, nbytes * wire_share(kind, several) * slower, several)
        return np.where(ranks > 1, took, 0.0)

    def link_between(self, ranks: Number) -> Number:
        """GB/s of a rank to the others of its group: a mesh gives each pair a link, a bridge joins two."""
        if self.kind == "mesh" and self.gpu not in getattr(self.curve, "gpus", ()):
            return self.link_gbs * np.minimum(1.0, (ranks - 1) / max(1, self.domain - 1))
        if self.kind == "bridge":
            return np.where(ranks > 2, self.host_gbs or self.link_gbs, self.link_gbs)
        return self.link_gbs

    def across(self, kind: str, nbytes: Number, ranks: Number, members: NDArray[Any], local: Number) -> Number:
        """Between machines; `local` is what the same message takes among the members of one."""
        net = self.network
        if net is None:
            raise SpecError(
                f"cluster.nic_gbs: the network of {self.gpu} machines is not in the catalogue; "
                f"give it in GB/s for each accelerator, e.g. cluster.nic_gbs=50 for 400 Gb/s"
            )
        if kind == "send":
            return net.send(nbytes)
        if kind == "all-to-all":
            return net.exchange(nbytes, ranks, members, self.within(kind, nbytes * members / ranks, members))
        further = wire_share(kind, ranks) / wire_share(kind, np.maximum(members, 2))  # a longer ring, the same links
        ring = np.maximum(local * further, net.ring(kind, nbytes, ranks, members, self.rates_within[members]))
        if kind != "all-reduce":
            return ring
        return np.minimum(ring, net.tree(nbytes, ranks, members, local))

    @functools.cached_property
    def rates_within(self) -> NDArray[Any]:
        """Bytes a second that each of 0, 1, 2 … members of a machine sends, in a very large gather."""
        if self.domain == 1:
            return np.full(2, np.inf)
        members, step = np.arange(2, self.domain + 1), 2.0**30
        took = self.within("all-gather", 2 * step, members) - self.within("all-gather", step, members)
        return np.concatenate([[np.inf, np.inf], step * wire_share("all-gather", members) / took])

    def on_torus(self, kind: str, nbytes: Number, ranks: Number) -> Number:
        """Rings along the axes of a torus, both ways at once; a large group uses several axes together.

        An all-to-all must carry every byte a quarter of the way round. Nothing here was measured.
        """
        if not self.link_gbs:
            raise SpecError(f"{self.gpu}: link_gbs is not in the catalogue; give it in cluster.catalogue")
        table = read_links()["torus"]
        axes = table["axes"].get(self.gpu, 3)
        side = max(2.0, self.world ** (1 / axes))
        used = np.clip(np.ceil(np.log(np.maximum(ranks, 2)) / np.log(side) - 1e-6), 1, axes)
        rate = self.link_gbs * 1e9 / axes * table["efficiency"]
        hops = used * np.minimum(ranks, side) / 2 * (2 if kind == "all-reduce" else 1)
        if kind == "send":
            moving = nbytes / (rate / 2)
        elif kind == "all-to-all":
            moving = nbytes * np.minimum(ranks, side) / 4 / rate
        else:
            moving = nbytes * wire_share(kind, ranks) / (rate * used)
        return (table["start"] + table["hop"] * (1 if kind == "send" else hops)) * 1e-6 + moving
