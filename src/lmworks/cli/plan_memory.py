"""`lmworks plan memory`: the budget sheet of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Dtype, GlobalBatch, MicroBatch, OnCluster, Seq, print_host_memory
from .output import Json, Overrides, Spec, print_json, print_table, write_file

if TYPE_CHECKING:
    from ..spec import Gpu, RunSpec

PARTS = {
    "parameters": "weights as they are held",
    "gradients": "when they are complete",
    "master": "fp32 copies of weights held in fewer bytes",
    "optimizer": "its states",
    "activations": "kept for the backward pass, at the highest moment",
    "logits": "and their gradients, at the highest moment",
    "buffers": "gathered weights, messages on their way",
    "absent": "gradients not made yet at the highest moment",
}


def memory(
    spec: Spec,
    overrides: Overrides = None,
    cluster: OnCluster = None,
    zero: Annotated[int | None, typer.Option("--zero", min=0, max=3, help="ZeRO stage of data parallelism.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Tensor-parallel ranks.")] = None,
    cp: Annotated[int | None, typer.Option("--cp", min=1, help="Context-parallel ranks.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline ranks.")] = None,
    ep: Annotated[int | None, typer.Option("--ep", min=1, help="Expert-parallel ranks.")] = None,
    seq: Seq = None,
    micro_batch: MicroBatch = None,
    global_batch: GlobalBatch = None,
    recompute: Annotated[str | None, typer.Option("--recompute", help="none, selective, mlp or full.")] = None,
    dtype: Dtype = None,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help="Price another one: adamw8bit, adafactor, muon, sgd.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with pictures.")] = None,
    json: Json = False,
) -> None:
    """Show the memory of every rank in bytes, and whether it fits.

    Data parallelism takes the GPUs that tp, cp and pp leave, and shards everything unless --zero says otherwise. With a
    pipeline the sheet is of the rank that needs most.

    \b
    Examples:
      lmworks plan memory llama3-8b --cluster 8xh100 --zero 3 --seq 8192 --micro-batch 1
      lmworks plan memory llama3-70b --cluster 64xh100 --tp 8 --pp 4 --recompute selective --json
      lmworks plan memory configs/tiny.toml --cluster 2xa100
    """
    from ..plan.case import Case
    from ..plan.cluster_request import ClusterRequest, cluster_and_gpu, run_on_cluster
    from ..plan.memory.host import ranks_on_host
    from ..plan.memory.host_need import machine_need
    from ..plan.memory.reserve import RISK, capacity, oom_probability, usable
    from ..plan.memory.sheet import budget, run_budget

    request = ClusterRequest(cluster, seq, micro_batch, global_batch, zero, tp, cp, pp, ep, recompute, dtype)
    run = run_on_cluster(spec, overrides or (), request)
    _, gpu = cluster_and_gpu(run.cluster, "")
    ranks, shared = ranks_on_host(run), None
    if optimizer or run.parallel.engine != "native":  # priced, not run: in closed form
        case = Case.of(run, gpu).replace(optimizer=optimizer or run.optim.optimizer)
        found, stages = budget(case), [budget(case, stage).to_dict() for stage in range(run.parallel.pp)]
    else:
        found, stages = run_budget(run), [run_budget(run, stage).to_dict() for stage in range(run.parallel.pp)]
        shared = machine_need(run, range(ranks), "cuda")
    room, chance = usable(gpu), float(oom_probability(found.reserved, gpu))
    facts: dict[str, Any] = {
        "name": run.name,
        "gpu": gpu.name,
        "gpus": run.parallel.world,
        "layout": layout_of(run, gpu),
        **found.to_dict(),
        "host_per_machine": float(shared.total if shared else ranks * found.host),
        "host_per_machine_parts": shared.to_dict() if shared else None,
        "capacity": capacity(gpu),
        "usable": room,
        "fits": chance <= RISK,
        "oom_probability": chance,
        "stages": stages,
    }
    if html:
        from ..report.plan_page import memory_page

        write_file(html, memory_page(facts), "--html")
    if json:
        print_json(facts)
        return
    typer.echo(f"{run.name} on {run.parallel.world} × {gpu.name}: {run.model.params:,} parameters, {facts['layout']}")
    data = run.data
    typer.echo(
        f"sequences of {data.seq} in {run.precision.dtype}, {data.global_batch} a step: "
        f"{run.accumulation} micro-batch{'es' * (run.accumulation > 1)} a rank"
    )
    print_budget(facts)
    print_stages(stages)
    verdict = "fits" if facts["fits"] else "does NOT fit" if chance > 1 - RISK else "may not fit"
    typer.echo(
        f"{verdict}: {float(found.reserved) / 2**30:.1f} GiB reserved of {room / 2**30:.1f} GiB usable; "
        f"out of memory with a probability of {chance:.0%}"
    )
    print_host_memory(float(found.host), facts["host_per_machine"], ranks, shared)
    if html:
        typer.echo(f"page: {html}")


def layout_of(run: RunSpec, gpu: Gpu) -> str:
    from ..plan.case import Case

    layout = run.parallel
    if layout.recompute != "budget":
        return Case.of(run, gpu).text
    plain = run.replace(parallel=layout.replace(recompute="none", recompute_budget=0.0))
    down = f"down to {layout.recompute_budget:g} GiB" if layout.recompute_budget else "as much as the memory asks for"
    return f"{Case.of(plain, gpu).text}, recompute {down}"


def print_budget(facts: dict[str, Any]) -> None:
    shown = {**PARTS, "allocated": "their sum", "reserved": "what the allocator takes", "host": "in host memory"}
    rows = [
        [name, f"{facts[name] / 2**30:.2f} GiB", f"{facts[name] / 1e9:.2f} GB", how]
        for name, how in shown.items()
        if facts[name]
    ]
    print_table("The fullest rank", ["what", "GiB", "GB", "how"], rows)


def print_stages(stages: list[dict[str, float]]) -> None:
    if len(stages) > 1:
        names = [*PARTS, "reserved"]
        rows = [[rank, *(f"{stage[name] / 2**30:.1f}" for name in names)] for rank, stage in enumerate(stages)]
        print_table("By pipeline rank, GiB", ["rank", *names], rows)
