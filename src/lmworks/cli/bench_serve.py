"""`lmworks bench serve`: a server under load, as its users would feel it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..record.formatting import duration
from .output import Json, print_json, print_table


class Endpoint(StrEnum):
    completions = "completions"
    chat = "chat"


Url = Annotated[str, typer.Option("--url", help="Any OpenAI-compatible server.")]
Model = Annotated[str | None, typer.Option("--model", help="What the server calls it (its first model).")]
Where = Annotated[Endpoint, typer.Option("--endpoint", help="Completions send token ids, chats send text.")]
Requests = Annotated[int, typer.Option("--requests", min=1, help="Requests in all.")]
Rate = Annotated[float, typer.Option("--rate", min=0, help="Requests a second, by chance (Poisson); 0: all at once.")]
Burst = Annotated[int, typer.Option("--burst", min=0, help="Requests that come at once; without --rate, every second.")]
Concurrency = Annotated[int, typer.Option("--concurrency", min=0, help="Instead: so many at a time, each after one.")]
Input = Annotated[str, typer.Option("--input", metavar="LOW:HIGH", help="Tokens of a prompt, drawn evenly.")]
Output = Annotated[str, typer.Option("--output", metavar="LOW:HIGH", help="Tokens of an answer, drawn evenly.")]
LengthsFile = Annotated[
    Path | None, typer.Option("--lengths", metavar="FILE", help='Instead: lines of {"input": 812, "output": 97}.')
]
Prefix = Annotated[
    str, typer.Option("--shared-prefix", metavar="TOKENS[xGROUPS]", help="What all prompts (of a group) begin with.")
]
SLO = Annotated[str, typer.Option("--slo", help="Seconds promised to each request: ttft=0.5,tpot=0.05,e2e=10.")]
EarlyEnd = Annotated[bool, typer.Option("--early-end", help="Let answers end early: not every server can forbid it.")]
Key = Annotated[str | None, typer.Option("--api-key", envvar="LMWORKS_API_KEY", help="Sent as a bearer token.")]
Seconds = Annotated[float, typer.Option("--timeout", min=0.001, help="Longest time for one request.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Same seed, same requests at the same moments.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it (.png, .svg or .pdf).")]


def serve(
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
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
    api_key: Key = None,
    timeout: Seconds = 600.0,
    seed: Seed = 0,
    plot: Plot = None,
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

    promise = Slo.parse(slo)
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
    measured = bench_serve(url, load, promise, model=model, endpoint=endpoint.value, key=api_key, timeout=timeout)
    facts = measured.to_dict()
    if plot is not None:
        from ..bench.serve import draw_bench

        draw_bench(measured, plot)
    if json:
        print_json(facts)
    else:
        show(facts)
    if not facts["completed"]:
        raise typer.Exit(1)


def show(facts: dict[str, Any]) -> None:
    typer.echo(
        f"{facts['model']} at {facts['url']}: {facts['requests']} requests, {facts['arrivals']}, "
        f"in {duration(facts['seconds'])}"
    )
    rejected, errors = sum(facts["rejected"].values()), sum(facts["errors"].values())
    codes = ", ".join(f"{count} with {status}" for status, count in facts["rejected"].items())
    good, cached = facts["goodput"], facts["cached_tokens"]
    rows = [
        ["completed", str(facts["completed"]), f"{facts['requests_per_s']:.3g} a second"],
        ["turned away", str(rejected), codes],
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
        "rejected_s": "until turned away",
        "late_s": "sent later than meant",
    }
    columns = ["mean", "p50", "p90", "p99", "max"]
    times = [[name, *(duration(facts[key][one]) for one in columns)] for key, name in names.items() if facts[key]]
    print_table("", ["", *columns], times)
