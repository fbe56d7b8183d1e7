"""`lmworks bench offline` and `bench serve`: throughput of the engine, and a load test of a server."""

from __future__ import annotations

import os
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..data.progress import activity
from ..record.formatting import binary_bytes, duration
from ..spec.files import check_writable
from ..weight_prefetch import prefetch_weights
from . import options
from .generate import EngineOverrides, engine_options
from .loading import loading
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..llm import LLM

LOADED = time.perf_counter()

Model = Annotated[
    str,
    typer.Option(
        "--model", help="A preset (random weights), or a folder with a model.", autocompletion=options.sources
    ),
]
Requests = Annotated[int, typer.Option("--requests", min=1, help="Number of requests.")]
Input = Annotated[str, typer.Option("--input", metavar="LOW:HIGH", help="Tokens of a prompt, drawn evenly.")]
Output = Annotated[str, typer.Option("--output", metavar="LOW:HIGH", help="Tokens of an answer, drawn evenly.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Same seed, same requests at the same times.")]
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
    """Seconds since this process was started, Python's own start-up included."""
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


def compile_rows(compiled: dict[str, Any]) -> list[list[str]]:
    """Kernels compiled and graphs captured for the first time."""
    kernels, graphs = len(compiled["kernels"]), compiled["graphs"]
    if not kernels and not graphs:
        return []
    return [["first times", str(kernels + graphs), f"kernels compiled or read: {kernels}, graphs recorded: {graphs}"]]


# --- bench serve -----------------------------------------------------------------------------------------


class Endpoint(StrEnum):
    completions = "completions"
    chat = "chat"


Url = Annotated[str, typer.Option("--url", help="Any OpenAI-compatible server.")]
ServedModel = Annotated[str | None, typer.Option("--model", help="The model's name on the server (its first model).")]
Where = Annotated[Endpoint, typer.Option("--endpoint", help="Completions send token ids, chats send text.")]
Rate = Annotated[float, typer.Option("--rate", min=0, help="Requests a second (Poisson arrivals); 0: all at once.")]
Burst = Annotated[int, typer.Option("--burst", min=0, help="Requests that come at once; without --rate, every second.")]
Concurrency = Annotated[int, typer.Option("--concurrency", min=0, help="Closed loop with so many requests at once.")]
LengthsFile = Annotated[
    Path | None, typer.Option("--lengths", metavar="FILE", help='Instead: lines of {"input": 812, "output": 97}.')
]
Prefix = Annotated[
    str, typer.Option("--shared-prefix", metavar="TOKENS[xGROUPS]", help="What all prompts (of a group) begin with.")
]
SLO = Annotated[str, typer.Option("--slo", help="Latency objectives in seconds: ttft=0.5,tpot=0.05,e2e=10.")]
EarlyEnd = Annotated[bool, typer.Option("--early-end", help="Do not send ignore_eos, which not every server supports.")]
KeyVariable = Annotated[str, typer.Option(metavar="NAME", help="Environment variable with the key that is sent.")]
Seconds = Annotated[float, typer.Option("--timeout", min=0.001, help="Longest time for one request.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it (.png, .svg or .pdf).")]
Save = Annotated[
    Path | None,
    typer.Option("--save", metavar="FILE", help="A line of JSON for each request, for `lmworks fleet fit`."),
]


def serve(
    url: Url = "http://127.0.0.1:8000",
    model: ServedModel = None,
    endpoint: Where = Endpoint.completions,
    requests: Requests = 256,
    rate: Rate = 0.0,
    burst: Burst = 0,
    concurrency: Concurrency = 0,
    input: Input = "100:1024",
    output: Output = "100:1024",
    lengths: LengthsFile = None,
    shared_prefix: Prefix = "0",
    slo: SLO = "",
    early_end: EarlyEnd = False,
    key_variable: KeyVariable = "LMWORKS_API_KEY",
    timeout: Seconds = 600.0,
    seed: Seed = 0,
    plot: Plot = None,
    save: Save = None,
    json: Json = False,
) -> None:
    """Load-test a server: TTFT, TPOT, latency and goodput.

    \b
    Examples:
      lmworks bench serve --rate 8 --requests 500 --slo ttft=0.5,tpot=0.05
      lmworks bench serve --url http://gpu7:8000 --concurrency 64 --input 2048 --output 128 --json
      lmworks bench serve --rate 20 --burst 10 --shared-prefix 512x4 --plot bench.png
    """
    from ..bench.serve import Slo, bench_serve
    from ..bench.workload import Arrivals, Lengths, Load, read_prefix, read_range

    objective = Slo.parse(slo)
    drawn = (
        Lengths.of_file(lengths) if lengths else Lengths(read_range(input, "--input"), read_range(output, "--output"))
    )
    prefix, groups = read_prefix(shared_prefix)
    load = Load(
        requests, Arrivals(rate, burst, concurrency), drawn, prefix, groups, ignore_eos=not early_end, seed=seed
    )
    if plot is not None:
        from ..report.plots import check_plot_path

        check_plot_path(plot, "--plot")
    if save is not None:
        check_writable(save, "--save")
    measured = bench_serve(
        url, load, objective, model=model, endpoint=endpoint.value, key=os.environ.get(key_variable), timeout=timeout
    )
    facts = measured.to_dict()
    if plot is not None:
        from ..bench.serve import draw_bench

        draw_bench(measured, plot)
    if save is not None:
        from ..bench.serve import write_outcomes

        write_outcomes(measured.outcomes, save)
    if json:
        print_json(facts)
    else:
        print_load_test(facts)
    if not facts["completed"]:
        raise typer.Exit(1)


def print_load_test(facts: dict[str, Any]) -> None:
    typer.echo(
        f"{facts['model']} at {facts['url']}: {facts['requests']} requests, {facts['arrivals']}, "
        f"in {duration(facts['seconds'])}"
    )
    rejected, errors = sum(facts["rejected"].values()), sum(facts["errors"].values())
    codes = ", ".join(f"{count} with {status}" for status, count in facts["rejected"].items())
    good, cached = facts["goodput"], facts["cached_tokens"]
    rows = [
        ["completed", str(facts["completed"]), f"{facts['requests_per_s']:.3g} a second"],
        ["rejected", str(rejected), codes],
        ["failed", str(errors), next(iter(facts["errors"]), "")],
        ["tokens out", f"{facts['output_tokens']:,}", f"{facts['output_tokens_per_s']:,.0f} a second"],
        ["tokens in", f"{facts['input_tokens']:,}", f"{cached:,} found in the prefix cache" if cached else ""],
    ]
    if good["slo"]:
        kept = ", ".join(f"{name} ≤ {duration(limit)}" for name, limit in good["slo"].items() if name != "itl")
        rows.append(["goodput", f"{good['requests_per_s']:.3g}/s", f"{good['share']:.1%} of all requests with {kept}"])
    print_table("", ["", "measured", ""], rows)
    names = {
        "ttft_s": "time to first token",
        "itl_s": "between tokens",
        "request_itl_s": "between tokens, mean of a request",
        "e2e_s": "whole request",
        "rejected_s": "until rejected",
        "late_s": "sent later than scheduled",
    }
    columns = ["mean", "p50", "p90", "p99", "max"]
    times = [[name, *(duration(facts[key][one]) for one in columns)] for key, name in names.items() if facts[key]]
    print_table("", ["", *columns], times)
