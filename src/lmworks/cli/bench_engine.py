"""`lmworks bench offline` and `lmworks bench profile engine`: throughput of the engine, and where its time goes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..data.progress import activity
from ..record.formatting import binary_bytes, duration, short
from ..weight_prefetch import prefetch_weights
from . import options
from .generate import EngineOverrides, engine_options
from .groups import CommandGroup
from .output import Json, loading, print_json, print_table, write_file

if TYPE_CHECKING:
    from ..llm import LLM

LOADED = time.perf_counter()

Model = Annotated[
    str,
    typer.Option(
        "--model", help="A preset (random weights), or a folder with a model.", autocompletion=options.sources
    ),
]
Requests = Annotated[int, typer.Option("--requests", min=1, help="Requests, all at once.")]
Input = Annotated[str, typer.Option("--input", metavar="LOW:HIGH", help="Tokens of a prompt, drawn evenly.")]
Output = Annotated[str, typer.Option("--output", metavar="LOW:HIGH", help="Tokens of an answer, drawn evenly.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Same seed, same requests.")]
Quick = Annotated[bool, typer.Option("--quick", help="An eighth of the requests and of their lengths.")]


def offline(
    model: Model,
    overrides: EngineOverrides = None,
    requests: Requests = 256,
    input: Input = "100:1024",
    output: Output = "100:1024",
    seed: Seed = 0,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Measure the engine's throughput on a batch of requests.

    The requests are random; in a small context their lengths shrink to fit.

    \b
    Examples:
      lmworks bench offline --model llama3-8b --json
      lmworks bench offline --model cpu-10m --requests 16
      lmworks bench offline --model qwen3-0.6b engine.kv_dtype=fp8 engine.max_seqs=128
    """
    from ..bench.engine import bench_offline
    from ..bench.workload import make_workload

    work = make_workload(requests, input, output, seed, quick)
    llm, startup_s = start_llm(model, overrides, seed)
    with llm, activity() as doing:
        doing(f"serving {work.requests} requests", 0, 0)
        facts = {"model": model, **bench_offline(llm.native, work), "startup_s": startup_s}
    if json:
        print_json(facts)
    else:
        print_throughput(facts)


def start_llm(model: str, overrides: list[str] | None, seed: int) -> tuple[LLM, float]:
    """The model after its first token, and the seconds from the start of this process to it."""
    prefetch_weights(model)
    with activity() as doing:
        doing(loading(model), 0, 0)
        from ..engine.core.sampling_params import SamplingParams
        from ..llm import LLM

        llm = LLM(model, seed=seed, **engine_options(overrides))
        llm.generate([[1]], SamplingParams(max_tokens=1, ignore_eos=True), progress=False)
    return llm, process_age()


def process_age() -> float:
    """Seconds since this process was started; what Python took before it got here is in it."""
    try:
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        return time.perf_counter() - LOADED
    return up - began / os.sysconf("SC_CLK_TCK")


def print_throughput(facts: dict[str, Any]) -> None:
    from ..bench.power import power_text

    kv = facts["kv_use"]
    gaps, least = facts["inter_token_ms"], facts["floor_s"]
    typer.echo(
        f"{facts['model']} on {facts['device']}, {facts['dtype']}: {facts['output_tokens_per_s']:,.0f} output tokens/s "
        f"({facts['requests']} requests, {facts['input_tokens']:,} tokens in, {facts['output_tokens']:,} out)"
    )
    rows = [
        ["start-up", duration(facts["startup_s"]), "from the start of the process to the first token"],
        ["prefill", duration(facts["prefill_s"]), f"{facts['prompt_tokens_per_s']:,.0f} tokens/s"],
        ["decode", duration(facts["decode_s"]), f"at the memory's pace {duration(least)}"],
        ["host", f"{facts['host_share']:.1%}", "of the time"],
        [
            "batch",
            f"{facts['mean_batch']:.1f}",
            f"sequences in a decoding step: {facts['occupancy']:.0%} of the possible",
        ],
        ["cache", f"{kv['peak']:.1%}", f"at most, {kv['mean']:.1%} on average, of {binary_bytes(kv['bytes'])}"],
        *compile_rows(facts["first_times"]),
        *([["clock", f"{power['clock_mhz']:,.0f} MHz", power_text(power)]] if (power := facts["power"]) else []),
        ["preemptions", str(facts["preemptions"]), f"in {facts['steps']:,} steps"],
        ["between tokens", f"{gaps['p50']:.3g} ms", f"the slowest of 100: {gaps['p99']:.3g} ms"],
    ]
    print_table("", ["", "measured", ""], rows)
    steps = [
        [batch, f"{ms:.3f}", f"{facts['floors_ms'][batch]:.3f}", f"{facts['floors_ms'][batch] / ms:.0%}"]
        for batch, ms in facts["decode_ms"].items()
    ]
    floor = f"floor: {facts['weights']} of weights and the cache over {facts['bandwidth_gbs']:,.0f} GB/s"
    print_table(f"A decoding step ({floor})", ["batch", "ms", "floor, ms", "of the floor's pace"], steps)


def compile_rows(met: dict[str, Any]) -> list[list[str]]:
    """Kernels compiled and graphs captured for the first time."""
    kernels, graphs = len(met["kernels"]), met["graphs"]
    if not kernels and not graphs:
        return []
    return [["first times", str(kernels + graphs), f"kernels compiled or read: {kernels}, graphs recorded: {graphs}"]]


# --- bench profile ---------------------------------------------------------------------------------------


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
    from ..bench.engine_profile import engine_page, profile_engine
    from ..bench.workload import make_workload

    work = make_workload(requests, input, output, seed, quick)
    llm, startup_s = start_llm(model, overrides, seed)
    with llm:
        facts = {"model": model, "startup_s": startup_s, **profile_engine(llm.native, work)}
    if json:
        print_json(facts)
    else:
        print_profile(facts)
    if html is not None:  # last: where it cannot be written, the figures have been told
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
