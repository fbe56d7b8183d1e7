"""`lmworks prove chaos`: put faults into real jobs, and see that nothing is lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from .output import Json, print_json, print_table


def chaos(
    trials: Annotated[int, typer.Option("--trials", min=1, help="How many jobs to strike.")] = 200,
    seed: Annotated[int, typer.Option("--seed", min=0, help="What is struck, where and how follows from it.")] = 0,
    trial: Annotated[int | None, typer.Option("--trial", min=0, help="Only this one of them, to repeat it.")] = None,
    fault: Annotated[str, typer.Option("--fault", help="Only this kind of fault (--list shows all).")] = "",
    phase: Annotated[str, typer.Option("--phase", help="Only faults that strike in this phase.")] = "",
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Trials at a time.")] = 1,
    out: Annotated[Path, typer.Option("--out", help="Folder of the report and of failed trials.")] = Path("runs/chaos"),
    listing: Annotated[
        bool, typer.Option("--list", help="Show what may strike where, and what must come of it.")
    ] = False,
    json: Json = False,
) -> None:
    """Inject faults into small jobs, resume them, compare the results.

    Every trial is a job of real ranks on this machine: killed, stopped, preempted, out of disk, with damaged
    checkpoints or data, wrong numbers, a slow rank or a wrong collective, at a named phase. It must end bitwise where
    the uninterrupted job ends, or stop with the right cause named and do so after a resume. The first trials go through
    every legal pair of fault and phase. The exit code is 1 if anything was lost.

    \b
    Examples:
      lmworks prove chaos --trials 200 --seed 7 --jobs 2
      lmworks prove chaos --fault kill-rank --phase save.commit --trials 5
      lmworks prove chaos --seed 7 --trial 31
      lmworks prove chaos --list
    """
    from ..prove.chaos.report import SUMMARY, fault_rows, progress_line, summary_rows, write_report
    from ..prove.chaos.runner import open_harness, run_trials
    from ..prove.chaos.trial import sample_trial

    if listing:
        show_list(json, fault_rows())
        return
    numbers = range(trials) if trial is None else [trial]
    drawn = [sample_trial(seed, number, fault, phase) for number in numbers]
    began = time.monotonic()
    typer.echo(f"seed {seed}: {len(drawn)} trials, {jobs} at a time", err=True)
    with open_harness(out) as kept:
        found = run_trials(kept, drawn, jobs, lambda outcome: typer.echo(progress_line(outcome, trials), err=True))
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


def show_list(json: bool, rows: list[list[str]]) -> None:
    columns = ("fault", "what", "phases", "verdict", "layouts", "saves")
    if json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table("What may strike where, and what must come of it", columns, rows)
