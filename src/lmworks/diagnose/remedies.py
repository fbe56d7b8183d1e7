"""The remedy of each cause: overrides of a spec where a key does it, and a sentence for any program."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..spec import RunSpec, SpecError
from ..spec.load import apply_overrides
from .causes import Cause, Figures

Remedy = tuple[list[str], str]


def remedy_of(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    """Of a spec that is known, overrides that change it, and that it takes."""
    overrides, advice = REMEDIES[cause.verdict](cause, f, spec)
    return (overrides if spec is None else effective(spec, overrides)), advice


def effective(spec: RunSpec, overrides: Iterable[str]) -> list[str]:
    kept: list[str] = []
    for override in overrides:
        try:
            changed = RunSpec.from_dict(apply_overrides(spec.to_dict(), [override]))
        except SpecError:
            continue
        if changed != spec:
            spec = changed
            kept.append(override)
    return kept


def more_workers(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    if cause.kind == "copies":
        return [], "pin the batches, and copy them ahead on a stream of their own (pin_memory=True, non_blocking=True)"
    workers = 4 if spec is None else max(4, 2 * spec.data.workers)
    return [f"data.workers={workers}"], "read and decode batches in other processes (a DataLoader's num_workers)"


def fewer_launches(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    overrides = ["parallel.compile=true"]
    if spec is not None:
        overrides.append(f"data.micro_batch={2 * spec.data.micro_batch}")
    return overrides, "fewer and larger kernels: torch.compile, CUDA graphs, a larger micro-batch"


def fewer_synchronisations(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    return [], "read values of the device (.item(), .cpu(), a printed loss) every few steps only; copy without waiting"


def faster_communication(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    if cause.kind == "latency":
        return larger_messages(spec), "fewer and larger messages"
    if cause.kind == "order":
        return earlier_messages(spec), "start messages earlier, so that compute hides them"
    wanted = [] if spec is None else [f"data.global_batch={2 * spec.data.global_batch}"]
    return wanted, "fewer bytes a step: accumulate gradients over more micro-batches, or send them in 16 bits"


def larger_messages(spec: RunSpec | None) -> list[str]:
    if spec is None:
        return ["parallel.bucket_mb=100"]
    layout = spec.parallel
    if layout.strategy in ("fsdp1", "fsdp2"):
        return ["parallel.reshard=false"]
    if layout.dp == 1:
        return []
    if gradient_mb(spec) <= layout.bucket_mb:  # one message a step already
        return [f"data.global_batch={2 * spec.data.global_batch}"]
    return [f"parallel.bucket_mb={max(100, 4 * layout.bucket_mb):g}"]


def earlier_messages(spec: RunSpec | None) -> list[str]:
    if spec is None:
        return ["parallel.bucket_mb=10"]
    layout = spec.parallel
    if layout.strategy == "fsdp2":
        return [f"parallel.prefetch={2 * layout.prefetch}"]
    in_buckets = layout.strategy in ("ddp", "zero") and layout.dp > 1
    smaller = min(10, layout.bucket_mb / 2, gradient_mb(spec) / 4)
    return [f"parallel.bucket_mb={smaller:.3g}"] if in_buckets else []


def gradient_mb(spec: RunSpec) -> float:
    """Of a replica: what fits one bucket is one message, however large the bucket."""
    layout = spec.parallel
    width = 2 if spec.precision.weights == "bf16" else 4
    return spec.model.params * width / 2**20 / (layout.tp * layout.pp)


def mend_the_rank(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    why = "its compute is slower: clocks, temperature, a neighbour, or more work than the others"
    if cause.kind != "slow_compute":
        why = "it arrives late though it computes as fast: its input, its host, or what it does between steps"
    return [], f"look at rank {f.late_rank}: {why}"


def more_micro_batches(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    if cause.kind == "uneven":
        return [], "give the stage that computes longest fewer layers"
    wanted = [] if spec is None else [f"data.global_batch={2 * spec.data.global_batch}"]
    return wanted, "more micro-batches a step, or more stages a rank (an interleaved schedule)"


def fuse(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    return ["parallel.compile=true"], "fuse element-wise kernels and norms; a fused optimizer"


def lower_precision(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    return ["precision.dtype=bf16"], "products in bf16 run at several times the rate of fp32"


def steady_memory(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    wanted = [] if spec is None else [f"data.micro_batch={max(1, spec.data.micro_batch // 2)}"]
    return wanted, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or less memory a step"


def less_recompute(cause: Cause, f: Figures, spec: RunSpec | None) -> Remedy:
    less = "selective" if spec is None or spec.parallel.recompute == "full" else "none"
    return [f"parallel.recompute={less}"], "keep more activations; with parallel.recompute=none all of them"


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
