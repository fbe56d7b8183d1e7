"""Profile of an engine: time in prefill, decoding, KV cache reads and host work; throughput and latency by batch; and
the HTML page of `lmworks profile engine`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from ..engine.core.engine import Engine
from ..parallel.profiler import recorder, write_trace
from ..plan.flops import forward_flops_per_token
from ..record.formatting import binary_bytes, duration, short
from ..report.html_page import chart_cards, header, note, page, table, tiles
from ..report.svg import Line, line_chart, stacked_chart
from ..spec import recognise
from .engine import EngineBench, Trace, fit_to_context, quantile
from .workload import Workload

BATCHES = (1, 2, 4, 8, 16, 32, 64)
LONG_CONTEXT = 1024  # tokens, for measurable KV cache reads
RECORDED_STEPS = 64  # of a profiler trace
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


def record_steps(engine: Engine, workload: Workload, trace: Path) -> None:
    """A profiler trace of the first steps of the workload, which is begun once more."""
    requests = workload.within(engine.spec.context).draw(engine.runner.valid_vocab)
    for request in requests:
        engine.add(request)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with recorder(device, record_shapes=True) as recording:
        for number in range(1, RECORDED_STEPS + 1):
            if not engine.busy:
                break
            with record_function(f"ProfilerStep#{number}"):
                engine.step()
    for request in requests:
        engine.cancel(request.id)
    for _ in engine.run():  # what was launched ahead
        pass
    write_trace(recording, trace)


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


# --- the page --------------------------------------------------------------------------------------------


Facts = Mapping[str, Any]


def engine_page(facts: Facts) -> str:
    """From `facts`, the command's JSON."""
    work = facts["workload"]
    lead = (
        f"{facts['device']} · {facts['dtype']} · {work['requests']} requests, {work['input_tokens']:,} tokens in, "
        f"{work['output_tokens']:,} out"
    )
    body = [
        header(facts["model"], lead),
        profile_tiles(facts),
        "<h2>Throughput and latency by batch</h2>",
        chart_cards(batching_charts(facts["batching"])),
        batching_table(facts["batching"]),
        note(
            "Every weight is read once a step, whatever the batch: tokens a second grow with it until the cache or the "
            "arithmetic takes longer, and each answer waits longer for its next token. The floor is the bytes that a "
            f"step must read over {facts['bandwidth_gbs']:,.0f} GB/s, as measured by a copy."
        ),
        "<h2>The workload, step by step</h2>",
        chart_cards(workload_charts(facts["steps"])),
        "<h2>Where the time goes</h2>",
        parts_table(facts),
        note(host_note(facts["host"])),
    ]
    return page(f"{facts['model']} · engine", "\n".join(body), ".charts + .card { margin-top: 14px; }")


def profile_tiles(facts: Facts) -> str:
    work, cache = facts["workload"], facts["cache"]
    whole = work["prefill_s"] + work["decode_s"]
    pace = "–" if cache["gbs"] is None else f"{short(1e9 * cache['gbs'])}B/s"
    of = "below the noise" if cache["of_bandwidth"] is None else f"{cache['of_bandwidth']:.0%} of what a copy reaches"
    shown = [
        ("output", f"{short(work['output_tokens_per_s'])} tokens/s", f"{work['steps']:,} steps"),
        ("prefill", f"{work['prefill_s'] / whole:.0%}", f"{short(work['prompt_tokens_per_s'])} tokens/s of prompts"),
        ("decode", f"{work['decode_s'] / whole:.0%}", f"floor {work['floor_s'] / (work['decode_s'] or 1):.0%} of it"),
        ("cache reads", pace, of),
        ("host", f"{facts['host']['share']:.0%}", "of the time not waiting for the device"),
        ("between tokens", f"{work['inter_token_ms']['p50']:.3g} ms", f"p99 {work['inter_token_ms']['p99']:.3g} ms"),
        ("first token", f"{work['first_token_ms']['p50']:.3g} ms", f"p99 {work['first_token_ms']['p99']:.3g} ms"),
        ("preemptions", str(work["preemptions"]), f"cache at most {work['kv_use']['peak']:.0%} full"),
    ]
    return tiles(shown)


