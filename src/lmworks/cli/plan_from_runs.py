"""`lmworks plan calibrate --from-runs`: the reader's own runs, and the constants of the planner that they tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from .. import __version__
from ..plan.calibration.factors import CONSTANTS, law_profile, slower_profile
from ..plan.calibration.fit import Fit, fit
from ..plan.calibration.priced_run import PricedRun, price_of_case, price_of_run
from ..plan.case import Case
from ..plan.devices.machine import Machine
from ..plan.devices.profile import Profile, load_profile
from ..plan.memory.sheet import budget
from ..plan.tables.columns import read
from ..plan.tables.forecast import make_fit
from ..plan.tables.rows import job, usual_framework
from ..plan.tables.score import measured_figures
from ..record import RunFolder, read_metrics
from ..record.formatting import duration
from ..record.run_summary import column, find_runs, median
from ..report.predicted_vs_measured import read_prediction
from ..spec import Cluster, LMWorksError, RunSpec, SpecError, catalogue, recognise
from ..spec.hardware import find_gpu_name
from .output import print_table

MIN_STEPS = 5  # of a run: its median is of a step past compilation
SHOWN = 5


@dataclass(frozen=True)
class MeasuredStep:
    """A run of our own trainer (`spec`), or a row of a table (`case`)."""

    label: str
    machine: str  # of the catalogue where it is in it; "": the run does not say
    seconds: float
    spec: RunSpec | None = None
    case: Case | None = None

    @property
    def dtype(self) -> str:
        return self.case.dtype if self.case else self.spec.precision.dtype if self.spec else ""


@dataclass(frozen=True)
class Calibration:
    profile: Profile  # with the fitted constants
    fit: Fit
    prior: str  # what was fitted, as text
    left: list[str]  # runs that were not used, with the reason

    def to_dict(self) -> dict[str, Any]:
        return {"prior": self.prior, **self.fit.to_dict(), "not_used": self.left}


def calibrate_from_runs(places: Sequence[Path], gpu: str, device: str) -> Calibration:
    """`gpu`: only runs on this accelerator; "": all are on one machine."""
    steps, left = [], []
    for place in places:
        found, why = table_steps(place) if place.is_file() else run_steps(place)
        steps += found
        left += why
    wanted = find_gpu_name(gpu) if gpu else ""
    steps = [step for step in steps if not wanted or step.machine == wanted]
    if not steps:
        on = f" on {wanted}" if wanted else ""
        raise SpecError(f"--from-runs: no run{on} with a measured step. {'; '.join(left[:3])}".rstrip(". "))
    name = one_machine(steps, device)
    prior, path, text = prior_of(steps, name, device)
    runs = []
    for step in steps:
        try:
            priced = price_of_case(step.case) if step.case else price_of_run(with_gpu(step, name), prior, path)
        except LMWorksError as error:
            left.append(f"{step.label}: {error}")
            continue
        if priced is None:
            left.append(f"{step.label}: the planner has no step time for it")
        else:
            runs.append(PricedRun(step.label, step.seconds, priced))
    if unnamed := sum(not step.machine for step in steps):
        left.append(f"of {unnamed} runs no machine is recorded: they are taken for runs on this one")
    found_fit = fit(runs)
    facts = {key: value for key, value in found_fit.to_dict().items() if key != "runs"}
    made = {**(prior.made or {}), "date": datetime.now(UTC).isoformat(timespec="seconds"), "lmworks": __version__}
    profile = replace(slower_profile(prior, found_fit.factors), made={**made, "from_runs": in_toml(facts)})
    return Calibration(profile, found_fit, text, left)


def in_toml(found: Any) -> Any:
    """Without what TOML cannot hold: None."""
    if isinstance(found, dict):
        return {key: in_toml(value) for key, value in found.items() if value is not None}
    return [in_toml(one) for one in found] if isinstance(found, list) else found


# --- runs and rows ---------------------------------------------------------------------------------------


def table_steps(path: Path) -> tuple[list[MeasuredStep], list[str]]:
    table = read(path)
    steps, left, usual = [], [], usual_framework(table.rows)
    for number, (cells, raw) in enumerate(zip(table.rows, table.raw, strict=True), start=1):
        label = f"{path.name} row {number} {cells.get('label') or cells.get('model', '')}".strip()
        try:
            found = make_fit(job(cells, usual=usual), budget)
        except LMWorksError as error:
            left.append(f"{label}: {error}")
            continue
        case = found.case
        figures = measured_figures(raw, table.results, int(case.world), float(case.tokens_per_step))
        if "step time" in figures:
            name = f"{path.name} row {number} {found.label}".strip()
            steps.append(MeasuredStep(name, case.gpu.name, figures["step time"], case=case))
        else:
            left.append(f"{label}: no step time is measured")
    return steps, left


def run_steps(place: Path) -> tuple[list[MeasuredStep], list[str]]:
    steps, left = [], []
    for folder in find_runs([place]):
        label = str(folder.path)
        try:
            spec, metrics = folder.spec(), read_metrics(folder.metrics_path)
            machine = machine_of(folder, spec)
        except (LMWorksError, TypeError, ValueError) as error:  # a file of it is damaged
            left.append(f"{label}: {error}")
            continue
        seconds = median(metrics, "step_s")
        if spec.align.online or spec.stages:
            left.append(f"{label}: its steps are not alike ({'rounds' if spec.align.online else 'stages'})")
        elif seconds is None or len(column(metrics, "step_s")) < MIN_STEPS:
            left.append(f"{label}: fewer than {MIN_STEPS} measured steps")
        else:
            steps.append(MeasuredStep(label, machine, seconds, spec))
    return steps, left


def machine_of(folder: RunFolder, spec: RunSpec) -> str:
    """The accelerator that the spec names, else that of its profile, else what priced it before its first step."""
    if spec.cluster.accelerator:
        return spec.cluster.accelerator.name
    if spec.cluster.profile:
        name = load_profile(spec.cluster.profile, spec.cluster.catalogue).machine.name
    else:
        name = str((read_prediction(folder).get("machine") or {}).get("name", ""))
    known = recognise(name, spec.cluster.catalogue)
    return known.name if known else name


# --- the machine -----------------------------------------------------------------------------------------


def one_machine(steps: Sequence[MeasuredStep], device: str) -> str:
    """Runs that do not say are of this one."""
    names = Counter(step.machine or this_device(device) for step in steps)
    if len(names) > 1:
        listed = ", ".join(f"{name} ({count})" for name, count in names.most_common())
        raise SpecError(
            f"--from-runs: these runs are of {len(names)} machines: {listed}; a profile is of one, so name the runs of "
            "one, or its accelerator with --gpu"
        )
    return next(iter(names))


def this_device(device: str) -> str:
    from ..bench.calibrate import local_device
    from ..bench.kernel_timing import device_name

    name = device_name(local_device(Cluster(device=device)))
    known = recognise(name)
    return known.name if known else name


def prior_of(steps: Sequence[MeasuredStep], name: str, device: str) -> tuple[Profile, str, str]:
    """What is fitted: the profile that the newest of these runs names, this machine's probe, or the catalogue; with its
    file, if a run's spec may name it, and as text."""
    from ..bench.calibrate import local_device, this_machine
    from ..data.progress import console_progress

    named = [step.spec.cluster.profile for step in steps if step.spec and step.spec.cluster.profile]
    if named:
        return load_profile(named[-1]), named[-1], f"{named[-1]}, which the runs name"
    own = any(step.spec and step.spec.cluster.accelerator is None for step in steps)
    if own and name == this_device(device):
        with console_progress() as progress:
            machine = this_machine(Cluster(device=local_device(Cluster(device=device)).type), progress=progress)
        return Profile(machine), "", "the rates that were measured on this machine"
    if name not in catalogue():
        raise SpecError(
            f"--from-runs: the runs are of {name!r}, which is neither this machine nor in the catalogue: run this "
            "command there, or train with a profile of it (cluster.profile)"
        )
    profile = law_profile(Machine.of(catalogue()[name]), [step.dtype for step in steps])
    return profile, "", f"the catalogue's {name}, with constants fitted to published runs"


