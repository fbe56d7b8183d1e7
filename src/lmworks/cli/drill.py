"""`lmworks drill`: incidents in a real local fleet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..drill.incident import Moment, Report

OUT = Path("runs/drills")


def drill(
    name: Annotated[str, typer.Argument(metavar="NAME[,NAME…]|all|list|chaos", help="Which incident.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the reports, logs and the model.")] = OUT,
    trials: Annotated[int, typer.Option(min=1, help="Of `chaos`: random faults; those that are done stay done.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of `chaos`: same seed, same faults.")] = 0,
    json: Json = False,
) -> None:
    """Plant incidents in a local fleet; check users, alerts, runbooks.

    A gateway and two servers are started here with a small model. Checked are what users saw, which alerts fired
    (Prometheus and Alertmanager, where they are installed), and that the runbook's commands end the incident. The exit
    code is 1 if a check failed. `chaos` plants random faults, trial after trial, and goes on where it was ended.

    \b
    Examples:
      lmworks drill list
      lmworks drill server-killed
      lmworks drill all --out runs/drills
      lmworks drill chaos --trials 100 --seed 2026 --out runs/fleet-chaos
    """
    from datetime import date

    from ..drill.monitoring import alert_rules
    from ..drill.report import write_report
    from ..drill.run import choose, run_drills

    if name == "list":
        list_drills(json)
        return
    if name == "chaos":
        run_random_faults(trials, seed, out, json)
        return
    chosen = choose(name)
    reports = run_drills(chosen, out, alert_rules(), print_moment, print_verdict)
    table, page = write_report(reports, out, date.today())
    if json:
        print_json([one.to_dict() for one in reports])
    else:
        print_summary(reports)
    typer.echo(f"report: {table}, {page}", err=True)
    if not all(one.ok for one in reports):
        raise typer.Exit(1)


def run_random_faults(trials: int, seed: int, out: Path, json: bool) -> None:
    from dataclasses import asdict

    from ..drill.chaos import run_chaos
    from ..drill.chaos_report import trial_line, write_chaos_report

    results = run_chaos(trials, seed, out, lambda result, total: typer.echo(trial_line(result, total), err=True))
    table = write_chaos_report(results, out)
    if json:
        print_json([asdict(one) for one in results])
    failed = [one for one in results if not one.ok]
    typer.echo(f"{len(results)} trials, {len(failed)} with a problem; report: {table}", err=json)
    if failed:
        raise typer.Exit(1)


def list_drills(json: bool) -> None:
    from ..drill.drills import DRILLS

    if json:
        print_json([{"name": one.name, "what": one.what, "alerts": one.alerts} for one in DRILLS])
    else:
        rows = [[one.name, one.what, ", ".join(one.alerts) or "-"] for one in DRILLS]
        print_table("", ["drill", "what is planted", "alerts"], rows)


def print_moment(moment: Moment) -> None:
    at = f"{moment.at:6.1f} s  " if moment.kind != "drill" else ""
    typer.echo(f"{at}{moment.what}", err=True)


def print_verdict(report: Report) -> None:
    for check in report.checks:
        if not check.ok:
            typer.echo(f"FAILED  {check.name}: expected {check.expected}; {check.observed}", err=True)
    typer.echo(f"{report.drill}: {'passed' if report.ok else 'NOT passed'}", err=True)


def print_summary(reports: list[Report]) -> None:
    from ..drill.report import summary

    found = summary([one for one in reports if one.tenants])
    print_table("Drills", found.columns, found.rows, drop=("what", "refused", "over after"))
