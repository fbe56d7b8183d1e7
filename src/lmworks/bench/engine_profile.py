"""Profile of an engine: time in prefill, decoding, KV cache reads and host work; throughput and latency by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.core.engine import Engine
from ..plan.flops import forward_flops_per_token
from ..spec import recognise
from .engine import EngineBench, fit_to_context, quantile
from .engine_trace import Trace
from .engine_workload import Workload

BATCHES = (1, 2, 4, 8, 16, 32, 64)
LONG_CONTEXT = 1024  # tokens, for measurable KV cache reads
MAX_POINTS = 400  # points of a curve over the steps


def profile_engine(engine: Engine, workload: Workload, batches: Sequence[int] = BATCHES) -> dict[str, Any]:
    """Every figure of the report; times in milliseconds."""
    bench = EngineBench(engine, workload.seed)
    bench.warm_up()
    short = [bench.step_time(batch) for batch in batches if batch <= engine.spec.max_seqs]
    facts = bench.throughput(workload)
    trace = facts.pop("trace")
    return {
        **bench.describe(),
        "workload": facts,
        "batching": batching([one.to_dict() for one in short]),
        "prefill": prefill(bench),
        "cache": cache(bench, short[-1].batch),
        "host": host(trace, bench.runner.synchronous),
        "steps": step_curves(trace),
    }


def batching(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Throughput against inter-token latency, both relative to a batch of one."""
    first = rows[0]
    for row in rows:
        row["gain"] = row["tokens_per_s"] / first["tokens_per_s"]
        row["slower"] = row["ms"] / first["ms"]
        row["efficiency"] = row["gain"] / row["batch"] * first["batch"]
        row["of_floor"] = row["floor_ms"] / row["ms"]
    return rows


def prefill(bench: EngineBench) -> dict[str, Any]:
    """Prefill only, at the largest step, and its share of the device's peak FLOP/s."""
    tokens = bench.engine.spec.max_batch_tokens
    length, _ = fit_to_context(tokens, 1, bench.engine.spec.context)
    rate = bench.prefill_rate(tokens)
    model = bench.runner.model.spec
    head = 2 * model.vocab * model.hidden  # computed for the last token of a prompt only
    flops = rate * (forward_flops_per_token(model, length) - head)
    gpu = recognise(bench.describe()["device"])
    peak = gpu.peak_flops(bench.engine.spec.dtype) if gpu else None
    return {"tokens": tokens, "tokens_per_s": rate, "tflops": flops / 1e12, "of_peak": flops / peak if peak else None}


def cache(bench: EngineBench, batch: int) -> dict[str, Any]:
    """Bandwidth of KV cache reads, from the difference of two context lengths."""
    spec = bench.engine.spec
    context = min(LONG_CONTEXT, spec.context // 2, bench.runner.blocks * spec.block // batch // 2)
    near, far = bench.step_time(batch, max(1, context // 8)), bench.step_time(batch, context)
    read = bench.roofline.kv_bytes(batch, far.context) - bench.roofline.kv_bytes(batch, near.context)
    longer = far.seconds - near.seconds
    pace = read / longer if longer > 0 else None
    return {
        "batch": batch,
        "contexts": [near.context, far.context],
        "ms": [1e3 * near.seconds, 1e3 * far.seconds],
        "gbs": pace / 1e9 if pace else None,  # unknown if the difference is below the noise
        "of_bandwidth": pace / bench.roofline.bandwidth if pace else None,
        "token_bytes": bench.roofline.kv_bytes(1, 1),
    }


def host(trace: Trace, synchronous: bool) -> dict[str, Any]:
    """Mean time per step of launching, waiting and other host work."""
    count = len(trace.steps)
    launch, waited = sum(step.launch for step in trace.steps), sum(step.waited for step in trace.steps)
    return {
        "launch_ms": 1e3 * launch / count,
        "wait_ms": 1e3 * waited / count,
        "other_ms": 1e3 * (trace.seconds - launch - waited) / count,
        "share": trace.host_share(synchronous),
        "synchronous": synchronous,
    }


def step_curves(trace: Trace) -> dict[str, Any]:
    """The workload over steps, averaged to at most `MAX_POINTS` points."""
    every = max(1, len(trace.steps) // MAX_POINTS)
    rows = list(zip(trace.steps, trace.durations(), strict=True))
    stretches = [rows[place : place + every] for place in range(0, len(rows), every)]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    gaps = trace.inter_token_latencies()
    return {
        "at": [place * every for place in range(len(stretches))],
        "seconds": [mean([step.ended - trace.began for step, _ in stretch]) for stretch in stretches],
        "ms": [1e3 * mean([seconds for _, seconds in stretch]) for stretch in stretches],
        "prompt_tokens": [mean([step.prompt_tokens for step, _ in stretch]) for stretch in stretches],
        "decoding": [mean([step.decoding for step, _ in stretch]) for stretch in stretches],
        "kv_use": [mean([step.kv_use for step, _ in stretch]) for stretch in stretches],
        "inter_token_ms": {str(part): 1e3 * quantile(gaps, part) for part in (0.5, 0.9, 0.99, 0.999)},
    }
