"""`lmworks plan`: memory and step time of a run on one device (`run`), and of every rank on a cluster (`memory`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..data.progress import console_progress
from ..plan.memory.host import available_bytes, ranks_on_host
from ..record.formatting import binary_bytes, duration, short
from ..spec import Cluster, Gpu, RunSpec, SpecError, load_run
from .groups import DefaultCommandGroup
from .options import Dial, Dtype, GlobalBatch, MicroBatch, OnCluster, Overrides, Seq, Spec, print_host_memory, with_dial
from .output import Json, print_json, print_table, write_file
from .plan_collective import collective
from .plan_kv_tiers import kv_tiers
from .plan_lookup import hardware, mesh, models, pipeline, print_busy
from .plan_reliability import reliability
from .plan_search import search
from .plan_serve import serve
from .plan_validate import calibrate, validate
from .plan_validate import predict as predict_table

if TYPE_CHECKING:
    from ..plan.devices.machine import Machine
    from ..plan.exact.exchanges import Collective
    from ..plan.memory.phases import ModelMemory, PhaseSheet
    from ..plan.memory.sheet import Budget
    from ..plan.predict import Prediction
    from ..plan.round_time import RunTime


class SpecOrCommand(DefaultCommandGroup):
    """`lmworks plan SPEC` is `lmworks plan run SPEC`."""

    default_command = "run"

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        spec = self.commands["run"].params[0]
        return [*super().shell_complete(ctx, incomplete), *spec.shell_complete(ctx, incomplete)]


app = typer.Typer(
    cls=SpecOrCommand,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Predict memory, time and cost of a run; find the best layout.",
)
PREDICT, LOOK_UP, CHECK = "Predict", "Look up and draw", "Calibrate and validate"


@app.command("run", rich_help_panel=PREDICT)
def run(
    spec: Spec,
    overrides: Overrides = None,
    dial: Dial = "",
    no_probe: Annotated[bool, typer.Option("--no-probe", help="Do not measure this machine: no step time.")] = False,
    answer_tokens: Annotated[
        float, typer.Option("--answer-tokens", min=0, help="Mean length of sampled answers (0: align.max_tokens).")
    ] = 0.0,
    json: Json = False,
) -> None:
    """Predict the memory and the step time of a run on one device.

    The time is for this machine, measured in a few seconds the first time, or for the accelerator that cluster.gpu
    names, from products measured on it or on related GPUs.

    \b
    Examples:
      lmworks plan configs/tiny.toml
      lmworks plan cpu-10m data.seq=256 data.micro_batch=8
      lmworks plan llama3-1b cluster.gpu=H200-SXM-141GB data.seq=4096 data.micro_batch=4 precision.dtype=bf16
      lmworks plan gpt2-small parallel.recompute=full --no-probe --json
      lmworks plan configs/small.toml --dial depth=12 cluster.gpu=h100
      lmworks plan configs/reference/70b-256-h100.toml
    """
    from ..plan.memory.host_need import machine_need, refusal
    from ..plan.memory.sheet import run_phases
    from ..plan.ops import device_of
    from ..plan.predict import predict

    job = load_run(spec, with_dial(spec, overrides, dial))
    machine = find_machine(job.cluster, no_probe)
    prediction, ranks = predict(job, machine), ranks_on_host(job)
    shared = machine_need(job, range(ranks), machine.device if machine else device_of(job))
    there = available_bytes() if is_here(job.cluster) else None
    refused = refusal(job, shared, ranks, there)
    device = machine.device if machine else device_of(job)
    phases = run_phases(job, job.cluster.accelerator, device) if job.align.method else None
    rounds = rounds_of(job, answer_tokens)
    if json:
        calls = [vars(call) for call in sent(job)]
        facts = {**prediction.to_dict(), "host_bytes_per_machine": shared.total}
        facts |= {"host_per_machine_parts": shared.to_dict(), "host_available_bytes": there}
        facts["host_fits"] = None if there is None else not refused
        if phases:
            facts["post_training"] = phases.to_dict()
        if rounds:
            facts["rounds"] = rounds.to_dict()
        if job.stages:
            facts["stages"] = stages_of(job, machine)
        starts = [] if phases is None or phases.engine_starts else [False]
        verdict = fits_in_all([fits(prediction), *(stage["fits"] for stage in facts.get("stages", [])), *starts])
        print_json({"name": job.name, **facts, "fits": verdict, "collectives": calls})
        return
    last = ", of the last stage" if job.stages else ""
    typer.echo(f"{job.name}: {job.model.params:,} parameters, {job.tokens_per_step:,} tokens a step{last}")
    print_memory(prediction)
    print_host_memory(prediction.memory.host, shared.total, ranks, shared, there)
    if refused:
        typer.echo(f"it would be refused on this machine: {refused}")
    print_calls(job)
    print_time(prediction, job)
    if phases:
        print_phases(phases)
    if rounds:
        print_rounds(job, rounds)
    if job.stages:
        print_run_stages(stages_of(job, machine), job)


def fits_in_all(verdicts: list[bool | None]) -> bool | None:
    """A run ends at the first stage that does not fit; None: unknown."""
    return False if False in verdicts else None if None in verdicts else True


def stages_of(job: RunSpec, machine: Machine | None) -> list[dict[str, Any]]:
    """Memory and time of each stage of a run."""
    from ..plan.predict import predict

    found = []
    for number, stage in enumerate(job.stages):
        spec = job.stage(number)
        prediction = predict(spec, machine)
        step_s = prediction.time.total if prediction.time else None
        found.append({
            "steps": stage["steps"],
            "seq": spec.data.seq,
            "rope_theta": spec.model.rope_theta,
            "rope_scaling": spec.model.rope_scaling.type,
            "tokens": stage["steps"] * spec.tokens_per_step,
            "memory_bytes": prediction.memory.total,
            "fits": fits(prediction),
            "step_s": step_s,
            "hours": step_s * stage["steps"] / 3600 if step_s else None,
        })  # fmt: skip
    return found


def print_run_stages(stages: list[dict[str, Any]], job: RunSpec) -> None:
    rows = [
        [
            number,
            f"{stage['steps']:,}",
            stage["seq"],
            short(stage["tokens"]),
            f"{stage['rope_theta']:g}",
            binary_bytes(stage["memory_bytes"]) + (" (too much)" if stage["fits"] is False else ""),
            duration(stage["step_s"]) if stage["step_s"] else "unknown",
            f"{stage['hours']:.3g}" if stage["hours"] else "unknown",
        ]
        for number, stage in enumerate(stages, 1)
    ]
    names = ["stage", "steps", "seq", "tokens", "rope base", "memory of a rank", "a step", "hours"]
    print_table("Stages", names, rows)
    if all(stage["hours"] for stage in stages):
        hours, gpu = sum(stage["hours"] for stage in stages), job.cluster.accelerator
        rate = job.cluster.price_hour or (gpu.price_hour if gpu else 0)
        price = f", ${hours * rate * job.parallel.world:,.0f}" if rate else ""
        typer.echo(f"all stages: {hours:,.3g} hours{price}, without failures")


def rounds_of(job: RunSpec, answer_tokens: float) -> RunTime | None:
    """Where the accelerator is named; SFT is a run of plain steps."""
    from ..plan.round_time import run_time

    gpu = job.cluster.accelerator
    return run_time(job, gpu, answer_tokens) if gpu and job.align.method not in ("", "sft") else None


def print_rounds(job: RunSpec, time: RunTime) -> None:
    """Hours and dollars of post-training by phase."""
    unit = "round" if job.align.online else "step"
    rows = [
        [
            phase.phase,
            phase.model,
            duration(phase.seconds),
            f"{phase.seconds / time.seconds:.0%}",
            f"{time.rounds * phase.seconds / 3600:.3g} h",
        ]
        for phase in time.phases
    ]
    print_table(f"Time by phase, {time.rounds:,} {unit}s", ["phase", "runs", f"a {unit}", "share", "in all"], rows)
    if time.overlaps:
        typer.echo("generation overlaps with scores and updates: a round takes as long as the longer of the two")
    price = f", ${time.dollars:,.0f}" if time.dollars else ""
    typer.echo(f"{unit} {duration(time.seconds)}; {time.rounds:,} {unit}s take {time.hours:.3g} hours{price}")


def is_here(cluster: Cluster) -> bool:
    """Whether the run is planned for this machine."""
    return not cluster.profile and cluster.accelerator is None


def find_machine(cluster: Cluster, no_probe: bool) -> Machine | None:
    from ..plan.devices.machine import Machine
    from ..plan.devices.profile import profile_of

    if cluster.profile:
        return profile_of(cluster).machine
    if cluster.accelerator:
        return Machine.of(cluster.accelerator)
    if no_probe:
        return None
    from ..bench.calibrate import cached_machine, this_machine

    if machine := cached_machine(cluster):
        return machine
    with console_progress() as progress:
        return this_machine(cluster, progress=progress)


def fits(prediction: Prediction) -> bool | None:
    """With what the allocator takes on top; None where the machine, or its memory, is unknown."""
    from ..plan.memory.reserve import reserved, safe_bytes_of

    machine = prediction.machine
    if machine is None or not machine.memory_bytes:
        return None
    if machine.device == "cpu":
        return prediction.memory.total <= machine.memory_bytes
    return float(reserved(prediction.memory.total)) <= safe_bytes_of(machine.memory_bytes)


def sent(job: RunSpec) -> list[Collective]:
    from ..plan.exact.collectives import collectives

    try:
        return collectives(job)
    except SpecError:  # DeepSpeed's are unknown
        return []


def print_memory(prediction: Prediction) -> None:
    sheet, machine = prediction.memory, prediction.machine
    rows = [[row.name, binary_bytes(row.bytes), row.how] for row in sheet.rows]
    print_table(f"Memory at the highest moment of a step ({sheet.moment})", ["what", "bytes", "how"], rows)
    typer.echo(f"peak {both(sheet.total)}")
    for note in sheet.notes:
        typer.echo(f"note: {note}")
    answer = fits(prediction)
    if machine and answer is not None:
        share = sheet.total / machine.memory_bytes
        verdict = "fits in" if answer else "does NOT fit in"
        besides = ", allocator and driver included" if machine.device == "cuda" else ""
        typer.echo(f"{verdict} the {both(machine.memory_bytes)} of {machine.name}: {share:.1%} of it{besides}")


def print_calls(job: RunSpec) -> None:
    rows = [
        [call.what, call.kind, f"{call.ranks} ({call.group})", call.count, binary_bytes(call.bytes), call.when]
        for call in sent(job)
        if call.kind != "recv"
    ]
    if rows:
        print_table(
            "What rank 0 sends in a step", ["what", "how", "among", "calls", "bytes", "when"], rows, ("when", "how")
        )


def print_time(prediction: Prediction, job: RunSpec) -> None:
    from ..plan.devices.profile import profile_of
    from ..plan.step.cpu_ranks import not_priced

    time, machine = prediction.time, prediction.machine
    if machine is None:
        typer.echo("\nstep time: not predicted; leave out --no-probe to measure this machine")
        return
    if time is None:
        unknown = f"the rate of {machine.name} in {job.precision.dtype} is not known"
        if machine.covers(job.precision.dtype):
            unknown = "several ranks share this machine; name the accelerator of a cluster with cluster.gpu"
            if machine.device == "cpu":
                unknown = not_priced(job, profile_of(job.cluster) if job.cluster.profile else None) or unknown
        typer.echo(f"\nstep time: not predicted; {unknown}")
        return
    rows = [
        [part, duration(seconds), f"{seconds / time.total:.0%}", time.tags[part]]
        for part, seconds in sorted(time.parts.items(), key=lambda item: -item[1])
        if seconds
    ]
    low, high = time.interval
    span = "" if machine.quiet else f", busy while it was measured: {duration(low)} to {duration(high)}"
    print_table(f"Time of one step on {machine.name}{span}", ["part", "time", "share", "rests on"], rows)
    flops = prediction.flops.model / time.total
    typer.echo(
        f"step {duration(time.total)}, {short(time.tokens_per_s)} tokens/s, {short(flops)}FLOP/s (model)"
        + shares(prediction, job)
    )
    typer.echo(f"nine in ten such predictions lie within {duration(low)} to {duration(high)}")
    for note in time.notes:
        typer.echo(f"note: {note}")
    print_busy(machine)
    if machine.tag != "measured":
        typer.echo(f"{machine.name} was not measured: see lmworks plan validate for the errors of such predictions")


def shares(prediction: Prediction, job: RunSpec) -> str:
    """MFU and HFU, where the peak of the accelerator is known."""
    gpu, time = job.cluster.accelerator, prediction.time
    peak = gpu.peak_flops(job.precision.dtype) if gpu else None
    if not peak or time is None:
        return ""
    whole = peak * job.parallel.world * time.total
    return f", {prediction.flops.model / whole:.1%} MFU, {prediction.flops.hardware / whole:.1%} HFU"


def both(count: int) -> str:
    """Bytes in GiB and GB, which are often confused."""
    return f"{binary_bytes(count)} ({count / 1e9:.3g} GB)"


# --- plan memory -----------------------------------------------------------------------------------------


PARTS = {
    "parameters": "weights as they are held",
    "gradients": "when they are complete",
    "master": "fp32 copies of weights held in fewer bytes",
    "optimizer": "its states",
    "activations": "kept for the backward pass, at the highest moment",
    "logits": "and their gradients, at the highest moment",
    "buffers": "gathered weights, messages on their way",
    "absent": "gradients not made yet at the highest moment",
    "others": "other models: weights, and a critic's optimizer states",
    "engine": "its weights; its KV cache sleeps during an update",
}


@app.command(rich_help_panel=PREDICT)
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
    pipeline the sheet is of the rank that needs most, and of a run in [[stages]] of the stage that does.

    \b
    Examples:
      lmworks plan memory llama3-8b --cluster 8xh100 --zero 3 --seq 8192 --micro-batch 1
      lmworks plan memory llama3-70b --cluster 64xh100 --tp 8 --pp 4 --recompute selective --json
      lmworks plan memory configs/tiny.toml --cluster 2xa100
    """
    from ..plan.case import Case
    from ..plan.cluster_request import ClusterRequest, cluster_and_gpu, run_on_cluster
    from ..plan.memory.host_need import machine_need
    from ..plan.memory.reserve import RISK, capacity, oom_probability, reserved, usable
    from ..plan.memory.sheet import budget, run_budget, run_phases, saved_by_blocks

    request = ClusterRequest(cluster, seq, micro_batch, global_batch, zero, tp, cp, pp, ep, recompute, dtype)
    run = run_on_cluster(spec, overrides or (), request)
    _, gpu = cluster_and_gpu(run.cluster, "")
    priced = optimizer or run.parallel.engine != "native"  # and not run: in closed form

    def stage_budget(one: RunSpec, stage: int | None = None) -> Budget:
        if priced:
            return budget(Case.of(one, gpu).replace(optimizer=optimizer or one.optim.optimizer), stage)
        return run_budget(one, stage)

    by_stage = [float(stage_budget(run.stage(number)).reserved) for number in range(len(run.stages))]
    fullest = by_stage.index(max(by_stage)) if by_stage else None
    run = run if fullest is None else run.stage(fullest)
    found, stages = stage_budget(run), [stage_budget(run, stage).to_dict() for stage in range(run.parallel.pp)]
    ranks = ranks_on_host(run)
    shared = None if priced else machine_need(run, range(ranks), "cuda")
    phases = run_phases(run, gpu) if run.align.method else None
    needed = max(float(found.reserved), float(reserved(phases.highest.peak)) if phases else 0.0)
    room, chance = usable(gpu), float(oom_probability(needed, gpu))
    fullest_rank = max(range(len(stages)), key=lambda rank: stages[rank]["allocated"])
    kept_by_blocks = None
    if run.parallel.recompute != "budget":
        kept_by_blocks = float(saved_by_blocks(Case.of(run, gpu), fullest_rank))
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
        "fits": chance <= RISK and (phases is None or phases.engine_starts),
        "oom_probability": chance,
        "stages": stages,
        "saved_by_blocks": kept_by_blocks,
    }
    if fullest is not None:
        facts["run_stages"] = {"fullest": fullest, "reserved": by_stage}
    if phases:
        facts["post_training"] = phases.to_dict()
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
    if fullest is not None:
        sizes = ", ".join(f"{size / 2**30:.1f}" for size in by_stage)
        typer.echo(f"stages[{fullest}] needs most; GiB reserved by stage: {sizes}")
    print_budget(facts)
    print_stages(stages)
    if phases:
        print_phases(phases)
    no_engine = phases is not None and not phases.engine_starts
    verdict = "fits" if facts["fits"] else "does NOT fit" if no_engine or chance > 1 - RISK else "may not fit"
    typer.echo(
        f"{verdict}: {needed / 2**30:.1f} GiB reserved of {room / 2**30:.1f} GiB usable; "
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
    shown = {
        **PARTS,
        "allocated": "their sum",
        "left": "freed before it, in blocks that nothing of that moment fits",
        "reserved": "what the allocator takes",
        "host": "in host memory",
    }
    signed = {name: -facts[name] if name == "absent" else facts[name] for name in shown}
    rows = [
        [name, f"{signed[name] / 2**30:.2f} GiB", f"{signed[name] / 1e9:.2f} GB", how]
        for name, how in shown.items()
        if signed[name]
    ]
    print_table("The fullest rank", ["what", "GiB", "GB", "how"], rows)
    if (kept := facts["saved_by_blocks"]) and kept > facts["activations"]:
        typer.echo(f"blocks keep {kept / 2**30:.2f} GiB from forward to backward pass; the highest moment is another")


def print_stages(stages: list[dict[str, float]]) -> None:
    if len(stages) > 1:
        names = [name for name in [*PARTS, "reserved"] if any(stage[name] for stage in stages)]
        rows = [[rank, *(f"{stage[name] / 2**30:.1f}" for name in names)] for rank, stage in enumerate(stages)]
        print_table("By pipeline rank, GiB", ["rank", *names], rows)


def sharing(model: ModelMemory) -> str:
    if not model.shares:
        return ""
    return f"an adapter over the {model.shares}'s base" if model.weights else f"the {model.shares} without its adapters"


def print_phases(sheet: PhaseSheet) -> None:
    """Models of post-training, and the peak of each phase."""
    rows = [
        [
            model.name,
            short(model.parameters),
            short(model.trained) if model.trained else "–",
            *(binary_bytes(size) for size in (model.weights, model.gradients, model.optimizer)),
            sharing(model),
        ]
        for model in sheet.models
    ]
    if engine := sheet.engine:
        shared = f"{binary_bytes(engine.shared)} are the trainer's own" if engine.shared else "a copy"
        rows.append(["engine", "", "–", binary_bytes(engine.weights), "–", "–", shared])
        use = "while answers are sampled" if sheet.engine_starts else "the run will not start"
        rows.append(["KV cache", "", "–", binary_bytes(engine.cache), "–", "–", use])
    print_table(
        "Models on a rank",
        ["model", "parameters", "trained", "weights", "gradients", "optimizer states", "note"],
        rows,
        ("note",),
    )
    columns = ["phase", "runs", "at rest", "gradients", "activations, buffers", "peak"]
    figures = [
        [
            phase.phase,
            ", ".join(phase.runs),
            *(binary_bytes(size) for size in (phase.resting, phase.gradients, phase.working, phase.peak)),
        ]
        for phase in sheet.phases
    ]
    print_table("Phases", columns, figures)
    if sheet.host:
        typer.echo(f"models and optimizer states at rest are in host memory: {both(sheet.host)}")
    if moved := sheet.hand_over:
        where = f"{binary_bytes(moved.received)} from other ranks, {binary_bytes(moved.copied)} copied on every rank"
        if moved.broadcast:
            sent = binary_bytes(moved.broadcast)
            where = f"{binary_bytes(moved.received)} from other ranks of the trainer, {sent} broadcast to rollout ranks"
        typer.echo(f"a hand-over of weights to the engine: {where}")
    typer.echo(f"the highest phase is {sheet.highest.phase}: {both(sheet.highest.peak)}")
    if not sheet.engine_starts:
        typer.echo("no memory is left for the engine's KV cache: raise align.engine_memory, a part of the whole GPU")
    if other := sheet.rollout_rank:
        parts = f"{binary_bytes(other.resting)} of weights and KV cache, {binary_bytes(other.working)} of activations"
        typer.echo(f"a rollout rank: {parts}; {both(other.peak)} in all")


# --- commands of other files ------------------------------------------------------------------------------


app.command(rich_help_panel=PREDICT)(search)
app.command(rich_help_panel=PREDICT)(serve)
app.command("kv-tiers", rich_help_panel=PREDICT)(kv_tiers)
app.command(rich_help_panel=PREDICT)(reliability)
app.command("predict", rich_help_panel=PREDICT)(predict_table)
app.command(rich_help_panel=LOOK_UP)(models)
app.command(rich_help_panel=LOOK_UP)(hardware)
app.command(rich_help_panel=LOOK_UP)(mesh)
app.command(rich_help_panel=LOOK_UP)(pipeline)
app.command(rich_help_panel=LOOK_UP)(collective)
app.command(rich_help_panel=CHECK)(calibrate)
app.command(rich_help_panel=CHECK)(validate)
