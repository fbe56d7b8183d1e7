"""`lmworks bench profile engine`: where the engine's time goes, as a table, as JSON, and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..record.figures import duration, short
from .bench_offline import Input, Model, Output, Quick, Requests, Seed, start_llm
from .generate import EngineOverrides
from .groups import CommandGroup
from .output import Json, print_json, print_table, write_file

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="See where the engine's time goes.")


@app.callback()
def profile() -> None:
    """See where the engine's time goes."""


@app.command("engine")
def engine(
    model: Model,
    overrides: EngineOverrides = None,
    requests: Requests = 256,
    input: Input = "100:1024",
    output: Output = "100:1024",
    seed: Seed = 0,
    quick: Quick = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the report as a page.")] = None,
    json: Json = False,
) -> None:
    """Time prefill, decode, cache reads and the host, by batch size.

    \b
    Examples:
      lmworks bench profile engine --model qwen3-0.6b --html engine.html
      lmworks bench profile engine --model tiny --requests 16 --json
    """
    from ..bench.engine_profile import profile_engine
    from ..bench.engine_report import engine_page
    from ..bench.engine_workload import make_workload

    work = make_workload(requests, input, output, seed, quick)
    llm, startup_s = start_llm(model, overrides, seed)
    with llm:
        facts = {"model": model, "startup_s": startup_s, **profile_engine(llm.native, work)}
    if json:
        print_json(facts)
    else:
        show(facts)
    if html is not None:  # last: where it cannot be written, the figures have been told
        write_file(html, engine_page(facts), "--html")
        if not json:
            typer.echo(f"page: {html}")


def show(facts: dict[str, Any]) -> None:
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
