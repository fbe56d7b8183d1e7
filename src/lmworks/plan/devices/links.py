"""Time of a collective on a cluster: curves measured inside one node, a model of NCCL's rings and trees between nodes.

Inside a node, `Curve` has a few knots of time over message size for each collective and each measured number of
ranks, straight between them in log-log: one line (latency plus bytes over bandwidth) would miss by a fifth where
NCCL changes protocol, at about 1 to 8 MiB. `validation/fit_links.py` makes `links.toml`, which also holds the
errors. Message bytes are the whole buffer, gathered or not yet reduced, as nccl-tests counts them.

Between nodes, `Network` is modelled (`network.py`): a ring or, for all-reduce, two trees; the faster one counts.

A profile may have fits of α and β (`alpha_beta.py`), which are then used instead of the knots, and collectives that
`lmworks bench collectives` measured between nodes, which are used instead of `Network`.

`Fabric` joins both. A group of `ranks` members lies at global ranks first, first + stride, first + 2·stride …, and
ranks fill node after node: tensor parallelism (stride 1) stays inside one, data parallelism with a stride as long as
a node has one member in each, and every member its own network port. Groups of the same kind that run at once do not
share a link. Bytes, ranks and strides may be arrays.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...spec import Cluster, Gpu, SpecError
from ..case import Number
from .alpha_beta import AlphaBeta
from .network import Cost, Network

LINKS = Path(__file__).with_name("links.toml")
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send")
# A broadcast is a gather whose one piece goes round; a send is half of an exchange between two.
SAME_CURVE = {"broadcast": "all-gather", "send": "all-to-all"}
RINGS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")  # steps grow with the ranks


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
    fits: Mapping[str, Mapping[int, AlphaBeta]] = field(default_factory=dict)  # used instead of the knots

    @classmethod
    def from_dict(cls, name: str, table: Mapping[str, Any], sizes: NDArray[Any]) -> Self:
        """From `links.toml`, or from the profile of a machine, where times stand in microseconds."""
        times = {
            kind: {int(ranks): np.array(us) * 1e-6 for ranks, us in table[kind].items()}
            for kind in KINDS
            if kind in table
        }
        fits = {
            kind: {int(ranks): AlphaBeta.from_dict(fit) for ranks, fit in by_ranks.items()}
            for kind, by_ranks in table.get("fit", {}).items()
        }
        gpus, tag = tuple(table["gpus"]), table.get("tag", "fitted")
        return cls(name, table["link_gbs"], gpus, table["fabric"], sizes, times, tag, fits)

    def seconds(self, kind: str, wire: Number, ranks: Number) -> Number:
        """Of a collective in which every rank sends `wire` bytes.

        Between measured numbers of ranks, log-time follows the logarithm of the ranks. Every rank beyond them adds the
        step that the last measured ones added to a message of almost nothing; where one number of ranks was measured,
        its latency over the steps of its ring.
        """
        for other in (SAME_CURVE.get(kind, kind), "all-reduce"):  # as many bytes on the wire, in another message
            kind = kind if kind in self.seconds_at else other
        table = self.seconds_at[kind]
        counts = np.array(sorted(table))
        wire, ranks = np.broadcast_arrays(wire, ranks)
        fits, at_counts = self.fits.get(kind, {}), []
        for n in counts:
            nbytes = wire / wire_share(kind, n)
            fit = fits.get(n)
            at_counts.append(
                np.log(np.maximum(fit.seconds(nbytes), 1e-9)) if fit else self.log_seconds(table[n], nbytes)
            )
        known = np.stack(at_counts)
        if len(counts) == 1:
            only = int(counts[0])
            step = fits[only].latency / (only - 1) if only in fits and kind in RINGS else 0.0
            return np.exp(known[0]) + np.maximum(ranks - only, 0) * step
        grid, place = np.log2(counts), np.log2(np.maximum(ranks, counts[0]))
        low = np.clip(np.searchsorted(grid, place, side="right") - 1, 0, len(counts) - 2)
        below = np.take_along_axis(known, low[np.newaxis], axis=0)[0]
        above = np.take_along_axis(known, low[np.newaxis] + 1, axis=0)[0]
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


# --- a cluster -------------------------------------------------------------------------------------------


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
    between: Curve | None = None  # measured between nodes, one rank of a group on each: in place of `network`
    slower: tuple[float, float] = (1.0, 1.0)  # factors on seconds inside a machine and between machines

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        gpu: Gpu,
        curve: Curve | None = None,
        nodes: int = 0,
        between: Curve | None = None,
        slower: tuple[float, float] = (1.0, 1.0),
    ) -> Self:
        """The links of a cluster, or of `nodes` of its kind.

        `curve` and `between` are what was measured on it, if anything was: inside a node, and between nodes; `slower`
        what was fitted to runs on it.
        """
        kind = gpu.fabric if cluster.fabric == "auto" else cluster.fabric
        link = (gpu.host_gbs or gpu.link_gbs) if kind == "pcie" else gpu.link_gbs
        if kind != "torus" and link and curve is None:
            curve = curve_for(gpu.name if kind == gpu.fabric else "", kind, link)
        domain = max(cluster.gpus_per_node, cluster.domain or gpu.domain)
        nic = cluster.nic_gbs or gpu.nic_gbs
        network = Network.of(read_links()["network"], cluster.network, nic) if nic else None
        world = (nodes or cluster.nodes) * cluster.gpus_per_node
        return cls(gpu.name, kind, domain, world, link, gpu.host_gbs, curve, network, between, slower)

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
        inside = bool(self.inside(ranks, stride))
        curve = self.curve if inside else self.between
        if curve is None or self.gpu not in curve.gpus:
            return "modelled"
        known, members = curve.seconds_at.get(kind, {}), 1 if inside else int(self.members(ranks, stride))
        return curve.tag if -(-ranks // members) <= max(known, default=0) else "modelled"

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
        took = took * np.where(self.inside(ranks, stride), *self.slower)
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
        if self.between is not None:
            return self.across_measured(kind, nbytes, ranks, members, local)
        net = self.network
        if net is None:
            raise SpecError(
                f"cluster.nic_gbs: the network of {self.gpu} machines is not in the catalogue; "
                f"give it in GB/s for each accelerator, e.g. cluster.nic_gbs=50 for 400 Gb/s"
            )
        if kind == "send":
            return net.send(nbytes)
        if kind == "all-to-all":
            inside = self.within(kind, nbytes * members / ranks, members)
            return net.exchange(nbytes, ranks, members, inside).seconds
        ring = self.ring_between(net, kind, nbytes, ranks, members, local).seconds
        if kind != "all-reduce":
            return ring
        return np.minimum(ring, net.tree(nbytes, ranks, members, self.split(kind, local, members)).seconds)

    def dispatch(self, nbytes: Number, across: Number, ranks: Number, stride: Number = 1) -> Number:
        """An all-to-all that sends `across` of its bytes, not all, to other machines, which pass them on inside.

        `nbytes` and `across` are counted as a whole buffer is: with the share that stays where it is.
        """
        members = self.members(ranks, stride)
        if self.kind == "torus" or self.between is not None or np.all(members >= ranks):
            return self.seconds("all-to-all", np.where(self.inside(ranks, stride), nbytes, across), ranks, stride)
        assert self.network is not None
        nbytes, across, ranks = np.broadcast_arrays(nbytes, across, ranks)
        inside = self.within("all-to-all", nbytes, members)
        between = self.network.exchange(across, ranks, members, inside).seconds
        return np.where(ranks > 1, np.where(members < ranks, between, inside), 0.0)

    def ring_between(
        self, net: Network, kind: str, nbytes: Number, ranks: Number, members: NDArray[Any], local: Number
    ) -> Cost:
        """A ring over machines; no faster than the same links are inside one, which the longer ring passes too."""
        share = wire_share(kind, ranks)
        least = local * (share / wire_share(kind, np.maximum(members, 2)))
        ring = net.ring(kind, nbytes * share, ranks, members, self.rates_within[members])
        beta = np.where(ring.seconds < least, np.maximum(ring.beta, least - ring.alpha), ring.beta)
        return Cost(ring.alpha, beta, np.maximum(ring.seconds, least))

    def split(self, kind: str, seconds: Number, ranks: Number) -> Cost:
        """Measured seconds within a machine as latency, which a message of one byte takes, and the rest."""
        alpha = np.minimum(seconds, self.within(kind, 1.0, ranks))
        return Cost(alpha, seconds - alpha, seconds)

    def across_measured(self, kind: str, nbytes: Number, ranks: Number, members: NDArray[Any], local: Number) -> Number:
        """A ring through all ranks crosses from node to node on one link, which was measured with one rank on each."""
        assert self.between is not None
        machines = 2 if kind == "send" else np.ceil(ranks / members)
        network = self.between.seconds(kind, nbytes * wire_share(kind, ranks), machines)
        further = wire_share(kind, ranks) / wire_share(kind, np.maximum(members, 2))
        return network if kind == "send" else np.maximum(local * further, network)

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
