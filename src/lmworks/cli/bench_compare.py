"""`lmworks bench ddp-fsdp` and `lmworks bench precision`: compare ways to train, with a report each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .options import Force, OnDevice, on_device
from .output import Json, Overrides, print_json, print_table

# Rows of its embedding do not divide, so that padding is seen.
SMALL = ("tiny", ["model.layers=4", "model.hidden=256", "model.heads=4", "model.vocab=259", "data.micro_batch=4"])
# Large enough that formats differ, small enough that all of them train within minutes on a CPU.
SMALLER = ("tiny", ["name=precision", "model.layers=4", "model.hidden=128", "optim.lr=1e-3", "log.eval_batches=8"])

SmallSpec = Annotated[
    str,
    typer.Argument(
        metavar="[SPEC]",
        help="A TOML file, a run folder, or a preset (by default a small model).",
        autocompletion=options.sources,
    ),
]


def ddp_fsdp(
    spec: SmallSpec = "",
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option("--ranks", min=2, help="Data-parallel ranks, all on this machine.")] = 2,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps of each strategy.")] = 10,
    out: Annotated[Path, typer.Option("--out", help="Folder of report.md and report.html.")] = Path(
        "runs/study-ddp-fsdp"
    ),
    only: Annotated[
        str, typer.Option("--only", help="Strategies to compare with DDP, e.g. fsdp2-reshard,zero-2 (by default all).")
    ] = "",
    jobs: Annotated[
        bool, typer.Option(help="Also start a real job of each, kill a rank, and resume: about half a minute each.")
    ] = True,
    force: Force = False,
    json: Json = False,
) -> None:
    """Compare DDP, FSDP1, FSDP2, ZeRO-1/2/3 and DeepSpeed on one model.

    Throughput, bytes that each rank holds (equal to the arithmetic, to the byte), peak memory, collectives, time to
    start, checkpoint, and what happens when a rank is killed.

    \b
    Examples:
      lmworks bench ddp-fsdp
      lmworks bench ddp-fsdp configs/tiny.toml model.layers=8 --ranks 4 --steps 20
      lmworks bench ddp-fsdp cpu-10m --only fsdp2-reshard,zero-1 --no-jobs --json
    """
    from ..bench.data_parallel import select_strategies, study
    from ..bench.data_parallel_report import overview_table, write_reports
    from ..report.html_page import check_output_folder
    from ..spec import TrainingError, load_run

    changes = [*([spec] if "=" in spec else []), *(overrides or ())]
    if not spec or "=" in spec:
        spec, changes = SMALL[0], [*SMALL[1], *changes]
    names = [name.strip() for name in only.split(",") if name.strip()]
    loaded = load_run(spec, changes)
    select_strategies(names)  # what is not known is refused before a folder is made
    check_output_folder(out)
    found = study(loaded, ranks, steps, names, jobs, lambda line: typer.echo(f"  {line}", err=True), force)
    markdown, html = write_reports(found, out)
    if json:
        print_json({**found.to_dict(), "report": str(html), "markdown": str(markdown)})
    else:
        less = ("calls", "as worked out", "peak")
        print_table(f"{ranks} ranks, {found.spec.model.params:,} parameters", *overview_table(found), less)
        typer.echo(f"report: {html}   {markdown}")
    wrong = [outcome.name for outcome in found.outcomes if outcome.exact is False]
    if wrong:
        raise TrainingError(f"bytes of {', '.join(wrong)} are not what the arithmetic says; see {markdown}")


def precision(
    spec: SmallSpec = "",
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each training.")] = 200,
    out: Annotated[
        Path, typer.Option("--out", help="Folder of the runs, report.md, report.html and report.png.")
    ] = Path("runs/study-precision"),
    only: Annotated[
        str, typer.Option("--only", help="Precisions to hold against fp32, e.g. bf16,fp8-rowwise (by default all).")
    ] = "",
    device: OnDevice = "",
    force: Force = False,
    json: Json = False,
) -> None:
    """Compare fp32, bf16, fp16 and fp8 training of one model.

    Loss curves and their gap to fp32 beside the noise of two seeds, gradients flushed to zero or overflowing, updates
    lost to rounding, loss scales, gradient norms, speed, memory, and a verdict. Every training is a run under --out;
    the same command continues where it was stopped. What the spec says of number formats is replaced.

    \b
    Examples:
      lmworks bench precision
      lmworks bench precision --only bf16,bf16-nearest --steps 50 --out runs/bf16
      lmworks bench precision configs/small.toml cluster.device=cpu --json
    """
    from ..bench.precision.report import overview_table, write_reports
    from ..bench.precision.study import study
    from ..spec import load_run

    changes = [*([spec] if "=" in spec else []), *(overrides or ())]
    if not spec or "=" in spec:
        spec, changes = SMALLER[0], [*SMALLER[1], *changes]
    names = [name.strip() for name in only.split(",") if name.strip()]
    loaded = load_run(spec, [*changes, f"optim.steps={steps}", *on_device(device)])
    found = study(loaded, out, names, lambda line: typer.echo(f"  {line}", err=True), force)
    markdown, html = write_reports(found)
    if json:
        print_json({**found.to_dict(), "report": str(html), "markdown": str(markdown)})
    else:
        less = ("bytes/parameter", "peak")
        print_table(f"{steps} steps, {found.spec.model.params:,} parameters", *overview_table(found), less)
        typer.echo(f"report: {html}   {markdown}")
