"""`lmworks diagnose`: the cause of a hang, where each rank is now, or what bounds the steps of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..data.progress import activity
from ..record.formatting import duration
from ..spec import SpecError
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..bench.remedy_trial import Trial
    from ..diagnose.hang import Diagnosis
    from ..diagnose.verdict import Judgement
    from ..spec import RunSpec


def diagnose(
    targets: Annotated[
        list[Path], typer.Argument(metavar="RUN|TRACE...", help="A run, or traces of torch.profiler, one a rank.")
    ],
    attempt: Annotated[int | None, typer.Option(help="Which attempt's hang (by default the last).")] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="Print the stacks of every rank's threads.")] = False,
    attempt_remedy: Annotated[
        bool, typer.Option("--try", help="Run the spec of a run without and with the remedy, and compare.")
    ] = False,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each, with --try.")] = 5,
    json: Json = False,
) -> None:
    """Say what bounds the steps of a run or a trace, or why it hangs.

    Of a run: its last hang, or where each rank is now, and the verdict on its latest traces.

    \b
    Examples:
      lmworks diagnose runs/tiny
      lmworks diagnose runs/tiny --stacks
      lmworks diagnose runs/tiny --try
      lmworks diagnose rank0.json.gz rank1.json.gz --json
    """
    if all(target.is_file() for target in targets):
        if attempt_remedy:
            raise SpecError("--try runs the spec of a run again: give the run instead of its traces")
        judged, facts = judge_traces(targets)
        if json:
            print_json({**facts, **judged.to_dict()})
        else:
            print_judgement(judged)
        return
    if len(targets) > 1:
        missing = next(target for target in targets if not target.is_file())
        raise SpecError(f"{missing} is no file; give one run, or the traces of one job")
    diagnose_run(targets[0], attempt, stacks, steps if attempt_remedy else 0, json)


def diagnose_run(run: Path, attempt: int | None, stacks: bool, trial_steps: int, json: bool) -> None:
    from ..diagnose.hang import diagnose
    from ..record.run_summary import locate
    from ..trace.files import newest_traces

    folder = locate(run)
    found = diagnose(folder, attempt)
    files = newest_traces(folder.traces)
    judged = judge_traces(files, folder.spec())[0] if files else None
    trial = run_trial(folder.path, judged, trial_steps) if trial_steps else None
    if json:
        facts = found.to_dict()
        if judged is not None:
            facts |= judged.to_dict() if found.verdict is None else {"steps": judged.to_dict()}
        print_json({**facts, **({} if trial is None else {"trial": asdict(trial)})})
        return
    print_diagnosis(found, stacks, quiet=judged is not None)
    if judged is not None:
        typer.echo(f"traces: {', '.join(str(file) for file in files)}")
        print_judgement(judged)
    if trial is not None and judged is not None:
        typer.echo(f"    tried: {trial_text(trial, judged)}")


def trial_text(trial: Trial, judged: Judgement) -> str:
    low, high = trial.gain_range
    gained = (
        f"a step of {duration(trial.before_s)} became one of {duration(trial.after_s)}, "
        f"a gain of {trial.gain:.0%} for each sequence ({low:.0%} to {high:.0%})"
    )
    if not trial.apart:
        return f"{gained}; the steps of both overlap: it may be chance"
    return (
        f"{gained}, {'less than' if high < judged.gain[0] else 'more than' if low > judged.gain[1] else 'as'} predicted"
    )


def run_trial(run: Path, judged: Judgement | None, steps: int) -> Trial:
    """The remedy of the verdict, measured."""
    if judged is None:
        raise SpecError(f"--try: {run} has no traces; `lmworks profile attach` or `profile train` records some")
    if judged.verdict == "healthy":
        raise SpecError("--try: the verdict is healthy: there is nothing to try")
    if not judged.overrides:
        raise SpecError(f"--try: the verdict is {judged.verdict}, which no key of a spec changes")
    from ..bench.remedy_trial import try_remedy

    with activity() as doing:
        doing(f"trying {' '.join(judged.overrides)}", 0, 0)
        return try_remedy(str(run), judged.overrides, steps)


def judge_traces(files: Sequence[Path], spec: RunSpec | None = None) -> tuple[Judgement, dict[str, Any]]:
    """The verdict, and the figures that it is based on."""
    from ..diagnose.trace_facts import trace_facts
    from ..diagnose.verdict import judge
    from ..trace import read_traces

    traces = read_traces(files)
    facts, spec = trace_facts(traces, spec)
    return judge(traces, facts, spec), facts


def print_judgement(judged: Judgement) -> None:
    kind = f" ({judged.kind.replace('_', ' ')})" if judged.kind else ""
    typer.echo(f"verdict: {judged.verdict}{kind}")
    typer.echo(f"    because: {', '.join(one.text for one in judged.evidence)}")
    if judged.verdict not in ("healthy", "unknown"):
        low, high = judged.gain
        typer.echo(f"    remedy: {' '.join(judged.overrides) or 'no key of a spec'} ({judged.advice})")
        typer.echo(f"    predicted gain: {low:.0%} to {high:.0%} of a step")
    elif judged.advice:
        typer.echo(f"    {judged.advice}")
    for one in judged.others:
        typer.echo(f"    then: {one.verdict}, {one.gain[0]:.0%} to {one.gain[1]:.0%}")


def print_diagnosis(found: Diagnosis, stacks: bool, quiet: bool = False) -> None:
    """`quiet`: without the line that there is no hang."""
    for number, text in found.earlier.items():
        typer.echo(f"attempt {number} ended so: {text} (more with --attempt {number})")
    if found.verdict is not None:
        typer.echo(f"attempt {found.attempt}: {found.verdict.text}")
    for text in found.failed_saves:
        typer.echo(text)
    for writer in found.writers:
        of = f"the writer process of rank {writer.rank} on {writer.host} (pid {writer.pid})"
        typer.echo(f"{of} is {writer.state}, at {writer.checkpoint} for {writer.for_s:.1f} s")
    if found.verdict is None and not found.ranks:
        if not (found.writers or found.failed_saves or quiet):
            typer.echo(f"{found.run}: no hang is on record, and no rank of several is training now")
        return
    rows = [
        [
            one.rank,
            one.host,
            one.state,
            one.place,
            one.waits_in or "-",
            "-" if one.for_s is None else f"{one.for_s:.1f}",
        ]
        for one in found.ranks
    ]
    print_table("Ranks", ["rank", "host", "process", "in", "waits in", "for s"], rows, drop=("host",))
    if found.folder:
        typer.echo(f"reports, with stacks and the last collectives: {found.folder}")
    for one in found.ranks if stacks else ():
        typer.echo(f"\nrank {one.rank}\n{one.stacks or 'no stacks: it could not answer'}")