def batching_charts(rows: Sequence[Facts]) -> dict[str, str]:
    def line(name: str, key: str, style: str) -> Line:
        return Line(name, [(row["batch"], row[key]) for row in rows], style, dots=True)

    times = [line("a step", "ms", "s0"), line("the slowest of 100", "p99_ms", "s1"), line("floor", "floor_ms", "s2")]
    return {
        "Milliseconds of a decoding step, by batch": line_chart(times, zero=True, x="batch", y="ms"),
        "Output tokens a second, by batch": line_chart(
            [line("tokens/s", "tokens_per_s", "s0")], zero=True, x="batch", y="tokens/s"
        ),
    }


def batching_table(rows: Sequence[Facts]) -> str:
    columns = ["batch", "ms", "p99", "floor", "of the floor's pace", "tokens/s", "gain", "slower", "efficiency"]
    cells = [
        [
            str(row["batch"]),
            f"{row['ms']:.3f}",
            f"{row['p99_ms']:.3f}",
            f"{row['floor_ms']:.3f}",
            f"{row['of_floor']:.0%}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['gain']:.1f}×",
            f"{row['slower']:.2f}×",
            f"{row['efficiency']:.0%}",
        ]
        for row in rows
    ]
    return table(columns, cells, numeric=len(columns))


def workload_charts(steps: Facts) -> dict[str, str]:
    at = steps["at"]

    def line(name: str, key: str, style: str) -> Line:
        return Line(name, list(zip(at, steps[key], strict=True)), style)

    tokens = [
        (x, (prompt, decoding))
        for x, prompt, decoding in zip(at, steps["prompt_tokens"], steps["decoding"], strict=True)
    ]
    return {
        "Milliseconds": line_chart([line("a step", "ms", "s0")], zero=True, y="ms"),
        "Tokens": stacked_chart(["of prompts", "of answers"], tokens, short, "tokens"),
        "Sequences that decode": line_chart([line("decoding", "decoding", "s0")], zero=True, y="sequences"),
        "KV cache in use": line_chart(
            [line("in use", "kv_use", "s3")], zero=True, show=lambda part: f"{part:.0%}", y="share"
        ),
    }


def parts_table(facts: Facts) -> str:
    work, prefill, cache, host = (facts[key] for key in ("workload", "prefill", "cache", "host"))
    peak = "" if prefill["of_peak"] is None else f", {prefill['of_peak']:.0%} of the peak"
    near, far = (f"{ms:.3g} ms at {context:,.0f}" for ms, context in zip(cache["ms"], cache["contexts"], strict=True))
    rows = [
        ["prefill", duration(work["prefill_s"]), f"{work['prefill_steps']} steps that compute prompts"],
        [
            "a step of prompts alone",
            f"{short(prefill['tokens_per_s'])} tokens/s",
            f"{prefill['tokens']:,} tokens; {prefill['tflops']:.3g} TFLOP/s{peak}",
        ],
        ["decode", duration(work["decode_s"]), f"each step at its floor: {duration(work['floor_s'])}"],
        [
            "cache reads",
            "–" if cache["gbs"] is None else f"{cache['gbs']:,.1f} GB/s",
            f"batch {cache['batch']}: {near} tokens of context, {far}; {binary_bytes(cache['token_bytes'])} a token",
        ],
        ["host: launching", f"{host['launch_ms']:.3f} ms a step", ""],
        ["host: waiting for tokens", f"{host['wait_ms']:.3f} ms a step", ""],
        ["host: the rest", f"{host['other_ms']:.3f} ms a step", "scheduling, accepting tokens"],
    ]
    rows += [
        [f"between tokens, p{100 * float(part):g}", f"{ms:.3g} ms", ""]
        for part, ms in facts["steps"]["inter_token_ms"].items()
    ]
    return table(["", "measured", ""], rows)


def host_note(host: Facts) -> str:
    if host["synchronous"]:
        return "On a CPU a launch computes the step, so launching is the device's time, and the rest is the host's."
    return (
        "The host works while the device does: launching and the rest cost nothing as long as there is some waiting. "
        "Where the waiting is near 0, the device waits for the host."
    )
