"""How to serve a model: what fits, how fast it answers, how many replicas a request rate needs, and what a token costs.

Every tensor-parallel degree of one machine (or rack) is tried. A replica may run as many sequences as keep the SLO
at the chosen quantile; a request rate is divided by what that yields. The cheapest degree wins. Where none works,
the error says which change would.

Chance enters twice. Sequences in flight are Poisson-distributed around Little's mean (requests come independently),
so the quantile of the batch is b + z·√b: that batch must fit, and its time between tokens must keep the SLO. Prompts
wait for each other as in an M/M/1 queue (`batching.queueing_seconds`). Bursts beyond that, and machines that fail,
need more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from ...spec import Gpu, SpecError, catalogue
from ...spec.serving import OBJECTIVES, parse_slo
from ..memory.reserve import capacity, reserve
from .batching import Lengths, Point, queueing_seconds, steady
from .inference import Deployment, Rates, read_constants
from .served_model import WEIGHT_FORMATS, ServedModel, compute_format

UTILISATION = 0.9  # of the memory is what engines take by default; the rest is left to fragmentation and neighbours
SAMPLED_SEQUENCES = 256  # sequences whose logits the engine makes room for at once


@dataclass(frozen=True)
class ServingMemory:
    """Bytes on one accelerator. `cache` is what is left; below 0 the weights alone do not fit."""

    memory: float
    usable: float
    weights: float
    workspace: float
    context: float  # CUDA's, its kernels, NCCL

    @property
    def cache(self) -> float:
        return self.usable - self.weights - self.workspace - self.context


def serving_memory(deployment: Deployment) -> ServingMemory:
    memory = capacity(deployment.gpu)
    return ServingMemory(
        memory, UTILISATION * memory, deployment.weight_bytes, workspace(deployment), reserve().context
    )


def workspace(deployment: Deployment) -> float:
    """Activations of the largest step: residual streams, the widest product's ends, and fp32 logits to sample from."""
    served, tp = deployment.served, deployment.tp
    widest = max(sum(linear.on(tp)) for linear in served.linears)
    if served.experts:  # every visit has its own copy of a token, in and out
        inner = served.experts.size / served.hidden  # gate, up and down of one expert
        widest = max(widest, served.experts.top_k * (2 * served.hidden + inner / deployment.ranks))
    logits = 4.0 * SAMPLED_SEQUENCES * served.head.on(tp)[1]
    return 2.0 * deployment.chunk * (4 * served.hidden + 1.5 * widest) + logits


# --- replicas --------------------------------------------------------------------------------------------


UNLOADED = 0.01  # sequences in flight, on average, of a replica that has hardly anything to do


@dataclass(frozen=True)
class Slo:
    """Seconds that `quantile` of requests must meet; infinity is no objective."""

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
    """What requests see, in seconds: on average, and at the SLO's quantile."""

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
    full: Point | None = None  # as many as fit, whatever the SLO
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
    """Every batch is tried, in steps of less than 2%; the largest that meets the SLO says what a replica yields."""
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


# --- advice ----------------------------------------------------------------------------------------------


NARROWER_FORMATS = ("fp8", "int8", "int4", "fp4")


def choose(served: ServedModel, gpu: Gpu, demand: Demand, **options: Any) -> list[Plan]:
    """Plans, cheapest first; refused with advice where none works."""
    found = candidates(served, gpu, demand, **options)
    if found[0].refused:
        raise SpecError(advice(found, served, gpu, demand, options))
    return found


def advice(found: list[Plan], served: ServedModel, gpu: Gpu, demand: Demand, options: dict[str, Any]) -> str:
    fitting = [plan for plan in found if plan.max_batch]
    others = more_ranks(served, gpu, demand, options) + narrower(served, gpu, demand, options)
    others += larger(served, gpu, demand, options)
    if not fitting:
        largest = max(found, key=lambda plan: plan.serving_memory.cache)
        ranks = largest.deployment.ranks
        problem = f"{served.name} does not fit on {ranks} × {gpu.name}: {largest.refused}"
        ways = others
    else:
        fastest = min(fitting, key=lambda plan: excess(plan, demand.slo))
        tp = fastest.deployment.tp
        problem = f"{served.name} on {gpu.name} cannot meet the SLO: with tp = {tp}, {fastest.refused}"
        ways = [f"--slo {slo_misses(fastest, demand.slo)}", *others]
    nearest = f"nearest that work: {', or '.join(ways)}" if ways else "nothing in the catalogue does it"
    return f"{problem}; {nearest}"


def excess(plan: Plan, slo: Slo) -> float:
    return max(getattr(plan.idle, f"{name}_quantile") / getattr(slo, name) for name in OBJECTIVES)


def slo_misses(plan: Plan, slo: Slo) -> str:
    """The SLO that could be met instead, a tenth above what an idle replica does."""
    kept = {name: max(getattr(slo, name), 1.1 * getattr(plan.idle, f"{name}_quantile")) for name in OBJECTIVES}
    return ",".join(f"{key}={value:.2g}" for key, value in kept.items() if value != float("inf"))


def more_ranks(served: ServedModel, gpu: Gpu, demand: Demand, options: dict[str, Any]) -> list[str]:
    """The degree that works, where the user fixed one that does not."""
    if not options.get("tp"):
        return []
    best = candidates(served, gpu, demand, **{**options, "tp": 0})[0]
    return [] if best.refused else [f"--tp {best.deployment.tp}"]


def narrower(served: ServedModel, gpu: Gpu, demand: Demand, options: dict[str, Any]) -> list[str]:
    """The widest narrower format that this hardware multiplies or widens, and that works."""
    now = WEIGHT_FORMATS[options.get("weights", "bf16")].bytes
    for weights in NARROWER_FORMATS:
        form = WEIGHT_FORMATS[weights]
        if form.bytes >= now or (weights == "fp4" and compute_format("fp4", gpu) != "fp4"):
            continue
        best = candidates(served, gpu, demand, **{**options, "weights": weights})[0]
        if not best.refused:
            return [f"--weights {weights} (tp = {best.deployment.tp})"]
    return []


def larger(served: ServedModel, gpu: Gpu, demand: Demand, options: dict[str, Any]) -> list[str]:
    """The other accelerators that work, the two cheapest per token."""
    ways: list[tuple[float, str]] = []
    for other in catalogue().values():
        if other.name == gpu.name or not (other.price_hour and other.bandwidth_gbs and other.memory_gb):
            continue
        try:
            best = candidates(served, other, demand, **{**options, "tp": 0, "price_hour": 0.0})[0]
        except SpecError:  # a figure that it would take is not in the catalogue
            continue
        if not best.refused:
            short = (other.alias or other.name).split()[0]
            ways.append((best.dollars_per_million()[2], f"--gpu {short} (tp = {best.deployment.tp})"))
    return [way for _, way in sorted(ways)[:2]]
