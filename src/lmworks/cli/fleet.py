"""`lmworks fleet`: plan, simulate and run a fleet of servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..record.formatting import duration
from ..spec import SpecError
from .fleet_monitoring import monitoring
from .groups import CommandGroup
from .output import Json, as_json, print_json, print_table, write_file

if TYPE_CHECKING:
    from ..fleet.plan import Pool
    from ..fleet.server_model import ServerModel
    from ..fleet.trace import Trace

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Plan, simulate, start and check a fleet of servers.",
)


# --- plan ------------------------------------------------------------------------------------------------

FleetFile = Annotated[Path, typer.Argument(metavar="FLEET.toml", help="Models, tenants and GPUs (docs/fleet.md).")]


@app.command()
def plan(fleet: FleetFile, json: Json = False) -> None:
    """Find the cheapest GPUs, replicas and formats for all models.

    \b
    Examples:
      lmworks fleet plan fleet.toml
      lmworks fleet plan fleet.toml --json
    """
    from ..fleet.config import read_fleet
    from ..fleet.plan import plan_fleet, sheet

    facts = sheet(plan_fleet(read_fleet(fleet)))
    if json:
        print_json(facts)
    else:
        print_fleet(facts)


def print_fleet(facts: dict[str, Any]) -> None:
    rows = []
    for pool in facts["pools"]:
        sliced = f", {pool['slices_per_gpu']} a GPU" if pool["slices_per_gpu"] > 1 else ""
        rows.append([
            pool["name"], ", ".join(pool["tenants"]), f"{pool['gpu']}{sliced}", pool["weights"], pool["tp"],
            pool["replicas"], pool["gpus"], f"{pool['rate']:.3g}/s", duration(pool["ttft_quantile"]),
            duration(pool["tpot_quantile"]), f"${730 * pool['dollars_hour']:,.0f}",
        ])  # fmt: skip
    columns = ["pool", "tenants", "on", "weights", "tp", "replicas", "GPUs", "rate", "TTFT", "TPOT", "a month"]
    print_table(f"{facts['fleet']}: ${facts['dollars_month']:,.0f} a month", columns, rows, drop=("rate", "weights"))
    for model, hourly in facts["other_dollars_hour"].items():
        together = any(len(pool["tenants"]) > 1 for pool in facts["pools"] if pool["model"] == model)
        other = "a pool for each tenant" if together else "one pool for all tenants"
        typer.echo(f"{model}: {other} would cost ${730 * hourly:,.0f} a month")
    if any(pool["planned_only"] for pool in facts["pools"]):
        typer.echo("MIG slices are planned from NVIDIA's profiles; nothing of them was measured")


# --- up ---------------------------------------------------------------------------------------------------

FleetFolder = Annotated[Path, typer.Option("--folder", help="Where its state and logs are.")]
FOLDER = Path("runs/fleet")


@app.command()
def up(fleet: FleetFile, folder: FleetFolder = FOLDER) -> None:
    """Start servers and gateway here; restart what dies.

    It stays in the foreground; Ctrl-C or `fleet down` ends it, requests under way are finished.

    \b
    Examples:
      lmworks fleet up fleet.toml
    """
    import os

    from ..fleet.config import read_fleet
    from ..fleet.up import STATE, Supervisor, read_state
    from ..record.parent_death import until_this_process_ends

    if (folder / STATE).exists():
        try:
            pid = read_state(folder)["pid"]
        except SpecError:
            pass  # it was killed
        else:
            raise SpecError(f"{folder}: a fleet is up there already (process {pid})")
    environment = {**os.environ, **until_this_process_ends()}  # they end with this process
    Supervisor(read_fleet(fleet), folder, environment).run(lambda text: typer.echo(text, err=True))


@app.command()
def status(folder: FleetFolder = FOLDER, json: Json = False) -> None:
    """Show a fleet that is up; exit code 1 if a process is not ready.

    \b
    Examples:
      lmworks fleet status
    """
    from ..fleet.up import status

    found = status(folder)
    if json:
        print_json(found)
    else:
        print_status(found)
    if not all(one["ready"] for one in found):
        raise typer.Exit(1)


def print_status(found: list[dict[str, Any]]) -> None:
    rows = [
        [one["name"], one["url"], "yes" if one["ready"] else "no", one["pid"] or "-", one["restarts"]] for one in found
    ]
    print_table("", ["process", "address", "ready", "pid", "restarts"], rows)


@app.command()
def down(folder: FleetFolder = FOLDER) -> None:
    """End a fleet; requests under way are finished.

    \b
    Examples:
      lmworks fleet down
    """
    from ..fleet.up import down

    down(folder)


@app.command()
def restart(
    name: Annotated[str, typer.Argument(metavar="PROCESS", help="As `fleet status` names it.")],
    folder: FleetFolder = FOLDER,
    now: Annotated[bool, typer.Option("--now", help="Kill it: its requests are not finished, others go on.")] = False,
) -> None:
    """Restart one process of a fleet; returns when it is ready.

    \b
    Examples:
      lmworks fleet restart chat-0
      lmworks fleet restart chat-0 --now
    """
    from ..fleet.up import restart

    restart(folder, name, now)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where models, logs and reports are.")] = Path(
        "runs/fleet-demo"
    ),
    json: Json = False,
) -> None:
    """Start a whole stack, kill a server, roll back a version.

    A gateway, two servers with a small model, two tenants with keys, Prometheus where it is installed; exit code 1 if
    an SLO was missed, a stream lost, or a token not billed.

    \b
    Examples:
      lmworks fleet demo
    """
    from ..drill.demo import Demo, verdict

    out.mkdir(parents=True, exist_ok=True)
    facts = Demo(out.resolve(), lambda text: typer.echo(text, err=True)).run()
    problems = verdict(facts)
    if json:
        print_json({**facts, "problems": problems})
    else:
        print_demo(facts, problems)
    if problems:
        raise typer.Exit(1)


def print_demo(facts: dict[str, Any], problems: list[str]) -> None:
    rows = [
        [one["phase"], one["tenant"], one["requests"], f"{one['within_slo']:.1%}",
         "yes" if one["within_slo"] >= facts["objective"] else "NO",
         duration(one["ttft_p50"]), duration(one["ttft_p99"]),
         one["ends"].get("lost", 0), one["ends"].get("wrong", 0)]
        for one in facts["phases"]
    ]  # fmt: skip
    slo = f"a whole answer, its first text within {facts['ttft_slo']:g} s, for {facts['objective']:.0%} of requests"
    columns = ["", "tenant", "requests", "within SLO", "met", "TTFT p50", "p99", "lost", "wrong"]
    print_table(f"SLO: {slo}", columns, rows, drop=("wrong", "p99"))
    typer.echo(f"new version: {facts['rollout'].get('state')}: {facts['rollout'].get('reason')}")
    for tenant, read in facts["tokens_read"].items():
        typer.echo(f"{tenant}: {read:,} tokens read, {facts['tokens_billed'].get(tenant, 0):,} billed")
    typer.echo(f"alerts: {', '.join(facts['alerts']) or 'none' if facts['alerts'] is not None else 'not checked'}")
    for problem in problems:
        typer.echo(f"FAILED: {problem}")


# --- manifests and check ---------------------------------------------------------------------------------


@app.command()
def manifests(
    fleet: FleetFile,
    image: Annotated[str, typer.Option(help="Container image with LMWorks in it, with a version or digest.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write: base/ and overlays/.")],
    claim: Annotated[str, typer.Option(help="PersistentVolumeClaim with a folder for each model.")] = "models",
    storage_class: Annotated[str, typer.Option(help="Its storage class (ReadWriteMany).")] = "",
    gateway_class: Annotated[str, typer.Option(help="GatewayClass of the cluster.")] = "istio",
    host: Annotated[str, typer.Option(help="The name that clients ask for (any).")] = "",
    prometheus: Annotated[
        str, typer.Option(help="Where KEDA reads queue and KV use.")
    ] = "http://prometheus.monitoring:9090",
) -> None:
    """Write Kubernetes manifests of a planned fleet, for kustomize.

    \b
    Examples:
      lmworks fleet manifests fleet.toml --image registry/lmworks:0.1.0 --out deploy
      kubectl apply -k deploy/overlays/staging
    """
    from ..fleet.config import read_fleet
    from ..fleet.kubernetes import Cluster, write_folder
    from ..fleet.plan import plan_fleet

    cluster = Cluster(image, claim, storage_class, gateway_class=gateway_class, host=host, prometheus=prometheus)
    for path in write_folder(plan_fleet(read_fleet(fleet)), cluster, out):
        typer.echo(f"wrote {path}")
    typer.echo("servers and gateway share a key: kubectl create secret generic fleet-keys --from-literal servers=…")


app.command()(monitoring)


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A deployment: manifests, alerts/, dashboards/.")],
    json: Json = False,
) -> None:
    """Say what a deployment lacks; exit code 1 if anything.

    \b
    Examples:
      lmworks fleet check deploy
    """
    from datetime import date

    from ..fleet.check import check, read_folder

    found = check(read_folder(folder), date.today())
    lacking = [one for one in found if not one.ok]
    if json:
        print_json({"checked": len(found), "missing": [vars(one) for one in lacking]})
    else:
        print_lacking(lacking, len(found))
    if lacking:
        raise typer.Exit(1)


def print_lacking(lacking: list[Any], checked: int) -> None:
    if not lacking:
        typer.echo(f"nothing is missing of {checked} points")
        return
    rows = [[one.area, one.where, one.missing] for one in lacking]
    print_table(f"{len(lacking)} of {checked} points are missing", ["", "where", "missing"], rows)


# --- fit -------------------------------------------------------------------------------------------------


@app.command()
def fit(
    outcomes: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `lmworks bench serve --save FILE` wrote, of one server.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The server file to write, for `fleet simulate`.")],
    max_seqs: Annotated[int, typer.Option(min=1, help="engine.max_seqs of the server.")] = 256,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="engine.max_batch_tokens of the server.")] = 512,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of its KV cache.")] = 4096,
    block: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 16,
    startup: Annotated[float, typer.Option(min=0, help="Seconds from its start to its first request.")] = 60.0,
    price: Annotated[float, typer.Option(min=0, help="$ an hour.")] = 0.0,
    json: Json = False,
) -> None:
    """Fit the step times of a server to a load test.

    \b
    Examples:
      lmworks bench serve --rate 3 --requests 200 --input 10:100 --output 10:60 --save outcomes.jsonl
      lmworks fleet fit outcomes.jsonl --max-seqs 8 --max-batch-tokens 128 --out server.json
    """
    from ..fleet.fit import fit, read_outcomes, to_server

    fitted = fit(read_outcomes(outcomes))
    sizes = {"max_seqs": max_seqs, "max_batch_tokens": max_batch_tokens, "blocks": blocks, "block": block}
    server = to_server(fitted, str(outcomes), **sizes).replace(startup_s=startup, price_hour=price)
    write_file(out, as_json(server.to_dict()) + "\n", "--out")
    facts = {
        "steps": fitted.count,
        "median_error": fitted.median_error,
        "base_s": server.steps.decoding(0),
        "sequence_s": server.steps.decoding(1) - server.steps.decoding(0),
        "key_s": server.steps.key,
        "prompt_token_s": server.steps.prompt_token,
        "prompt_key_s": server.steps.prompt_key,
        "request_s": server.request_s,
        "idle_requests": fitted.idle_requests,
    }
    if json:
        print_json(facts)
        return
    print_fitted(facts)
    typer.echo(f"wrote {out}; use it with: lmworks fleet simulate {out} --generate bursty")


def print_fitted(facts: dict[str, Any]) -> None:
    rows = [
        ["a step", duration(facts["base_s"]), "whatever is in it"],
        ["a decoding sequence", duration(facts["sequence_s"]), ""],
        ["a cached token that it reads", duration(facts["key_s"]), ""],
        ["a token of a prompt", duration(facts["prompt_token_s"]), ""],
        ["a token of a prompt, and one that it sees", duration(facts["prompt_key_s"]), ""],
        ["a request besides", duration(facts["request_s"]), f"{facts['idle_requests']} found the server idle"],
    ]
    title = f"{facts['steps']:,} steps, off by {facts['median_error']:.1%} (median)"
    print_table(title, ["what", "takes", ""], rows)


# --- simulate --------------------------------------------------------------------------------------------


def simulate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SERVER", help="What `fleet fit` wrote (.json), a FLEET.toml, or a model (planned, --gpu)."
        ),
    ],
    trace: Annotated[
        Path | None, typer.Option(help="Arrivals: Azure's LLM inference traces, BurstGPT, or Mooncake's JSON lines.")
    ] = None,
    generate: Annotated[str, typer.Option(help="Or arrivals that are made: diurnal, bursty or heavy_tailed.")] = "",
    rate: Annotated[float, typer.Option(min=0, help="Requests a second; a trace is stretched (0: its own).")] = 0.0,
    seconds: Annotated[float, typer.Option(min=0, help="How long (0: all of a trace; 600 of made arrivals).")] = 0.0,
    day: Annotated[float, typer.Option(min=1, help="Seconds of a period of `diurnal`.")] = 86_400.0,
    of: Annotated[str, typer.Option("--pool", help="Which pool of a FLEET.toml (its first).")] = "",
    prompt: Annotated[int, typer.Option("--input", min=0, help="Mean tokens of a prompt (0: 512, or the pool's).")] = 0,
    answer: Annotated[int, typer.Option("--output", min=0, help="Of an answer (0: 128, or the pool's).")] = 0,
    router: Annotated[
        str, typer.Option(help="round_robin, least_loaded, power_of_two or prefix_aware.")
    ] = "least_loaded",
    replicas: Annotated[
        int, typer.Option(min=0, help="Servers; with --autoscale those at first (0: 1, or as many as the pool has).")
    ] = 0,
    autoscale: Annotated[str, typer.Option(help="reactive or predictive (by default the number is fixed).")] = "",
    most: Annotated[int, typer.Option(min=1, help="Servers at any time (--autoscale, --front).")] = 16,
    startup: Annotated[float, typer.Option(help="Seconds to start a server (-1: as the server file says).")] = -1.0,
    slo: Annotated[str, typer.Option(help="SLO in seconds, e.g. ttft=0.5,tpot=0.05,e2e=10.")] = "",
    front: Annotated[bool, typer.Option("--front", help="Many policies: cost against SLO attainment.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the front (.png, .svg or .pdf).")] = None,
    gpu: Annotated[str, typer.Option(help="Accelerator of a planned server.")] = "h100",
    tp: Annotated[int, typer.Option(min=0, help="Tensor-parallel degree of a planned server (0: the cheapest).")] = 0,
    weights: Annotated[str, typer.Option(help="Format of its weights.")] = "bf16",
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same result.")] = 0,
    json: Json = False,
) -> None:
    """Replay arrivals against servers, routers and autoscalers.

    \b
    Examples:
      lmworks fleet simulate llama3-8b --gpu h100 --generate bursty --rate 20 --replicas 2 --slo ttft=1,tpot=0.05
      lmworks fleet simulate llama3-8b --generate heavy_tailed --rate 8 --replicas 4 --router prefix_aware --json
      lmworks fleet simulate fleet.toml --pool chat --trace AzureLLMInferenceTrace_conv.csv --autoscale predictive
      lmworks fleet simulate llama3-8b --generate diurnal --day 3600 --seconds 3600 --rate 30 --slo ttft=1 --front
    """
    from ..fleet import results
    from ..fleet.policies import make_policy, policies
    from ..fleet.routing import make_router
    from ..fleet.server_model import ServerModel
    from ..fleet.simulate import simulate as run
    from ..plan.serving.plans import Slo

    if plot is not None:
        from ..report.plots import check_plot_path

        check_plot_path(plot, "--plot")
        front = True
    objectives = Slo.parse(slo)
    pool = find_pool(Path(source), of) if source.endswith(".toml") else None
    if pool is not None:
        objectives, asked = pool.plan.demand.slo, pool.plan.demand
        rate, replicas = rate or (0.0 if trace else asked.rate), replicas or pool.plan.replicas
        prompt, answer = prompt or asked.lengths.input, answer or asked.lengths.output
    replicas = replicas or 1
    found = arrivals(trace, generate, rate, seconds, day, prompt or 512, answer or 128, seed)
    model = ServerModel.of_plan(pool.plan) if pool else server_model(source, found, objectives, gpu, tp, weights)
    if startup >= 0:
        model = model.replace(startup_s=startup)
    if front:
        tried = policies(found, model, objectives, most, day if generate == "diurnal" else 0.0)
    else:
        tried = [make_policy(autoscale, replicas, found, model, objectives, day if generate == "diurnal" else 0.0)]
    sheets = [
        results.sheet(run(found, model, make_router(router, seed), policy, most, replicas), model, objectives)
        for policy in tried
    ]
    points = results.front(sheets)
    if plot is not None:
        unit = "dollars" if model.price_hour else "GPU-hours"
        results.draw_front(points, plot, unit, f"{len(found.arrivals):,} requests, {model.source}")
    if json:
        print_json({
            "server": model.source, "requests": len(found.arrivals), "rate": found.rate, "router": router,
            "runs": sheets, **({"front": [vars(point) for point in points]} if front else {}),
        })  # fmt: skip
    elif front:
        print_front(points, found, model)
    else:
        print_run(sheets[0], found, model, bool(slo or pool))


def find_pool(path: Path, name: str) -> Pool:
    """A pool of a planned fleet."""
    from ..fleet.config import read_fleet
    from ..fleet.plan import plan_fleet

    found = {pool.name: pool for pool in plan_fleet(read_fleet(path)).pools}
    if name and name not in found:
        raise SpecError(f"--pool {name!r}: {path} has {', '.join(found)}")
    return found[name] if name else next(iter(found.values()))


def arrivals(
    path: Path | None, shape: str, rate: float, seconds: float, day: float, prompt: int, answer: int, seed: int
) -> Trace:
    from ..fleet.generate import Traffic, generate
    from ..fleet.trace import read_trace

    if (path is None) == (not shape):
        raise SpecError("say which requests come: --trace FILE, or --generate diurnal, bursty or heavy_tailed")
    if path is None:
        return generate(shape, Traffic(rate or 1.0, prompt, answer, seconds or 600.0, day=day), seed)
    found = read_trace(path)
    found = found.first(seconds) if seconds else found
    return found.at_rate(rate) if rate else found


def server_model(source: str, trace: Trace, slo: Any, gpu: str, tp: int, weights: str) -> ServerModel:
    """A server file, or the planner's cheapest way to serve a model with the trace's mean lengths."""
    from ..fleet.server_model import ServerModel
    from ..plan.serving.batching import Lengths
    from ..plan.serving.plans import Demand, choose
    from ..plan.serving.served_model import ServedModel
    from ..spec import catalogue, load_run
    from ..spec.hardware import find_gpu_name

    if source.endswith(".json"):
        return ServerModel.read(Path(source))
    run = load_run(source, ())
    mean = [sum(getattr(one, key) for one in trace.arrivals) / len(trace.arrivals) for key in ("prompt", "answer")]
    demand = Demand(Lengths(*(max(1, round(one)) for one in mean)), slo, max_batch=256)
    accelerator = catalogue(run.cluster.catalogue)[find_gpu_name(gpu, run.cluster.catalogue)]
    served = ServedModel.of(run.model, run.name)
    return ServerModel.of_plan(choose(served, accelerator, demand, weights=weights, tp=tp)[0])


def print_run(sheet: dict[str, Any], trace: Trace, model: ServerModel, has_slo: bool) -> None:
    good = sheet["goodput"]
    rows = [
        ["completed", f"{sheet['completed']:,}", f"{sheet['requests_per_s']:.3g} a second"],
        ["rejected", f"{sheet['rejected']:,}", "longer than the KV cache"] if sheet["rejected"] else None,
        ["tokens out", f"{sheet['output_tokens']:,}", f"{sheet['output_tokens_per_s']:,.0f} a second"],
        ["tokens in", f"{sheet['input_tokens']:,}", f"{sheet['cached_tokens']:,} found in a prefix cache"],
        ["goodput", f"{good['requests_per_s']:.3g}/s", f"{good['share']:.1%} within the SLO"] if has_slo else None,
        ["preemptions", f"{sheet['preemptions']:,}", ""],
        ["servers", sheet["most_servers"], f"at most; {sheet['policy']}"],
        ["GPU-hours", f"{sheet['gpu_hours']:.3g}", f"${sheet['dollars']:.2f}" if model.price_hour else ""],
    ]
    title = f"{len(trace.arrivals):,} requests at {trace.rate:.3g} a second; {model.source}"
    print_table(title, ["", "simulated", ""], [row for row in rows if row])
    names = {"ttft_s": "time to first token", "request_itl_s": "between tokens", "e2e_s": "whole request"}
    columns = ["mean", "p50", "p90", "p99", "max"]
    times = [[name, *(duration(sheet[key][one]) for one in columns)] for key, name in names.items() if sheet[key]]
    print_table("", ["", *columns], times)


def print_front(points: list[Any], trace: Trace, model: ServerModel) -> None:
    unit = "$" if model.price_hour else "GPU-hours"
    rows = [[one.policy, f"{one.cost:.3g}", f"{one.attained:.1%}", "yes" if one.best else ""] for one in points]
    title = f"{len(trace.arrivals):,} requests at {trace.rate:.3g} a second; {model.source}"
    print_table(title, ["policy", unit, "within the SLO", "on the front"], rows)


app.command()(simulate)
