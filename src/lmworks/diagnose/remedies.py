"""The remedy of each cause: overrides of a spec where a key does it, and a sentence for any program."""

from __future__ import annotations

from collections.abc import Callable

from ..spec import RunSpec
from .causes import Cause, Figures

Remedy = tuple[list[str], str]


def more_workers(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    workers = 4 if spec is None else max(4, 2 * spec.data.workers)
    return [f"data.workers={workers}"], "read and decode batches in other processes (a DataLoader's num_workers)"


def fewer_launches(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    overrides = [] if spec is not None and spec.parallel.compile else ["parallel.compile=true"]
    if spec is not None:
        overrides.append(f"data.micro_batch={2 * spec.data.micro_batch}")
    return overrides, "fewer and larger kernels: torch.compile, CUDA graphs, a larger micro-batch"


def fewer_synchronisations(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    return [], "read values of the device (.item(), .cpu(), a printed loss) every few steps only; copy without waiting"


def faster_communication(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    sharded = spec is not None and spec.parallel.strategy.startswith("fsdp")
    if cause.kind == "latency":
        return (["parallel.reshard=false"] if sharded else ["parallel.bucket_mb=100"]), "fewer and larger messages"
    if cause.kind == "order":
        wanted = ["parallel.prefetch=2"] if sharded else ["parallel.bucket_mb=10"]
        return wanted, "start messages earlier, so that compute hides them"
    wanted = [] if spec is None else [f"data.global_batch={2 * batch(spec)}"]
    return wanted, "fewer bytes a step: accumulate gradients over more micro-batches, or send them in 16 bits"


def mend_the_rank(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    why = "its compute is slower: clocks, temperature, a neighbour, or more work than the others"
    if cause.kind != "slow_compute":
        why = "it arrives late though it computes as fast: its input, its host, or what it does between steps"
    return [], f"look at rank {f.late_rank}: {why}"


def more_micro_batches(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    wanted = [] if spec is None else [f"data.global_batch={2 * batch(spec)}"]
    return wanted, "more micro-batches a step, or more stages a rank (an interleaved schedule)"


def fuse(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    return ["parallel.compile=true"], "fuse element-wise kernels and norms; a fused optimizer"


def lower_precision(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    return ["precision.dtype=bf16"], "products in bf16 run at several times the rate of fp32"


def steady_memory(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    wanted = [] if spec is None else [f"data.micro_batch={max(1, spec.data.micro_batch // 2)}"]
    return wanted, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or less memory a step"


def less_recompute(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    return [
        "parallel.recompute=selective"
    ], "keep more activations (none is computed again with parallel.recompute=none)"


def batch(spec: RunSpec) -> int:
    return spec.data.global_batch or spec.data.micro_batch * spec.parallel.dp


REMEDIES: dict[str, Callable[[Cause, Figures, RunSpec | None], Remedy]] = {
    "input_bound": more_workers,
    "host_bound": fewer_launches,
    "sync_bound": fewer_synchronisations,
    "comm_bound": faster_communication,
    "straggler": mend_the_rank,
    "pipeline_bubble": more_micro_batches,
    "memory_bound": fuse,
    "compute_bound": lower_precision,
    "allocator_bound": steady_memory,
    "recompute_heavy": less_recompute,
}
