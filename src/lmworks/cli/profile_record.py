"""`lmworks profile train` and `attach`: record traces of a new run, or of one under way, and read them."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from ..data.progress import activity
from ..record import RunFolder
from ..record.attach import Attach
from ..record.profile_request import ProfileRequest
from ..spec import LMWorksError, RunSpec, SpecError, load_run
from .options import Force, OnDevice, Overrides, Spec, device_options, on_device
from .output import Json
from .ranks import needs_ranks, start_ranks
from .trace_report import report_traces
from .train import RunDir, default_run_folder

Steps = Annotated[int, typer.Option("--steps", min=1, help="Steps to record.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the report as a page.")]
PageOfRun = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Where the page goes (by default beside the traces).")
]
Perfetto = Annotated[
    Path | None,
    typer.Option("--perfetto", metavar="FILE", help="Write all ranks as one trace (.json.gz) for Perfetto."),
]
Stacks = Annotated[bool, typer.Option("--stacks", help="Also record Python calls; this slows the recorded steps down.")]


def train(
    spec: Spec,
    overrides: Overrides = None,
    steps: Steps = 3,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Steps before them, which are not recorded.")] = 3,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Where the run is kept (by default runs/NAME-profile).")
    ] = None,
    stacks: Stacks = False,
    nsys: Annotated[bool, typer.Option("--nsys", help="Record with NVIDIA Nsight Systems.")] = False,
    device: OnDevice = "",
    force: Force = False,
    html: PageOfRun = None,
    perfetto: Perfetto = None,
    json: Json = False,
) -> None:
    """Record steps of a spec on every rank, and read the traces.

    Nothing is saved or evaluated. Without data of its own the spec trains on the embedded corpus.

    \b
    Examples:
      lmworks profile train configs/tiny.toml
      lmworks profile train configs/tiny.toml parallel.dp=2 parallel.strategy=fsdp2 --steps 2
      lmworks profile train llama3-1b data.seq=4096 precision.dtype=bf16 --nsys
      torchrun --nproc-per-node 8 -m lmworks profile train llama3-8b parallel.dp=8 --run-dir runs/8b-profile
    """
    loaded = load_run(spec, [*(overrides or ()), *on_device(device)])
    target = run_dir or default_run_folder(loaded.replace(name=f"{loaded.name}-profile"))
    options = ["--steps", str(steps), "--warmup", str(warmup), "--run-dir", str(target)]
    options += [*(["--html", str(html)] if html else []), *(["--perfetto", str(perfetto)] if perfetto else [])]
    options += [*(["--stacks"] if stacks else []), *(["--json"] if json else []), *device_options(device, force)]
    command = ["profile", "train", spec, *(overrides or ()), *options]
    if nsys:
        report_recorded([record_with_nsys(command, target)], target, loaded, json, html, perfetto)
        return
    if needs_ranks(loaded):
        RunFolder(target).check_unused()
        start_ranks(loaded, command, force)
        return
    from ..bench.profile_train import profile_train
    from ..parallel.world import distributed_shutdown, is_rank_zero
    from ..train.profile import under_nsys

    with distributed_shutdown(), activity() as doing:
        doing(f"preparing {loaded.name}: {loaded.model.params:,} parameters", 0, 0)
        traces = profile_train(loaded, target, steps, warmup, stacks=stacks, force=force, progress=doing)
        first = is_rank_zero()
    if first and not under_nsys():
        report_recorded(traces, target, loaded, json, html, perfetto)


def report_recorded(
    traces: list[Path], run: Path, spec: RunSpec, json: bool, html: Path | None, perfetto: Path | None
) -> None:
    html = html or page_path(traces[0])
    known = {"run": str(run), "traces": list(map(str, traces)), "page": str(html)}
    report_traces(traces, json, html, perfetto, spec, **known)
    if not json:
        typer.echo(f"traces: {traces[0].parent} (Perfetto, https://ui.perfetto.dev, opens them)")


def page_path(trace: Path) -> Path:
    """traces/rank0-steps-4-5.json.gz → traces/steps-4-5.html"""
    return trace.with_name(re.sub(r"^rank\d+-", "", trace.name).partition(".")[0] + ".html")


def record_with_nsys(command: list[str], run: Path) -> Path:
    """Run `lmworks …command` under Nsight Systems; returns what it recorded, as SQLite."""
    nsys = shutil.which("nsys")
    if nsys is None:
        raise SpecError("--nsys: nsys is not on the PATH; install NVIDIA Nsight Systems, or leave --nsys out")
    report = run.absolute() / "traces" / "nsys.nsys-rep"
    report.parent.mkdir(parents=True, exist_ok=True)
    exported = report.with_suffix(".sqlite")
    # Ranks call cudaProfilerStart and cudaProfilerStop around the steps of log.profile.
    capture = ["--trace=cuda,nvtx,osrt", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    program = [sys.executable, "-m", "lmworks", *command[:3], "log.nvtx=true", *command[3:]]
    for arguments in (
        ["profile", *capture, "--force-overwrite=true", f"--output={report}", *program],
        ["export", "--type=sqlite", "--force-overwrite=true", f"--output={exported}", str(report)],
    ):
        ended = subprocess.run([nsys, *arguments], stdout=sys.stderr)
        if ended.returncode:
            raise LMWorksError(f"`nsys {arguments[0]}` ended with exit code {ended.returncode}")
    return exported


def attach(
    run: RunDir,
    steps: Steps = 3,
    ranks: Annotated[str, typer.Option("--ranks", metavar="0,7", help="Ranks that record (by default all).")] = "",
    stacks: Stacks = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, metavar="S", help="Give up when the run takes no step for so long.")
    ] = 600,
    html: PageOfRun = None,
    perfetto: Perfetto = None,
    json: Json = False,
) -> None:
    """Profile the next steps of a run under way, without a restart.

    Every rank begins with the same step, one or two after the request is seen. Ctrl-C withdraws the request.

    \b
    Examples:
      lmworks profile attach runs/tiny
      lmworks profile attach runs/tiny --steps 5 --ranks 0,7
    """
    folder = RunFolder.open(run)
    request = ProfileRequest.new(steps, parse_ranks(ranks), stacks)
    signal.signal(signal.SIGTERM, exit_on_signal)  # so that the request is withdrawn
    with activity() as doing:
        waiting = Attach(folder, request, timeout, doing)
        try:
            done = waiting.run()
        except (KeyboardInterrupt, SystemExit):
            if waiting.window is not None:
                first, last = waiting.window
                typer.echo(f"steps {first} to {last} are recorded all the same, into {folder.traces}", err=True)
            raise
    if done.steps < steps:
        typer.echo(f"the run ended: {done.steps} of {steps} steps were recorded", err=True)
    report_recorded(done.traces, run, folder.spec(), json, html, perfetto)


def parse_ranks(text: str) -> list[int] | None:
    """0,7 → [0, 7]; None: all of them."""
    if not text:
        return None
    try:
        return sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise SpecError(f"--ranks {text}: ranks are numbers with commas between them, e.g. 0,7") from None


def exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
