"""`lmworks plan serve`: deployments of a model under an SLO, and the cost of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..record.formatting import duration, short
from ..spec import SpecError, catalogue, load_run
from ..spec.hardware import find_gpu_name
from . import options
from .options import Overrides, Spec
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..plan.serving.plans import Plan


def serve(
    spec: Spec,
    overrides: Overrides = None,
    gpu: Annotated[
        str,
        typer.Option(help="Accelerator, e.g. h100 (lmworks plan hardware lists them).", autocompletion=options.gpus),
    ] = "h100",
    rate: Annotated[float, typer.Option(help="Requests a second (0: as many as one replica can take).")] = 0.0,
    slo: Annotated[str, typer.Option(help="SLO in seconds, e.g. ttft=0.5,tpot=0.05,e2e=10.")] = "",
    quantile: Annotated[float, typer.Option(help="Share of requests that must meet the SLO.")] = 0.95,
    prompt: Annotated[int, typer.Option("--input", help="Tokens of a prompt.")] = 1024,
    answer: Annotated[int, typer.Option("--output", help="Tokens of an answer.")] = 256,
    weights: Annotated[str, typer.Option(help="Format of the weights: bf16, fp8, int8, int4 or fp4.")] = "bf16",
    kv: Annotated[str, typer.Option(help="Format of the KV cache: bf16, fp8, int8 or int4.")] = "bf16",
    engine: Annotated[str, typer.Option(help="Whose overheads: vllm, sglang or trtllm.")] = "vllm",
    tp: Annotated[int, typer.Option(help="Tensor-parallel degree (0: try all of one machine).")] = 0,
    ep: Annotated[bool, typer.Option("--ep", help="Expert parallelism instead of sharding each expert.")] = False,
    max_batch: Annotated[int, typer.Option(help="Sequences that the engine runs at once, at most.")] = 1024,
    price: Annotated[float, typer.Option(help="$ an hour for one accelerator (0: the catalogue's).")] = 0.0,
    json: Json = False,
) -> None:
    """Find the cheapest way to serve a model under an SLO.

    What fits, how fast it is, how many replicas it takes, and $ per million tokens.

    \b
    Examples:
      lmworks plan serve llama3-8b --gpu h100 --rate 10 --slo ttft=0.5,tpot=0.05
      lmworks plan serve llama3-70b --gpu h200 --weights fp8 --input 4096 --output 512
      lmworks plan serve qwen3-30b-a3b --gpu a100 --rate 25 --slo tpot=0.03 --json
    """
    from ..plan.serving.batching import Lengths
    from ..plan.serving.plans import Demand, Slo, choose
    from ..plan.serving.served_model import ServedModel
    from ..plan.serving.sheet import sheet

    if price < 0:
        raise SpecError(f"--price {price:g}: $ an hour cannot be negative")
    run = load_run(spec, overrides or ())
    own = run.cluster.catalogue
    accelerator = catalogue(own)[find_gpu_name(gpu, own)]
    demand = Demand(Lengths(prompt, answer), Slo.parse(slo, quantile), rate, max_batch)
    plans = choose(
        ServedModel.of(run.model, run.name), accelerator, demand,
        engine=engine, weights=weights, kv=kv, tp=tp, ep=ep, price_hour=price,
    )  # fmt: skip
    if json:
        print_json(sheet(plans, engine))
        return
    print_plans(plans)
    print_chosen(plans[0], engine)


def print_plans(plans: list[Plan]) -> None:
    first = plans[0]
    percent = f"p{100 * first.demand.slo.quantile:g}"
    rows = []
    for plan in plans:
        if plan.point is None or plan.times is None:
            rows.append([plan.deployment.tp, *["-"] * 7, plan.refused])
            continue
        at = plan.times
        rows.append([
            plan.deployment.tp, plan.max_batch, f"{plan.point.batch:.3g}", f"{1e3 * at.ttft_quantile:.0f} ms",
            f"{1e3 * at.tpot_quantile:.3g} ms", plan.replicas, plan.gpus, dollars(plan.dollars_per_million()[2]), "",
        ])  # fmt: skip
    columns = ["tp", "fit", "batch", f"TTFT {percent}", f"TPOT {percent}", "replicas", "GPUs", "$/M tokens", "why not"]
    served, gpu, lengths = first.deployment.served, first.deployment.gpu, first.demand.lengths
    title = f"{served.name} on {gpu.name}, {lengths.input:,} tokens in, {lengths.output:,} out"
    print_table(title, columns, rows, drop=("fit", "batch", "replicas"))


def print_chosen(plan: Plan, engine: str) -> None:
    from ..plan.serving.inference import read_constants
    from ..plan.serving.plans import tag

    assert plan.point is not None and plan.times is not None and plan.full is not None
    d, space, at, lengths = plan.deployment, plan.serving_memory, plan.times, plan.demand.lengths
    prompt, answer, _ = plan.dollars_per_million()
    seconds = tag(d.gpu)
    full = float(plan.full.rate)
    at_limit = f"tokens/s out, {full:.3g} requests/s" + (", all that its host can do" if plan.full.host_bound else "")
    rows: list[list[Any]] = [
        ["weights on one GPU", f"{space.weights / 1e9:.3g} GB", f"{d.weights}, multiplied in {d.compute}", "modelled"],
        ["left for the KV cache", f"{space.cache / 1e9:.3g} GB", f"{d.cache.token_bytes:,.0f} B a token", "modelled"],
        ["sequences that fit", f"{plan.max_batch:,}", f"of {lengths.total:,} tokens", "modelled"],
        ["longest sequence alone", f"{plan.max_context:,}", "tokens", "modelled"],
        ["time to first token", duration(at.ttft), f"mean; {duration(plan.idle.ttft)} when idle", seconds],
        ["time between tokens", duration(at.tpot), f"mean; {duration(plan.idle.tpot)} when idle", seconds],
        ["whole request", duration(at.e2e), f"mean; {duration(plan.idle.e2e)} when idle", seconds],
        ["a replica serves", f"{plan.point.rate:.3g}", f"requests/s at a batch of {plan.point.batch:.3g}", seconds],
        ["a replica at its limit", short(full * lengths.output), at_limit, seconds],
        ["replicas", plan.replicas, f"{plan.gpus} GPUs, ${plan.dollars_hour:.2f} an hour", "modelled"],
        ["a million tokens in", dollars(prompt), f"${plan.price_hour:g} an hour for a GPU", "modelled"],
        ["a million tokens out", dollars(answer), "", "modelled"],
    ]  # fmt: skip
    print_table(f"Cheapest: tp = {d.tp}", ["what", "figure", "", "rests on"], rows)
    off = read_constants()["errors"]
    typer.echo(f"overheads of {engine}; off by (median): TPOT {off['tpot']:.0%}, TTFT {off['ttft']:.0%}")
    if seconds == "modelled":
        typer.echo(f"no engine was measured on {d.gpu.name}: other accelerators' efficiencies on its datasheet")


def dollars(amount: float) -> str:
    return f"${amount:.3g}" if amount else "-"
