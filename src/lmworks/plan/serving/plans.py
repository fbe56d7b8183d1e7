"""How to serve a model: what fits, how fast it answers, how many replicas a request rate needs, and what a token costs.

Every tensor-parallel degree of one machine (or rack) is tried. A replica may run as many sequences as keep the promised
times at the chosen quantile; a request rate is divided by what that yields. The cheapest degree wins.

Chance enters twice. Sequences in flight are Poisson-distributed around Little's mean (requests come independently),
so the quantile of the batch is b + z·√b: that batch must fit, and its time between tokens is the promised one. Prompts
wait for each other as in an M/M/1 queue (`batching.queueing_seconds`). Bursts beyond that, and machines that fail, need
more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from ...spec import Gpu, SpecError
from ...spec.serving import OBJECTIVES, parse_slo
from .batching import Lengths, Point, queueing_seconds, steady
from .inference import Deployment, Rates, read_constants
from .memory_fit import ServingMemory, serving_memory
from .served_model import ServedModel

UNLOADED = 0.01  # sequences in flight, on average, of a replica that has hardly anything to do


@dataclass(frozen=True)
class Slo:
    """Promised seconds, kept for `quantile` of requests; infinity promises nothing."""

    ttft: float = math.inf
    tpot: float = math.inf
    e2e: float = math.inf
    quantile: float = 0.95

    def __post_init__(self) -> None:
        for key in OBJECTIVES:
            if not getattr(self, key) > 0:
                raise SpecError(f"slo: {key} = {getattr(self, key):g} s must be more than 0")
        if not 0.5 <= self.quantile < 1:
            raise SpecError(f"quantile = {self.quantile:g} must be at least 0.5 and below 1, e.g. 0.95")

    @classmethod
    def parse(cls, text: str, quantile: float = 0.95) -> Slo:
        """'ttft=0.5,tpot=0.05,e2e=10', in seconds; any may be left out."""
        return cls(quantile=quantile, **parse_slo(text))

    def met_by(self, at: Times) -> Any:
        return (at.ttft_quantile <= self.ttft) & (at.tpot_quantile <= self.tpot) & (at.e2e_quantile <= self.e2e)


@dataclass(frozen=True)
class Demand:
    lengths: Lengths
    slo: Slo
    rate: float = 0.0  # requests a second, in all; 0: as many as one replica can take
    max_batch: int = 1024  # the engine's own limit on sequences

    def __post_init__(self) -> None:
        if not (self.rate >= 0 and math.isfinite(self.rate)):
            raise SpecError(f"rate = {self.rate:g} requests a second must be at least 0")
        if self.max_batch < 1:
            raise SpecError(f"max_batch = {self.max_batch} must be at least 1")


@dataclass(frozen=True)
class Times:
    """What requests see, in seconds: on average, and at the promised quantile."""

    ttft: Any
    tpot: Any
    ttft_quantile: Any
    tpot_quantile: Any
    e2e: Any  # the first token and those after it
    e2e_quantile: Any  # both at their quantile: no less than the sum's own


@dataclass(frozen=True)
class Plan:
    """One way to serve the demand. `refused` says why it does not; then what follows it is None or 0."""

    deployment: Deployment
    demand: Demand
    serving_memory: ServingMemory
    max_batch: int  # sequences of full length that fit at once
    max_context: int  # tokens of one sequence alone
    idle: Times  # one request at a time
    refused: str = ""
    full: Point | None = None  # as many as fit, no promise kept
    point: Point | None = None  # the steady state of each replica
    times: Times | None = None
    replicas: int = 0
    price_hour: float = 0.0  # $ of one accelerator

    @property
    def gpus(self) -> int:
        return self.replicas * self.deployment.ranks

    @property
    def rate(self) -> float:
        """Requests a second that are served."""
        return self.demand.rate or (self.replicas * float(self.point.rate) if self.point else 0.0)

    @property
    def dollars_hour(self) -> float:
        return self.gpus * self.price_hour

    def dollars_per_million(self) -> tuple[float, float, float]:
        """$ for a million tokens: of prompts, of answers, of both together.

        A replica's time is shared out by what a request takes of it: what its prompt adds, and its part of each step.
        """
        if not self.point or not self.rate:
            return 0.0, 0.0, 0.0
        lengths, request = self.demand.lengths, self.dollars_hour / 3600 / self.rate
        decode = lengths.output * float(self.point.decode) / max(1.0, float(self.point.batch))
        prompt = request * float(self.point.added) / (float(self.point.added) + decode)
        answer = request - prompt
        return 1e6 * prompt / lengths.input, 1e6 * answer / lengths.output, 1e6 * request / lengths.total


def plan(deployment: Deployment, demand: Demand, price_hour: float = 0.0) -> Plan:
    """Every batch is tried, in steps of less than 2%; the largest that keeps the promise says what a replica yields."""
    lengths, slo = demand.lengths, demand.slo
    space, cache = serving_memory(deployment), deployment.cache
    most = min(demand.max_batch, cache.sequences(space.cache, lengths.total))
    context = cache.longest(space.cache, limit=deployment.served.context)
    idle = times(deployment, demand, UNLOADED)
    price = price_hour or deployment.gpu.price_hour
    found = Plan(deployment, demand, space, most, context, idle, price_hour=price)
    if most < 1:
        return replace(found, refused=why_no_memory(found))
    found = replace(found, full=steady(deployment, lengths, float(most)))
    if not slo.met_by(idle):
        return replace(found, refused=f"even one request at a time takes {observed(idle, slo)}")
    batches = np.geomspace(UNLOADED, most, 800)
    at = times(deployment, demand, batches)
    kept = (batch_quantile(batches, slo.quantile) <= most) & slo.met_by(at)
    rates = np.maximum.accumulate(steady(deployment, lengths, batches).rate)
    best = float(rates[kept].max())
    replicas = max(1, math.ceil(demand.rate / best))
    batch = float(np.interp(demand.rate / replicas if demand.rate else best, rates, batches))
    at = times(deployment, demand, batch)
    return replace(found, point=steady(deployment, lengths, batch), times=at, replicas=replicas)


def batch_quantile(batch: Any, quantile: float) -> Any:
    """Sequences that are in flight at the same time, at a quantile; `batch` on average."""
    return np.maximum(1.0, batch + NormalDist().inv_cdf(quantile) * np.sqrt(batch))


def times(deployment: Deployment, demand: Demand, batch: Any) -> Times:
    """A request waits for the prompts before it, then half a step, then for its own prompt."""
    lengths, quantile = demand.lengths, demand.slo.quantile
    at = steady(deployment, lengths, np.maximum(1.0, batch))
    share = steady(deployment, lengths, batch).prefill_share
    own = 1e-3 * deployment.rates.request_ms + np.minimum(1.0, batch) * at.decode / 2 + at.prefill
    mean = queueing_seconds(share, at.added)
    ttft = own + np.maximum(mean, queueing_seconds(share, at.added, quantile))  # a rare wait can be below its mean
    tpot = steady(deployment, lengths, batch_quantile(batch, quantile)).tpot
    return Times(
        ttft=own + mean,
        tpot=at.tpot,
        ttft_quantile=ttft,
        tpot_quantile=tpot,
        e2e=own + mean + (lengths.output - 1) * at.tpot,
        e2e_quantile=ttft + (lengths.output - 1) * tpot,
    )


def why_no_memory(found: Plan) -> str:
    space, d = found.serving_memory, found.deployment
    if space.cache <= 0:
        need = space.weights + space.workspace + space.context
        usable = f"the {space.usable / 1e9:.4g} GB that can be used"
        return f"weights and workspace take {need / 1e9:.4g} GB a GPU, more than {usable}"
    need = float(d.cache.held(found.demand.lengths.total))
    return (
        f"{space.cache / 1e9:.3g} GB are left for the KV cache, and one sequence of {found.demand.lengths.total:,} "
        f"tokens takes {need / 1e9:.3g} GB; {found.max_context:,} tokens fit"
    )


def observed(at: Times, slo: Slo) -> str:
    whole = f", e2e {at.e2e_quantile:.3g} s" if slo.e2e != math.inf else ""
    return f"ttft {at.ttft_quantile:.3g} s, tpot {at.tpot_quantile:.3g} s{whole}"


# --- the choice -------------------------------------------------------------------------------------------


def degrees(served: ServedModel, gpu: Gpu) -> list[int]:
    """Tensor-parallel degrees within a machine, or the rack that fast links join, that share the heads evenly."""
    joined = max(gpu.per_node, gpu.domain) if gpu.link_gbs else 1

    def even(tp: int) -> bool:
        heads = served.heads % tp == 0 and (served.kv_heads % tp == 0 or tp % served.kv_heads == 0)
        return heads and all(size % 1 == 0 for linear in served.linears for size in linear.on(tp))

    return [tp for tp in (1, 2, 4, 8, 16, 32, 64) if tp <= joined and even(tp)]


def candidates(
    served: ServedModel, gpu: Gpu, demand: Demand, *, engine: str = "vllm", weights: str = "bf16", kv: str = "bf16",
    tp: int = 0, ep: bool = False, price_hour: float = 0.0,
) -> list[Plan]:  # fmt: skip
    """A plan for each degree (or for `tp` alone), cheapest first, those that do not work last."""
    if demand.lengths.total > served.context:
        raise SpecError(
            f"input + output = {demand.lengths.total:,} tokens, but {served.name} is made for {served.context:,}"
        )
    possible = degrees(served, gpu)
    if tp and tp not in possible:
        raise SpecError(
            f"tp = {tp} is not possible for {served.name} on {gpu.name}: it can be {', '.join(map(str, possible))}"
        )
    rates = Rates.of(engine)
    found = [
        plan(
            Deployment(served, gpu, rates, tp=n, ep=n if ep and served.experts else 1, weights=weights, kv=kv),
            demand, price_hour,
        )
        for n in ([tp] if tp else possible)
    ]  # fmt: skip
    return sorted(found, key=lambda p: (bool(p.refused), cost(p), p.deployment.tp))


def cost(found: Plan) -> float:
    """$ per million tokens, or accelerators per request where no price is known."""
    if found.refused:
        return math.inf
    return found.dollars_per_million()[2] or found.gpus / found.rate


def tag(gpu: Gpu) -> str:
    """Seconds are 'fitted' on accelerators that the measured engines ran on, 'modelled' from a datasheet on others."""
    return "fitted" if gpu.name in read_constants()["fitted_on"] else "modelled"
