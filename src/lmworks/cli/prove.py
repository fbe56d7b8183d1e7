"""`lmworks prove`: parity of a layout with one rank, faults in real jobs, one simulated rank of a large world."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..record.formatting import binary_bytes, duration
from ..spec import RunSpec, SpecError, load_run
from ..spec.load import apply_overrides, read_source, with_initial_shape
from . import options
from .groups import CommandGroup
from .options import Force, Overrides, Spec
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..prove.parity import Result
    from ..prove.simulate import Report
    from ..spec.layouts import Layout

COLUMNS = (
    "layout", "ranks", "loss", "worst gradient", "of", "worst weight, SGD", "AdamW", "gradient norm", "× one rank",
    "tokens", "peak memory", "collectives of a step", "",
)  # fmt: skip
DROP = ("collectives of a step", "peak memory", "tokens", "AdamW", "gradient norm", "× one rank", "worst weight, SGD")


def parity(
    spec: Annotated[
        str | None,
        typer.Argument(
            metavar="[SPEC]",
            help="A TOML file, a run folder or a preset; by default small built-in models.",
            autocompletion=options.sources,
        ),
    ] = None,
    overrides: Overrides = None,
    layouts: Annotated[
        str | None,
        typer.Option(
            "--layouts", metavar="NAME[,NAME…]|all", help="Which to prove (by default the spec's own, or else all)."
        ),
    ] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Do not stop at the first that fails.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, metavar="SECONDS", help="How long the ranks of a layout may take.")
    ] = 120,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown, for a document.")] = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Compare training under each layout with training on one rank.

    Ranks are processes on this machine's CPU. Every gradient of five steps is compared on every rank that holds a part
    of it, and every weight after them; a layout outside the tolerance is named with the parameter, and the exit code
    is 1. The layouts of `all`, with their models and tolerances, are in src/lmworks/spec/layouts.toml.

    \b
    Examples:
      lmworks prove parity --layouts all
      lmworks prove parity --layouts fsdp2,tp2-sp,pp2-zbv --json
      lmworks prove parity tiny parallel.dp=2 parallel.tp=2
      lmworks prove parity configs/tiny.toml --layouts all --keep-going
    """
    if spec is not None and "=" in spec:  # `parity model.layers=4`: there is no spec to change
        raise SpecError(f"'{spec}' changes a spec, but none is given; e.g. lmworks prove parity tiny {spec}")
    given, chosen = choose_layouts(spec, overrides or [], layouts)
    skip = given is not None and layouts == "all"
    results = run_parity(given, chosen, keep_going, skip_illegal=skip, timeout=timeout, force=force)
    if json:
        print_json([result.to_dict() for result in results])
    elif markdown:
        typer.echo(as_markdown(results))
    elif results:
        print_table("Against one rank", COLUMNS, [row_of(result) for result in results], DROP)
    failed = [result for result in results if not result.ok]
    for result in failed:
        typer.echo(f"lmworks: error: {result.layout}: {result.failure}", err=True)
    if failed:
        raise typer.Exit(1)


def choose_layouts(
    spec: str | None, overrides: list[str], names: str | None
) -> tuple[dict[str, Any] | None, list[Layout]]:
    """The spec as a table, if there is one, and the layouts to compare."""
    from ..spec.layouts import Layout, choose

    if spec is None:
        return None, choose(names or "all")
    given = with_initial_shape(apply_overrides(read_source(spec), overrides))
    if names is None and RunSpec.from_dict(given).parallel.world > 1:
        own: dict[str, Any] = {key: given[key] for key in ("parallel", "precision") if key in given}
        return given, [Layout("the spec's own", own)]
    return given, choose(names or "all")


def run_parity(
    given: dict[str, Any] | None,
    chosen: list[Layout],
    keep_going: bool,
    skip_illegal: bool,
    timeout: float,
    force: bool,
) -> list[Result]:
    """Prints each result to standard error as it arrives."""
    from ..prove.parity import parity as open_parity

    results: list[Result] = []
    with open_parity(given, timeout=timeout, force=force) as proof:
        for number, layout in enumerate(chosen, 1):
            place = f"[{number}/{len(chosen)}] {layout.name}"
            try:
                layout.run(given)
            except SpecError as error:
                if not skip_illegal:
                    raise
                typer.echo(f"{place}: left out, {error}", err=True)
                continue
            result = proof.prove(layout)
            results.append(result)
            worst = f"worst gradient {figure(result.worst_grad)}, {result.worst_grad_name}"
            typer.echo(f"{place}: {worst if result.ok else 'FAILED'} ({result.seconds:.1f} s)", err=True)
            if not (result.ok or keep_going):
                break
    return results


