"""Every layout that can answer a question: "this model, on these GPUs, with this batch".

A layout is a few words (ZeRO stage, schedule, recompute, offload) and a few numbers (the degrees and the micro-batch).
The words are looped over; the numbers of all layouts with the same words are one `Case` of arrays. The rules are those
of `spec.layout`, as masks; a test compares the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...spec import Cluster, Gpu, ModelSpec, ParallelSpec, PrecisionSpec, RunSpec, SpecError, components
from ...spec.layout import IN_ROUNDS, LOOPED, RESIDENT_BLOCKS, SPLIT_BACKWARD, V_SHAPED
from ...spec.lora import block_adapter_weights, uneven_pieces
from ...spec.precision import FP8_ALIGNED
from ...spec.run import SCHEDULES
from ..case import Case
from ..cluster_request import cluster_and_gpu
from ..exact.optimizers import optimizer_of
from ..memory.reserve import RISK, safe_bytes
from ..software import COMPILED, EAGER, with_precision

STRATEGIES = {0: "ddp", 1: "zero", 2: "zero", 3: "fsdp2"}
SEQUENCES = 4  # of a step for each GPU, where the batch is not said
MICRO_BATCHES = 32  # at most: more never made a product faster
MIN_TOKENS = 1024  # of a sequence on one context-parallel rank: with fewer, messages take longer than the work
VIRTUAL = (2, 3, 4, 5, 6, 8)  # stages that a rank of a looped schedule may have
NUMBERS = ("tp", "cp", "pp", "ep", "dp_replicate", "dp_shard", "micro_batch", "virtual")
WORDS = ("zero", "schedule", "recompute", "offload")
OFFLOAD_GIB = "offload_activations"  # GiB: a number that is worked out for a layout, not tried
RECOMPUTE = ("none", "selective", "mlp", "full")
Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class SearchProblem:
    model: ModelSpec
    cluster: Cluster
    gpu: Gpu
    seq: int
    global_batch: int
    dtype: str = "bf16"
    compile: bool = True
    risk: float = RISK  # of running out of memory, that is still taken
    pinned: Mapping[str, Any] = field(default_factory=dict)  # NUMBERS, WORDS and AWAY that are not open
    kept: PrecisionSpec = field(default_factory=PrecisionSpec)  # what weights and states are kept in
    optimizer: str = "adamw"
    adapters: tuple[components.Weight, ...] = ()  # of a block, which alone are trained
    frozen_base: str = ""  # format of the frozen weights under them
    # What no candidate changes: cp_method, reshard, prefetch and bucket_mb.
    constant: ParallelSpec = field(default_factory=ParallelSpec)

    @property
    def precision(self) -> PrecisionSpec:
        return self.kept.replace(dtype=self.dtype)

    @property
    def world(self) -> int:
        return self.cluster.gpus

    @property
    def safe_bytes(self) -> float:
        """Bytes that a layout may be predicted to reserve."""
        return safe_bytes(self.gpu, self.risk)


def problem_of(base: RunSpec, cluster: str = "", *, own: Cluster | None = None, **more: Any) -> SearchProblem:
    """A spec on a cluster as people type it, or on its own; what the spec says of networks and prices holds on both.

    `own`: the spec's cluster, where `base` is without it (its layout has one rank). `more`: compile, risk and pinned,
    as in Question.
    """
    machines, gpu = cluster_and_gpu(own or base.cluster, cluster)
    dtype, data = base.precision.dtype, base.data
    if not gpu.peak_flops(dtype):
        known = [name for name in ("bf16", "fp16", "fp32") if gpu.peak_flops(name)]
        raise SpecError(f"{gpu.name} has no known speed in {dtype}; it has one in {' and '.join(known) or 'nothing'}")
    batch = data.global_batch if data.given["global_batch"] else SEQUENCES * machines.gpus
    more |= {"kept": base.precision, "optimizer": optimizer_of(base), "constant": base.parallel}
    adapters = block_adapter_weights(base.model, base.lora, base.adapters)
    more |= {"adapters": tuple(adapters), "frozen_base": base.lora.base}
    return SearchProblem(base.model, machines, gpu, data.seq, batch, dtype, **more)


@dataclass(frozen=True)
class LayoutKind:
    """What all layouts of one case have in common."""

    zero: int
    schedule: str
    recompute: str
    offload: str


def layout_kinds(problem: SearchProblem) -> Iterator[LayoutKind]:
    schedules = [name for name in SCHEDULES if not (problem.compile and name in SPLIT_BACKWARD)]
    for chosen in itertools.product(range(4), schedules, RECOMPUTE, ("none", "optimizer", "full")):
        found = LayoutKind(*chosen)
        if found.offload == "full" and found.zero < 3:
            continue
        if all(getattr(found, key) == value for key, value in problem.pinned.items() if key in WORDS):
            yield found


def degree_grid(problem: SearchProblem) -> Columns:
    """Degrees whose product is the world, sharded in every way, and micro-batches that divide the batch."""
    world, model, pinned = problem.world, problem.model, problem.pinned
    rows: list[tuple[int, ...]] = []
    inside = [n for n in divisors(world) if n <= problem.cluster.gpus_per_node or n == pinned.get("tp")]
    if problem.frozen_base:
        inside = [n for n in inside if not uneven_pieces(model, n)]
    if problem.dtype == "fp8":  # which tensor parallelism does not combine with
        inside = [1] if model.hidden % FP8_ALIGNED == 0 else []
    tried = sorted({1, *VIRTUAL, pinned.get("virtual", 1)})
    along = [n for n in divisors(world) if n == 1 or problem.seq // n >= MIN_TOKENS or n == pinned.get("cp")]
    for tp, cp, pp in itertools.product(inside, along, divisors(world)):
        if world % (tp * cp * pp) or not divides(model, problem.seq, tp, cp, pp, problem.constant.cp_method):
            continue
        dp = world // (tp * cp * pp)
        if problem.global_batch % dp:
            continue
        each = [n for n in divisors(problem.global_batch // dp) if n <= MICRO_BATCHES]
        if problem.dtype == "fp8":
            each = [n for n in each if n * problem.seq // cp % FP8_ALIGNED == 0]
        experts = [n for n in divisors(model.experts or 1) if n <= dp * cp]
        stages = [n for n in tried if n == 1 or 1 < pp <= model.layers // n]
        for ep, shard, micro, virtual in itertools.product(experts, divisors(dp), each, stages):
            rows.append((tp, cp, pp, ep, dp // shard, shard, micro, virtual))
    table = np.array(rows, dtype=np.int64).reshape(-1, len(NUMBERS))
    columns = {name: table[:, index] for index, name in enumerate(NUMBERS)}
    keep = np.ones(len(table), dtype=bool)
    for name in pinned.keys() & {*NUMBERS}:
        keep &= columns[name] == pinned[name]
    return {name: column[keep] for name, column in columns.items()}


def divides(model: ModelSpec, seq: int, tp: int, cp: int, pp: int, method: str = "ring") -> bool:
    """Whether heads, MLP, vocabulary, sequence and layers divide (`spec.layout.tensor`, `context`)."""
    ffn = model.expert_ffn if model.experts else model.ffn
    whole = not (model.heads % tp or model.vocab % tp or ffn % tp)
    shared = not (model.kv_heads % tp and tp % model.kv_heads)
    return whole and shared and seq // cp % tp == 0 and pp <= model.layers and spans_nodes(model, seq, tp, cp, method)


def spans_nodes(model: ModelSpec, seq: int, tp: int, cp: int, method: str) -> bool:
    """Whether a sequence can be spread over context-parallel ranks (`spec.layout.context`)."""
    if cp == 1:
        return True
    if model.capacity or seq % (2 * cp if method == "ring" else cp):
        return False
    heads, kv_heads = model.heads // tp, max(1, model.kv_heads // tp)
    return method == "ring" or not (heads % cp or (kv_heads % cp and cp % kv_heads))


def legal(problem: SearchProblem, kind: LayoutKind, columns: Columns) -> NDArray[np.bool_]:
    """Which rows can be combined with these words (`spec.layout.pipeline`, `expert`, `data`)."""
    pp, virtual, shard, replicate = (columns[name] for name in ("pp", "virtual", "dp_shard", "dp_replicate"))
    dp = shard * replicate
    batches = problem.global_batch // (columns["micro_batch"] * dp)
    if kind.zero == 0:
        fits = shard == 1
    elif kind.zero < 3:
        fits = (shard > 1) & (replicate == 1)
    else:
        fits = (shard > 1) | (columns["cp"] > 1)  # FSDP2 shards over context-parallel ranks too
    fits &= np.where(shard == 1, dp, shard) * columns["cp"] % columns["ep"] == 0
    if problem.pinned.get(OFFLOAD_GIB):
        fits &= offload_steps(problem.model, pp)
    if kind.schedule == "1f1b":
        return fits & (virtual == 1) & ((pp == 1) | (batches >= pp))
    fits &= pp > 1
    if kind.schedule in V_SHAPED:
        fits &= virtual == 2
    else:
        fits &= (virtual > 1) == (kind.schedule in LOOPED)
    if kind.schedule == "dualpipev":
        fits &= batches >= 2 * pp
    if kind.schedule in IN_ROUNDS:
        fits &= batches % np.maximum(1, batches // pp) == 0
    return fits


def offload_steps(model: ModelSpec, pp: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether activations can wait in host memory (`spec.layout.host`)."""
    return (pp == 1) & (model.layers > RESIDENT_BLOCKS)


