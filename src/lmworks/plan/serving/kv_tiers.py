"""When tiers of the KV cache pay, and when prefill apart from decode does.

A prefix of n tokens is n·c bytes, with c the bytes of a token in the cache. To fetch it takes

    fetch(n) = latency + n·c / bandwidth

where blocks cross each link after the other (a disk, then the bus to the device; a network, then the bus): latencies
add, and so do the inverse bandwidths. A disk or a network gives no more than what a fetch reads and verifies
(FETCHED), and the bus gives a share of its lanes' rate (BUS_SHARE). To compute it takes

    P(n) = Σ over chunks of step(0, 0, new, before)        saved(n) = P(n + 16) − step(0, 0, 16, n)

the steps of a prompt alone; a hit leaves a block to compute. Few tokens add little to a step that reads all weights, so
short prefixes save little, and attention makes P(n) grow faster than n. The break-even length is the shortest prefix
from which on fetch(n) < saved(n). With a constant time a token p that is n* = latency / (p − c/bandwidth), and never
where the link moves a token slower than the device computes it.

Prefill apart: with b sequences a mixed replica has tpot = D(b) + b/output·A(b) (`batching`); a decode server D(b),
and the transfer adds fetch(input) to the first token. Device-seconds of a request are 1/rate of a mixed replica, or
output·D(b)/b + P(input), each with the largest b whose time between tokens meets the SLO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...spec import SpecError
from .batching import Lengths, chunks, steady
from .inference import Deployment

BLOCK = 16  # tokens
MAX_BLOCKS = 2**16  # a prefix that does not pay by then does not
LATENCY = {"host": 50e-6, "disk": 200e-6, "shared": 1e-3, "peer": 1e-3}  # seconds, one request at a time
# Measured beside an H200 (benchmarks/kv_tiers.py). Of the bus: 45 of 64 GB/s. Of a fetch, bytes/s that its eight
# threads read and verify: files from the page cache, and over sockets, where both ends compute checksums.
BUS_SHARE = 0.7
FETCHED = {"disk": 2.4e9, "shared": 1.2e9, "peer": 1.4e9}


@dataclass(frozen=True)
class Link:
    """What blocks cross on their way to the device."""

    name: str
    latency: float  # seconds
    bandwidth: float  # bytes/s

    def then(self, other: Link) -> Link:
        """Both, one after the other."""
        if not self.bandwidth or not other.bandwidth:
            raise SpecError(f"the bandwidth of {self.name} is not known: give it in GB/s")
        both = 1 / (1 / self.bandwidth + 1 / other.bandwidth)
        return Link(self.name, self.latency + other.latency, both)


@dataclass(frozen=True)
class Payoff:
    """Of one tier."""

    link: Link
    token_bytes: float
    break_even: int | None  # tokens; None: never
    fetch: float  # seconds, of a prefix
    compute: float  # that it saves

    @property
    def speedup(self) -> float:
        return self.compute / self.fetch


@dataclass(frozen=True)
class Split:
    """Prefill apart from decode, against mixed replicas, under an SLO of the time between tokens."""

    mixed_batch: float
    mixed_tpot: float
    mixed_tpot_alone: float  # of the same batch without prompts: the rest is interference
    mixed_seconds: float  # device-seconds of a request
    split_batch: float
    split_tpot: float
    split_seconds: float
    prefill_share: float  # of the split's devices
    transfer: float  # seconds that are added to the first token

    @property
    def pays(self) -> bool:
        return self.split_seconds < self.mixed_seconds


def prefill_seconds(deployment: Deployment, tokens: int) -> float:
    new, before = np.array(chunks(tokens, deployment.chunk), dtype=float).T
    return float(deployment.step(0, 0, new, before).sum())


def fetch_seconds(link: Link, token_bytes: float, tokens: int) -> float:
    return link.latency + tokens * token_bytes / link.bandwidth


def saved_seconds(deployment: Deployment, tokens: int) -> float:
    """By a hit of so many tokens; a block behind them is computed in any case."""
    rest = float(deployment.step(0, 0, BLOCK, tokens))
    return prefill_seconds(deployment, tokens + BLOCK) - rest


def break_even(deployment: Deployment, link: Link) -> int | None:
    """In whole blocks."""
    token_bytes = token_bytes_of(deployment)

    def pays(blocks: int) -> bool:
        tokens = blocks * BLOCK
        return fetch_seconds(link, token_bytes, tokens) < saved_seconds(deployment, tokens)

    high = MAX_BLOCKS
    if not pays(high):
        return None
    while high > 1 and pays(high // 2):
        high //= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high * BLOCK


def fitted_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency and seconds a token through measured times: least squares of relative errors."""
    tokens, seconds = np.array(points, dtype=float).T
    rows = np.stack([1 / seconds, tokens / seconds], axis=1)
    (latency, a_token), *_ = np.linalg.lstsq(rows, np.ones(len(seconds)), rcond=None)
    return float(latency), float(a_token)


def token_bytes_of(deployment: Deployment) -> float:
    """Of all ranks of a replica: each has its part of the link, too."""
    return float(deployment.cache.token_bytes)


def payoff(deployment: Deployment, link: Link, tokens: int) -> Payoff:
    """Of a hit of so many tokens."""
    token_bytes = token_bytes_of(deployment)
    return Payoff(
        link,
        token_bytes,
        break_even(deployment, link),
        fetch_seconds(link, token_bytes, tokens),
        saved_seconds(deployment, tokens),
    )


def links_of(deployment: Deployment, disk_gbs: float, network_gbs: float, host_gbs: float = 0.0) -> list[Link]:
    """Of every tier, down to the device. The bus and the network are the catalogue's where none are given."""
    gpu = deployment.gpu
    bus = Link("host", LATENCY["host"], 1e9 * (host_gbs or BUS_SHARE * gpu.host_gbs))
    network = 1e9 * (network_gbs or gpu.nic_gbs)
    if not bus.bandwidth:
        raise SpecError(f"{gpu.name}: host_gbs is not in the catalogue; give --host-gbs")
    given = {"disk": 1e9 * disk_gbs, **({"shared": network, "peer": network} if network else {})}
    return [bus, *(Link(name, LATENCY[name], min(rate, FETCHED[name])).then(bus) for name, rate in given.items())]


def split(deployment: Deployment, lengths: Lengths, tpot: float, link: Link, max_batch: int) -> Split | None:
    """None where even one sequence alone misses the time between tokens."""
    batches = np.arange(1, max_batch + 1, dtype=float)
    point = steady(deployment, lengths, batches)
    alone: Any = point.decode
    mixed, decode = largest(point.tpot, tpot), largest(alone, tpot)
    if mixed is None or decode is None:
        return None
    prompt = prefill_seconds(deployment, lengths.input)
    answer = lengths.output * float(alone[decode]) / float(batches[decode])
    return Split(
        float(batches[mixed]),
        float(point.tpot[mixed]),
        float(alone[mixed]),
        1 / float(point.rate[mixed]),
        float(batches[decode]),
        float(alone[decode]),
        answer + prompt,
        prompt / (answer + prompt),
        fetch_seconds(link, token_bytes_of(deployment), lengths.input),
    )


def largest(times: Any, limit: float) -> int | None:
    """Index of the last time within the limit."""
    fitting = np.flatnonzero(times <= limit)
    return int(fitting[-1]) if len(fitting) else None