def row_of(result: Result) -> list[str]:
    return [
        result.layout,
        str(result.ranks),
        figure(result.loss_diff),
        figure(result.worst_grad),
        result.worst_grad_name,
        figure(result.worst_param),
        figure(result.adamw_param),
        figure(result.grad_norm_diff),
        "-" if result.times_one_rank is None else f"{result.times_one_rank:.2f} of {result.times_one_rank_limit:.2f}",
        str(result.tokens),
        f"{result.peak_bytes / 1e3:,.0f} kB",
        "; ".join(f"{c['count']} {c['kind']} {c['group']} {c['bytes'] / 1e3:,.0f} kB" for c in result.collectives),
        "ok" if result.ok else "FAILED",
    ]


def figure(value: float) -> str:
    return "-" if value != value else f"{value:.1e}"


def as_markdown(results: list[Result]) -> str:
    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *(row_of(result) for result in results)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    causes = {
        result.cause: [r.layout for r in results if r.cause == result.cause] for result in results if result.cause
    }
    notes = [f"- {', '.join(names)}: {cause}." for cause, names in causes.items()]
    return "\n".join([table, *(["", "Tolerances that are wider than usual, and why:", "", *notes] if notes else [])])


# --- chaos -----------------------------------------------------------------------------------------------


def chaos(
    trials: Annotated[int, typer.Option("--trials", min=1, help="Number of trials.")] = 200,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of fault, phase, layout and step.")] = 0,
    trial: Annotated[int | None, typer.Option("--trial", min=0, help="Run only this trial, to repeat it.")] = None,
    fault: Annotated[str, typer.Option("--fault", help="Only this kind of fault (--list shows all).")] = "",
    phase: Annotated[str, typer.Option("--phase", help="Only faults injected in this phase.")] = "",
    method: Annotated[
        str, typer.Option("--method", help="Post-training method of the jobs, e.g. grpo (empty: pretraining).")
    ] = "",
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Trials at a time.")] = 1,
    out: Annotated[Path, typer.Option("--out", help="Folder of the report and of failed trials.")] = Path("runs/chaos"),
    listing: Annotated[bool, typer.Option("--list", help="List faults, their phases and expected verdicts.")] = False,
    json: Json = False,
) -> None:
    """Inject faults into small jobs, resume them, compare the results.

    Every trial is a job of real ranks on this machine: killed, stopped, preempted, out of disk, with damaged
    checkpoints or data, wrong numbers, a slow rank or a wrong collective, at a named phase. It must end bitwise where
    the uninterrupted job ends, or stop, name the right cause and do so after a resume. The first trials cover every
    legal pair of fault and phase. The exit code is 1 if any trial failed.

    \b
    Examples:
      lmworks prove chaos --trials 200 --seed 7 --jobs 2
      lmworks prove chaos --fault kill-rank --phase save.commit --trials 5
      lmworks prove chaos --method grpo --fault kill-rank --trials 20
      lmworks prove chaos --seed 7 --trial 31
      lmworks prove chaos --list
    """
    from ..prove.chaos.faults import sample_trial
    from ..prove.chaos.harness import open_harness, run_trials
    from ..prove.chaos.report import SUMMARY, fault_rows, progress_line, summary_rows, write_report

    if listing:
        print_faults(json, fault_rows())
        return
    numbers = range(trials) if trial is None else [trial]
    sampled = [sample_trial(seed, number, fault, phase, method) for number in numbers]
    began = time.monotonic()
    typer.echo(f"seed {seed}: {len(sampled)} trials, {jobs} at a time", err=True)
    with open_harness(out) as harness:
        found = run_trials(harness, sampled, jobs, lambda outcome: typer.echo(progress_line(outcome, trials), err=True))
    table, record = write_report(found, seed, time.monotonic() - began, out)
    failed = [outcome for outcome in found if not outcome.ok]
    if json:
        print_json([outcome.to_dict() for outcome in found])
    else:
        print_table(f"{len(found)} trials, {len(failed)} lost", SUMMARY, summary_rows(found))
        typer.echo(f"report: {table}   {record}")
    for outcome in failed:
        typer.echo(f"lmworks: error: {outcome.fault} in {outcome.phase}: {outcome.problem}", err=True)
        typer.echo(f"  repeat it with: {outcome.repeat}   its files: {outcome.folder}", err=True)
    if failed:
        raise typer.Exit(1)


