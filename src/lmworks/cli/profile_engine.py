"""`lmworks profile engine`: where the engine's time goes, by batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..record.formatting import duration, short
from .bench_inference import Input, Model, Output, Quick, Requests, Seed, start_llm
from .generate import EngineOverrides
from .output import Json, print_json, print_table, write_file
from .profile_record import Html
from .trace_report import report_traces


def engine(
    model: Model,
    overrides: EngineOverrides = None,
    requests: Requests = 256,
    input: Input = "100:1024",
    output: Output = "100:1024",
    seed: Seed = 0,
    quick: Quick = False,
    html: Html = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Also record steps (.json.gz), and read the trace.")
    ] = None,
    json: Json = False,
) -> None:
    """Time prefill, decode, cache reads and the host, by batch size.

    \b
    Examples:
      lmworks profile engine --model qwen3-0.6b --html engine.html
      lmworks profile engine --model tiny --requests 16 --json
      lmworks profile engine --model qwen3-0.6b --trace engine.json.gz
    """
    from ..bench.engine_profile import engine_page, profile_engine, record_steps
    from ..bench.workload import make_workload

    work = make_workload(requests, input, output, seed, quick)
    llm, startup_s = start_llm(model, overrides, seed)
    with llm:
        facts = {"model": model, "startup_s": startup_s, **profile_engine(llm.native, work)}
        if trace is not None:
            record_steps(llm.native, work, trace)
            facts["trace"] = str(trace)
    if json:
        print_json(facts)
    else:
        print_profile(facts)
        if trace is not None:
            report_traces([trace], json=False)
    if html is not None:  # last: the figures are printed even if it cannot be written
        write_file(html, engine_page(facts), "--html")
        if not json:
            typer.echo(f"page: {html}")


def print_profile(facts: dict[str, Any]) -> None:
    work, cache, host, prefill = (facts[key] for key in ("workload", "cache", "host", "prefill"))
    whole = work["prefill_s"] + work["decode_s"]
    pace = "unknown" if cache["gbs"] is None else f"{cache['gbs']:,.1f} GB/s"
    gaps = work["inter_token_ms"]
    rows = [
        ["prefill", f"{work['prefill_s'] / whole:.0%}", f"{short(prefill['tokens_per_s'])} tokens/s where it is alone"],
        [
            "decode",
            f"{work['decode_s'] / whole:.0%}",
            f"{duration(work['decode_s'])}, floor {duration(work['floor_s'])}",
        ],
        ["cache reads", pace, f"of {facts['bandwidth_gbs']:,.0f} GB/s that a copy reaches"],
        ["host", f"{host['share']:.1%}", f"launch {host['launch_ms']:.3f}, wait {host['wait_ms']:.3f} ms a step"],
        ["between tokens", f"{gaps['p50']:.3g} ms", f"the slowest of 100: {gaps['p99']:.3g} ms"],
    ]
    title = f"{facts['model']} on {facts['device']}: {work['output_tokens_per_s']:,.0f} output tokens/s"
    print_table(title, ["", "measured", ""], rows)
    columns = ["batch", "ms", "p99", "floor", "tokens/s", "gain", "slower", "efficiency"]
    steps = [
        [
            row["batch"],
            f"{row['ms']:.3f}",
            f"{row['p99_ms']:.3f}",
            f"{row['floor_ms']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['gain']:.1f}×",
            f"{row['slower']:.2f}×",
            f"{row['efficiency']:.0%}",
        ]
        for row in facts["batching"]
    ]
    title = "Decoding by batch: what is gained, and how much longer each answer waits"
    print_table(title, columns, steps, drop=("p99", "efficiency"))
