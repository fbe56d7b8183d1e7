"""`lmworks profile`: where the time of a step, or of an engine, goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..data.progress import activity
from ..record.formatting import binary_bytes, duration, short
from ..spec import RunSpec, SpecError
from .bench_inference import Input, Model, Output, Quick, Requests, Seed, start_llm
from .diagnose import print_judgement
from .generate import EngineOverrides
from .groups import CommandGroup
from .output import Json, print_json, print_table, write_file
from .profile_compare import compare
from .profile_memory import memory, print_memory
from .profile_record import Html, Perfetto, attach, train

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="See where the time goes: steps, traces, the engine.")


MOST_ROWS = 40  # of steps and ranks in a table


@app.callback()
def profile() -> None:
    """See where the time goes: steps, traces, the engine."""


app.command()(train)
app.command()(attach)
app.command()(memory)
app.command()(compare)


# --- profile trace ---------------------------------------------------------------------------------------


@app.command("trace")
def trace(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Traces of PyTorch's profiler, one a rank (.json, .json.gz)."),
    ],
    html: Html = None,
    perfetto: Perfetto = None,
    json: Json = False,
) -> None:
    """Read profiler traces of any PyTorch program.

    \b
    Examples:
      lmworks profile trace runs/tiny/traces/*.json.gz --html page.html
      lmworks profile trace rank0.json.gz rank1.json.gz --perfetto job.json.gz
      lmworks profile trace rank0.json.gz rank1.json.gz --json
    """
    report_traces(files, json, html, perfetto)


def report_traces(
    files: Sequence[Path],
    json: bool,
    html: Path | None = None,
    perfetto: Path | None = None,
    spec: RunSpec | None = None,
    **known: Any,
) -> None:
    """`spec`: the run's, where it is known. `known`: what the command that recorded them adds to the JSON."""
    from ..diagnose.verdict import judge
    from ..trace import read_traces
    from ..trace.summary import summarise

    with activity() as doing:
        traces = read_traces(files, doing)
        facts = summarise(traces)
        judged = judge(traces, facts, spec)
    whole = {**known, **facts, **judged.to_dict()}
    if json:
        print_json(whole)
    else:
        print_trace(facts)
        print_judgement(judged)
    if html is not None:  # last: the figures are printed even if it cannot be written
        from ..report.trace_page import trace_page

        write_file(html, trace_page(whole, traces), "--html")
        if not json:
            typer.echo(f"page: {html}")
    if perfetto is not None:
        from ..trace.perfetto import write_perfetto

        try:
            write_perfetto(perfetto, traces, whole)
        except OSError as error:
            raise SpecError(f"--perfetto {perfetto}: {error.strerror}") from None
        if not json:
            typer.echo(f"for Perfetto (https://ui.perfetto.dev): {perfetto}")


def print_trace(facts: dict[str, Any]) -> None:
    for rank in facts["ranks"]:
        typer.echo(f"rank {rank['rank']}: {rank['file']}, {rank['device']}, {rank['events']:,} events")
    for lack in dict.fromkeys(lack for rank in facts["ranks"] for lack in rank["missing"]):
        typer.echo(f"    {lack}")
    print_steps(facts)
    print_collectives(facts)
    print_ops(facts)
    print_notes(facts)
    print_memory(facts)


def print_steps(facts: dict[str, Any]) -> None:
    parts = ("compute_s", "exposed_comm_s", "hidden_comm_s", "copy_s", "idle_s")
    rows = [
        [row["step"], row["rank"], milliseconds(row["seconds"]), *(milliseconds(row[part]) for part in parts)]
        for row in facts["steps"][:MOST_ROWS]
    ]
    whole = facts["step_s"] or 1.0
    rows.append(["all", "", milliseconds(facts["step_s"]), *(f"{facts[part] / whole:.0%}" for part in parts)])
    columns = ["step", "rank", "ms", "compute", "exposed comm", "hidden comm", "copies", "idle"]
    print_table("Steps, in milliseconds", columns, rows)
    idle = {cause.replace("_", " "): length for cause, length in facts["idle_by_cause"].items() if length > 0}
    if idle:
        split = ", ".join(f"{cause} {length / whole:.1%}" for cause, length in idle.items())
        typer.echo(f"idle, of the steps' time: {split}")


def print_collectives(facts: dict[str, Any]) -> None:
    rows = [
        [
            one["collective"],
            one["group"] or "-",
            one["calls"],
            "-" if one["bytes"] is None else binary_bytes(one["bytes"]),
            milliseconds(one["seconds"]),
            "-" if one["percent"] is None else f"{one['percent']:.0f}%",
        ]
        for one in facts["overlap"]["collectives"]
    ]
    if rows:
        print_table("Collectives", ["collective", "group", "calls", "bytes", "ms", "hidden"], rows)


def print_ops(facts: dict[str, Any]) -> None:
    from ..trace.hotspots import short_name

    rows = [
        [
            short_name(one["op"]),
            one["calls"],
            milliseconds(one["seconds"]),
            f"{one['share']:.1%}",
            "-" if one["flops_per_s"] is None else f"{one['flops_per_s'] / 1e12:.3g}",
        ]
        for one in facts["ops"][:10]
    ]
    print_table("Ops", ["op", "calls", "ms", "share", "TFLOP/s"], rows)


def print_notes(facts: dict[str, Any]) -> None:
    for one, rank in zip(facts["launches"], facts["ranks"], strict=True):
        what = "ops" if rank["device"] == "cpu" else "launches"
        typer.echo(
            f"rank {one['rank']}: {one['per_step']:,.0f} {what} a step, {one['share_under_10us']:.0%} under 10 µs"
        )
    for one in facts["critical_path"]:
        parts = ", ".join(
            f"{kind.replace('_', ' ')} {length / one['seconds']:.0%}" for kind, length in one["by_kind"].items()
        )
        typer.echo(f"rank {one['rank']}: critical path {duration(one['seconds'])}: {parts}")
    if (late := facts["skew"]) and late["late_rank"] is not None:
        cause = {"slow_compute": "it computed longer", "late_arrival": "it came late"}[late["cause"]]
        typer.echo(
            f"rank {late['late_rank']} let the others wait {duration(late['late_s'])} in {late['collectives']} "
            f"collectives ({late['late_share']:.1%} of the steps): {cause}"
        )


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


# --- profile engine --------------------------------------------------------------------------------------


@app.command("engine")
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