def print_faults(json: bool, rows: list[list[str]]) -> None:
    columns = ("fault", "what", "phases", "verdict", "layouts", "saves")
    if json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table("Faults, phases and expected verdicts", columns, rows)


# --- simulate --------------------------------------------------------------------------------------------


def simulate(
    spec: Spec,
    overrides: Overrides = None,
    world: Annotated[int, typer.Option("--world", help="Ranks that the layout must have (0: whatever it has).")] = 0,
    rank: Annotated[int, typer.Option("--rank", help="The rank to simulate.")] = 0,
    layers_per_stage: Annotated[
        int,
        typer.Option("--layers-per-stage", min=0, help="Extrapolate from this many layers and one more (0: 2 and 3)."),
    ] = 0,
    exact: Annotated[bool, typer.Option("--exact", help="Simulate every layer, and extrapolate nothing.")] = False,
    json: Json = False,
) -> None:
    """Step one rank of a layout on a CPU: collectives, peak memory.

    The code is that of a real run, with fake tensors and a fake process group. Layers are alike, so few are simulated:
    the report says whether it is exact or how it was extrapolated.

    \b
    Examples:
      lmworks prove simulate gpt2-small parallel.strategy=fsdp2 parallel.dp=64 --rank 63
      lmworks prove simulate llama3-70b parallel.tp=8 parallel.sp=true parallel.pp=8 parallel.strategy=fsdp2 \\
        parallel.dp=16 data.seq=8192 data.micro_batch=1 precision.dtype=bf16 cluster.device=cuda \\
        --world 1024 --rank 777
    """
    run = load_run(spec, overrides or ())
    layout = run.parallel
    if world and world != layout.world:
        raise SpecError(
            f"--world {world}, but the layout has {layout.world} ranks: pp × dp × cp × tp = "
            f"{layout.pp} × {layout.dp} × {layout.cp} × {layout.tp}"
        )
    if exact and layers_per_stage:
        raise SpecError("--exact simulates every layer: leave out --layers-per-stage")
    from ..prove.simulate import simulate as simulate_rank

    report = simulate_rank(run, rank, layers_per_stage=layers_per_stage, exact=exact)
    if json:
        print_json({"name": run.name, **report.to_dict()})
    else:
        print_simulation(report)


def print_simulation(report: Report) -> None:
    found = report.simulation
    place = ", ".join(f"{axis} {index}" for axis, index in report.place.items() if index) or "first on every axis"
    layers = ", ".join(f"{stage.layers.start}–{stage.layers.stop - 1}" for stage in report.stages)
    typer.echo(f"rank {report.rank} of {report.world} ({place}): layers {layers}, {report.micro_batches} micro-batches")
    typer.echo(f"parameters {found.parameters:,} ({binary_bytes(found.parameter_bytes)})")
    rows = [[row.kind, row.group, row.ranks, row.count, binary_bytes(row.bytes)] for row in found.collectives]
    print_table("Collectives of one step", ["kind", "group", "ranks", "count", "bytes"], rows)
    memory = [[name, binary_bytes(found.resident[name]), binary_bytes(size)] for name, size in found.peak.items()]
    memory.append(["total", binary_bytes(sum(found.resident.values())), binary_bytes(found.peak_bytes)])
    print_table("Memory", ["what", "before the update", f"at the peak ({found.moment})"], memory)
    typer.echo(report.how)
    for note in report.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"simulated in {duration(report.seconds)}")


# --- the group -------------------------------------------------------------------------------------------


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Check layouts, recovery and memory: parity, faults, simulation.",
)
app.command()(parity)
app.command()(chaos)
app.command()(simulate)