def cases(problem: SearchProblem) -> Iterator[tuple[LayoutKind, Case]]:
    """All legal layouts, in cases of equal words; sequence parallelism goes with tensor parallelism."""
    columns = degree_grid(problem)
    constant = problem.constant
    software = with_precision(COMPILED if problem.compile else EAGER, problem.precision)
    for kind in layout_kinds(problem):
        allowed = legal(problem, kind, columns)
        if not allowed.any():
            continue
        chosen: dict[str, Any] = {name: column[allowed] for name, column in columns.items()}
        dp = chosen["dp_replicate"] * chosen["dp_shard"]
        yield (
            kind,
            Case(
                problem.model,
                problem.gpu,
                software,
                problem.seq,
                accumulation=problem.global_batch // (chosen["micro_batch"] * dp),
                **chosen,
                **vars(kind),
                sp=True,  # of one rank it is nothing
                dtype=problem.dtype,
                reshard=constant.reshard,
                prefetch=constant.prefetch,
                bucket_mb=constant.bucket_mb,
                cp_method=constant.cp_method,
                optimizer=problem.optimizer,
                adapters=problem.adapters,
                frozen_base=problem.frozen_base,
                offload_activations=problem.pinned.get(OFFLOAD_GIB, 0.0),
                cluster=problem.cluster,
            ),
        )


def run_of(problem: SearchProblem, layout: Mapping[str, Any], base: RunSpec) -> RunSpec:
    """`base` on this cluster with this layout (NUMBERS, WORDS and OFFLOAD_GIB): a run that `lmworks train` takes."""
    axes = ("tp", "cp", "pp", "ep", "dp_replicate", "dp_shard", "schedule", "recompute", "offload", OFFLOAD_GIB)
    zero = layout["zero"]
    parallel = {"dp": 0, "strategy": STRATEGIES[zero], "zero": zero if zero in (1, 2) else 0, "sp": layout["tp"] > 1}
    parallel |= {"virtual_stages": layout["virtual"], "compile": problem.compile}
    parallel |= {axis: layout[axis] for axis in axes}
    sizes = {"micro_batch": layout["micro_batch"], "global_batch": problem.global_batch, "seq": problem.seq}
    data = base.to_dict()
    for table, changes in {"parallel": parallel, "data": sizes, "precision": problem.precision.to_dict()}.items():
        data[table] = {**data[table], **changes}
    data["cluster"] = problem.cluster.to_dict()
    return RunSpec.from_dict(data)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
