"""What traces say, printed: the tables of `lmworks profile trace`, `train` and `attach`, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from ..data.progress import activity
from ..record.formatting import binary_bytes, duration, short
from ..spec import RunSpec, SpecError
from .diagnose import print_judgement
from .output import print_json, print_table, write_file
from .profile_memory import print_memory

MOST_ROWS = 40  # of steps and ranks in a table
MOST_OPS = 20  # of the network; all of them are in --json and on the page


def report_traces(
    files: Sequence[Path],
    json: bool,
    html: Path | None = None,
    perfetto: Path | None = None,
    spec: RunSpec | None = None,
    **known: Any,
) -> None:
    """`spec`: the run's, where traces do not hold it. `known`: what the command that recorded them adds to the JSON."""
    from ..diagnose.trace_facts import trace_facts
    from ..diagnose.verdict import judge
    from ..trace import read_traces

    with activity() as doing:
        traces = read_traces(files, doing)
        facts, spec = trace_facts(traces, spec)
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
    print_predicted(facts)
    print_pipeline(facts)
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
            "-" if one["flops_per_s"] is None else short(one["flops_per_s"]),
            "-" if one["bytes_per_s"] is None else short(one["bytes_per_s"]),
            "-" if one["floor_s"] is None else milliseconds(one["floor_s"]),
        ]
        for one in facts["ops"][:10]
    ]
    print_table("Ops", ["op", "calls", "ms", "share", "FLOP/s", "bytes/s", "floor ms"], rows)


def print_predicted(facts: dict[str, Any]) -> None:
    if not facts["predicted"]:
        return
    from ..diagnose.predicted_ops import missing_price, op_table

    columns, rows = op_table(facts["predicted"], MOST_OPS)
    print_table("Predicted beside measured, a step", columns, rows)
    if why := missing_price(facts["predicted"]):
        typer.echo(why)


def print_pipeline(facts: dict[str, Any]) -> None:
    if facts["pipeline"]:
        from ..diagnose.schedule_bubble import bubble_table

        columns, rows = bubble_table(facts["pipeline"])
        print_table("Pipeline bubble, of the time from the first pass to the last", columns, rows)


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
