"""`lmworks plan search`: which layout to train with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..record.formatting import duration, short
from ..spec.errors import SpecError
from ..spec.files import check_writable
from ..spec.load import dump_toml
from . import options
from .launch import check_vocabulary, print_written
from .options import Dtype, GlobalBatch, Overrides, Seq, Spec
from .output import Json, print_json, print_table, write_file

if TYPE_CHECKING:
    from ..plan.search.candidates import SearchProblem
    from ..plan.search.explain import Verdict
    from ..plan.search.request import Request
    from ..plan.search.search import Found, Result

NO_OFFLOAD = {"offload": "none", "offload_activations": 0}  # of a search that does not ask for it
DROP = ("MWh", "GB sent", "free", "MFU", "tokens/s", "GiB a GPU")  # of the table of layouts, in a narrow terminal


def search(
    spec: Spec,
    overrides: Overrides = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            "--cluster",
            help="What it may run on, e.g. 256xh100; several to compare (by default the spec's).",
            autocompletion=options.clusters,
        ),
    ] = None,
    seq: Seq = None,
    global_batch: GlobalBatch = None,
    dtype: Dtype = None,
    fix: Annotated[
        list[str] | None, typer.Option("--fix", help="Fix a part of the layout, e.g. tp=8 or recompute=none.")
    ] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--eager", help="Blocks under torch.compile (unless the spec says no).")
    ] = None,
    risk: Annotated[
        float, typer.Option("--risk", min=0.001, max=0.5, help="Accepted probability of running out of memory.")
    ] = 0.1,
    explain: Annotated[
        str | None, typer.Option("--explain", help='Explain why not this layout: "tp=8 pp=4 zero=1 micro_batch=2".')
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option("--tokens", min=1, help="Tokens to train on, for days, $ and --out (the spec's steps, or 1e12)."),
    ] = None,
    offload: Annotated[
        bool, typer.Option("--offload", help="Where layouts do not fit, keep states or activations in host memory.")
    ] = False,
    data: Annotated[
        str | None, typer.Option("--data", help="What --out trains on: a folder made by `lmworks data prepare`.")
    ] = None,
    show: Annotated[int, typer.Option("--show", min=1, help="Rows of the table.")] = 12,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the fastest layout as a spec.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write an interactive page.")] = None,
    json: Json = False,
) -> None:
    """Price every legal layout on a cluster, and show the best.

    The table is the Pareto front, fastest first: every further row is slower and leaves more memory free. Times are in
    closed form, for the best 50 from a simulated timeline; `lmworks plan validate` shows their errors.

    Weights, states and activations stay on the GPU, unless you ask with --offload. Weights are kept in fp32 or in bf16
    with the bits that complete them (`precision.weights`), whichever is faster, unless the spec says.

    The layout of a spec file is replaced; layout keys given as overrides (parallel.tp=8) are fixed, as by --fix.

    \b
    Examples:
      lmworks plan search llama3-70b --cluster 256xh100 --seq 8192 --global-batch 1024
      lmworks plan search llama3-70b precision.dtype=fp8 --cluster 256xh100 --global-batch 1024
      lmworks plan search llama3-8b --cluster 8xh100 --tokens 15e9 --data data/mine --out best.toml
      lmworks plan search llama3-8b --cluster 8xh100 --cluster 8xa100
      lmworks plan search llama3-70b --cluster 64xh100 --global-batch 512 --fix tp=8 --json
      lmworks plan search llama3-70b --cluster 64xh100 --global-batch 512 --explain "tp=8 zero=1"
    """
    from ..plan.cluster_request import ClusterRequest
    from ..plan.search.candidates import problem_of
    from ..plan.search.explain import explain as explain_layout
    from ..plan.search.explain import read_layout
    from ..plan.search.request import read_request, run_of_layout
    from ..plan.search.search import search as find

    began = time.perf_counter()
    request, fixed = ClusterRequest(seq=seq, global_batch=global_batch, dtype=dtype), read_layout(fix or [])
    search_request = read_request(
        spec, overrides or (), request, fixed, clusters=cluster or (), compile=compiled, tokens=tokens, data=data
    )
    base = search_request.base
    more: dict[str, Any] = {
        "own": search_request.cluster,
        "compile": base.parallel.compile,
        "risk": risk,
        "pinned": search_request.pinned,
    }
    asked = [problem_of(base, text, **more) for text in cluster or [""]]
    if "precision.weights" not in search_request.said and base.precision.compute == "bf16":
        asked = [replace(one, kept=one.kept.replace(weights=kept)) for one in asked for kept in ("fp32", "bf16")]
    problems = asked if offload else [replace(one, pinned={**NO_OFFLOAD, **one.pinned}) for one in asked]
    for option, path in (("--out", out), ("--html", html)):
        if path:
            check_writable(path, option)
    if out:
        check_vocabulary(base)
    result = find(problems)
    verdict, weights = None, ""
    for one in asked if explain else ():
        if one.cluster != asked[0].cluster or (verdict and not verdict.binding):
            break
        verdict = explain_layout(one, read_layout((explain or "").split()), base, result)
        weights = one.precision.weights
    if not result.front and verdict is None:
        raise SpecError(no_layout_message(problems[0], result, asked[0].pinned) + offload_hint(asked, offload))
    facts: dict[str, Any] = {
        "model": base.name,
        "params": base.model.params,
        "seq": base.data.seq,
        "global_batch": problems[0].global_batch,
        "legal": result.legal,
        "fitting": result.fitting,
        "seconds": time.perf_counter() - began,
        "front": [row(found, search_request) for found in result.front],
        "fastest": [row(found, search_request) for found in result.fastest] if len(cluster or ()) > 1 else [],
        "fronts": [[row(found, search_request) for found in each] for each in result.fronts] if html or json else [],
        "explained": {**explained(verdict), "weights": weights} if verdict else None,
    }
    if out and result.front:
        written = run_of_layout(result.front[0], search_request)
        write_file(out, dump_toml(written.to_dict()), "--out")
        facts["written"] = {"path": str(out), "row": 0, "steps": written.optim.steps}
        facts["written"]["data"] = list(written.data.sources)
    if html:
        from ..report.plan_page import search_page

        drawn = {
            "front": with_timelines(facts["front"], result.front),
            "fronts": [with_timelines(*each) for each in zip(facts["fronts"], result.fronts, strict=True)],
        }
        write_file(html, search_page({**facts, **drawn}), "--html")
    if json:
        print_json(facts)
        return
    if result.front:
        print_front(facts, show)
    else:
        typer.echo(no_layout_message(problems[0], result, asked[0].pinned) + offload_hint(asked, offload))
    if verdict:
        print_verdict(verdict, weights)
    if out and result.front:
        print_written(written, out)
    if html:
        typer.echo(f"page: {html}")


def offload_hint(asked: Sequence[SearchProblem], offload: bool) -> str:
    """Where nothing fits without host memory: the cluster on which something fits with it."""
    from ..plan.search.search import search as find

    fitting = [] if offload else [found.problem for found in find(asked).front]
    return f". With --offload some fits on {fitting[0].cluster.gpus} × {fitting[0].gpu.name}" if fitting else ""


def no_layout_message(problem: SearchProblem, result: Result, pinned: Mapping[str, Any]) -> str:
    """Why no layout is legal or fits, and what would; `pinned` is what the reader has fixed."""
    from ..plan.search.search import min_memory_bytes, smallest_fitting_cluster

    where = f"{problem.cluster.gpus} × {problem.gpu.name}"
    if not result.legal:
        message = (
            f"no layout of {where} is legal for a batch of {problem.global_batch} sequences of {problem.seq} tokens"
        )
        if pinned:
            kept = ", ".join(f"{key}={value}" for key, value in pinned.items())
            return f"{message} with {kept}: --explain '{kept.replace(',', '')}' says why"
        return f"{message}; a batch of {-(-problem.global_batch // problem.world) * problem.world} divides evenly"
    need, room = min_memory_bytes(problem) / 2**30, problem.safe_bytes / 2**30
    larger = smallest_fitting_cluster(problem)
    hint = f"; {larger.cluster.gpus} × {problem.gpu.name} would do" if larger else ""
    return f"nothing fits on {where}: the smallest layout needs {need:.1f} GiB of {room:.1f} GiB a GPU{hint}"


def row(found: Found, request: Request) -> dict[str, Any]:
    """One layout of the front, for programs."""
    from ..plan.devices.links import Fabric
    from ..plan.exact.collectives import collectives
    from ..plan.memory.reserve import capacity, oom_probability, usable
    from ..plan.memory.sheet import budget
    from ..plan.step.price import price as closed_form

    price, problem, base = found.price or closed_form(found.case), found.problem, request.base
    spec, fabric = found.spec(base), Fabric.of(problem.cluster, problem.gpu)
    low, high = price.interval
    return {
        "layout": found.layout,
        "text": found.case.text,
        "weights": problem.precision.weights,
        "gpu": problem.gpu.name,
        "gpus": problem.world,
        "step_s": found.step_s,
        "interval": [float(low), float(high)],
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_per_gpu": found.tokens_per_s / problem.world,
        "mfu": float(price.mfu),
        "hfu": float(price.hfu),
        "memory": found.budget.to_dict(),
        "host_per_machine": float(found.budget.host) * problem.cluster.gpus_per_node,
        "stages": [budget(found.case, stage).to_dict() for stage in range(spec.parallel.pp)],
        "capacity": capacity(problem.gpu),
        "usable": usable(problem.gpu),
        "headroom": found.headroom,
        "oom_probability": float(oom_probability(found.reserved, problem.gpu)),
        "dollars_per_gtoken": found.dollars_per_gtoken if found.price_hour else None,
        "bill": bill_of(found, request.tokens_on(problem)),
        "parts": {name: float(seconds) for name, seconds in price.parts.items()},
        "hidden": {name: float(seconds) for name, seconds in price.hidden.items()},
        "tags": price.tags,
        "notes": list(price.notes),
        "collectives": [{**vars(call), "link": fabric.link(call.ranks, call.stride)} for call in collectives(spec)],
    }


def bill_of(found: Found, tokens: float) -> dict[str, float | None]:
    """Dollars and kWh are None where the catalogue has no price or no power."""
    bill = {"tokens": tokens, **vars(found.bill(tokens))}
    return {key: None if value == 0 and key in ("dollars", "kwh") else float(value) for key, value in bill.items()}


def with_timelines(rows: list[dict[str, Any]], layouts: Sequence[Found]) -> list[dict[str, Any]]:
    return [{**row, "timeline": spans_of(found)} for row, found in zip(rows, layouts, strict=True)]


def spans_of(found: Found) -> list[list[Any]] | None:
    """The pipeline in time: too long for --json, so only a page has it."""
    from ..plan.step.price import pipeline_spans

    return [list(span) for span in pipeline_spans(found.case)] if found.case.pp > 1 else None


def explained(verdict: Verdict) -> dict[str, Any]:
    need = verdict.budget.to_dict() if verdict.budget else None
    return {**vars(verdict), "budget": need, "changes": list(verdict.changes)}


def print_front(facts: dict[str, Any], show: int) -> None:
    typer.echo(
        f"{facts['model']}: {facts['legal']:,} legal layouts, {facts['fitting']:,} fit, "
        f"{len(facts['front'])} on the front; {facts['seconds']:.1f} s"
    )
    columns = ["layout", "GiB a GPU", "free", "step", "tokens/s", "MFU", "GB sent", "days", "$", "MWh"]
    several = bool(facts["fastest"])
    if several:
        rows = [cells(one, several) for one in facts["fastest"]]
        print_table("The fastest layout of each cluster", columns, rows, DROP)
    where = "" if several or not facts["front"] else f" on {facts['front'][0]['gpus']} × {facts['front'][0]['gpu']}"
    title = f"Sequences of {facts['seq']}, {facts['global_batch']} a step{where}; fastest first"
    print_table(title, columns, [cells(one, several) for one in facts["front"][:show]], DROP)
    bill = facts["front"][0]["bill"] if facts["front"] else None
    asking = [one["host_per_machine"] for one in facts["front"][:show] if one["host_per_machine"]]
    if asking:
        most = f"{max(asking) / 2**30:,.0f} GiB"
        typer.echo(
            f"{len(asking)} of these keep something in host memory, up to {most} a machine: what yours has is not in "
            "the catalogue"
        )
    if bill:
        typer.echo(
            f"days, $ and MWh are for {short(bill['tokens'])} tokens, with {bill['stops']:.1f} failures expected: "
            f"{bill['goodput']:.1%} of the time trains if a checkpoint is saved every {duration(bill['save_every_s'])}"
        )


def cells(one: dict[str, Any], several: bool) -> list[str]:
    bill = one["bill"]
    return [
        (f"{one['gpus']} × {one['gpu']}: " if several else "") + one["text"],
        f"{one['memory']['reserved'] / 2**30:.1f}",
        f"{one['headroom']:.0%}",
        duration(one["step_s"]),
        short(one["tokens_per_s"]),
        f"{one['mfu']:.1%}",
        f"{sent(one) / 1e9:.1f}",
        f"{bill['hours'] / 24:.1f}",
        short(bill["dollars"]) if bill["dollars"] is not None else "-",
        short(bill["kwh"] / 1000) if bill["kwh"] is not None else "-",
    ]


def sent(one: dict[str, Any]) -> int:
    """Bytes of all messages of one rank in a step."""
    return sum(call["bytes"] for call in one["collectives"])


def print_verdict(verdict: Verdict, weights: str) -> None:
    binds = {"rule": "cannot run", "memory": "does not fit", "": "fits"}[verdict.binding]
    layout = " ".join(f"{key}={value}" for key, value in verdict.layout.items())
    typer.echo(f"\n{layout}, {weights} weights\n{binds}: {verdict.text}")
    if verdict.changes:
        typer.echo("the smallest changes that make it fit:")
        for change in verdict.changes:
            typer.echo(f"  {change}")
    elif verdict.binding == "memory":
        typer.echo("no two changes make it fit; see the table for layouts that do")