def with_gpu(step: MeasuredStep, name: str) -> RunSpec:
    assert step.spec is not None
    spec = step.spec
    if name not in catalogue(spec.cluster.catalogue):
        return spec
    return spec.replace(cluster=spec.cluster.replace(gpu=name))


# --- what is printed -------------------------------------------------------------------------------------


def print_calibration(found: Calibration) -> None:
    identified = [one for one in found.fit.constants if one.identified]
    rows = [
        [CONSTANTS[one.name], f"{one.factor:.3f}", f"{one.low:.3f} to {one.high:.3f}", f"{one.share:.0%}"]
        for one in identified
    ]
    columns = ["seconds of", "factor", "90 % interval", "share of a step"]
    print_table(f"Fitted to {len(found.fit.runs)} runs of {found.fit.jobs} jobs", columns, rows)
    typer.echo(f"factors are on {found.prior}")
    for one in found.fit.constants:
        if not one.identified:
            typer.echo(f"kept: {CONSTANTS[one.name]}: {one.kept}")
    names = {"before": "before", "after": "after", "left_out": "after, each job left out of its fit"}
    scores = [(text, found.fit.score(which)) for which, text in names.items()]
    errors = [
        [text, f"{100 * one.mape:.1f}", f"{100 * one.bias:+.1f}", f"{one.worst} ({100 * one.worst_error:+.0f})"]
        for text, one in scores
    ]
    print_table("Step time, mean absolute error, %", ["", "error", "bias", "worst run"], errors, drop=("worst run",))
    runs = [
        [run.label, *map(duration, (run.measured, run.before, run.after, run.left_out))]
        for run in found.fit.runs[:SHOWN]
    ]
    print_table("Seconds of a step", ["run", "measured", "before", "after", "left out"], runs, drop=("after",))
    if (more := len(found.fit.runs) - SHOWN) > 0:
        typer.echo(f"{more} more runs (--json lists them)")
    for sentence in found.left[:SHOWN]:
        typer.echo(f"not used: {sentence}")
    if (more := len(found.left) - SHOWN) > 0:
        typer.echo(f"not used: {more} more (--json lists them)")
    if scores[2][1].mape >= scores[0][1].mape:
        typer.echo("no gain: jobs that were left out are predicted no better than before")
