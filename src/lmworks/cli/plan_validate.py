"""`lmworks plan calibrate`, `validate` and `predict`: measure this machine, the planner's errors, predictions of a
table.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..data.progress import console_progress
from ..record.formatting import binary_bytes, duration, short
from ..spec import Cluster
from ..spec.errors import SpecError
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from lmworks_validation.components import Part
    from lmworks_validation.replay import Line, Report

    from ..plan.devices.links import Curve
    from ..plan.devices.profile import Profile


def calibrate(
    out: Annotated[Path, typer.Option("--out", help="The profile to write.")] = Path("profile.toml"),
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.05, max=600, help="About how long (CPU 1, CUDA 1.5).")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="Ranks that exchange messages: by default one a GPU or core.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds: fewer sizes.")] = False,
    from_runs: Annotated[
        list[Path] | None,
        typer.Option("--from-runs", metavar="RUNS", help="Instead: fit to your runs: folders, or a table (CSV)."),
    ] = None,
    gpu: Annotated[str, typer.Option("--gpu", help="With --from-runs: only runs on this accelerator.")] = "",
    json: Json = False,
) -> None:
    """Measure this machine; later plans use the profile.

    Matrix products, attention, memory-bound kernels, the optimizer, launches, and collectives between ranks of this
    machine. The machine should be idle meanwhile.

    --from-runs fits the constants that your own runs tell (what `plan validate RUNS` reads), with intervals and the
    error on runs that were left out; it may be given several times.

    \b
    Examples:
      lmworks plan calibrate
      lmworks plan calibrate --out profiles/lab.toml --minutes 5
      lmworks plan calibrate --device cpu --ranks 2 --quick
      lmworks plan calibrate --from-runs runs --out fitted.toml
      lmworks plan calibrate --from-runs cluster.csv --gpu h100 --json
      lmworks plan cpu-10m cluster.profile=profile.toml
    """
    from ..bench.calibrate import calibrate, check_output_path, local_device, save

    check_output_path(out)
    if from_runs:
        if minutes is not None or ranks is not None or quick:
            raise SpecError("--minutes, --ranks and --quick are of a measurement: leave them out with --from-runs")
        fit_to_runs(from_runs, gpu, device, out, json)
        return
    if gpu:
        raise SpecError("--gpu chooses among the runs of --from-runs; this machine's device is --device")
    place = local_device(Cluster(device=device))
    with console_progress() as progress:
        profile = calibrate(place, minutes and 60 * minutes, ranks, quick, progress)
    save(profile, out)
    if json:
        print_json({"profile": str(out), **profile.to_dict()})
        return
    print_profile(profile)
    typer.echo(f"written to {out}; plan with it: lmworks plan SPEC cluster.profile={out}")


def fit_to_runs(places: list[Path], gpu: str, device: str, out: Path, json: bool) -> None:
    from ..bench.calibrate import save
    from .plan_from_runs import calibrate_from_runs, print_calibration

    found = calibrate_from_runs(places, gpu, device)
    save(found.profile, out)
    if json:
        print_json({"profile": str(out), **found.to_dict()})
        return
    print_calibration(found)
    typer.echo(f"written to {out}; plan with it: lmworks plan SPEC cluster.profile={out}")


def print_profile(profile: Profile) -> None:
    from .plan_lookup import print_machine

    print_machine(profile.machine)
    if profile.curve:
        print_links(profile.curve)


def print_links(curve: Curve) -> None:
    from ..plan.devices.links import wire_share

    rows = [
        [kind, ranks, binary_bytes(size), duration(s), f"{short(size * float(wire_share(kind, ranks)) / s)}B/s"]
        for kind, by_ranks in curve.seconds_at.items()
        for ranks, seconds in by_ranks.items()
        for size, s in zip(curve.sizes, seconds, strict=True)
    ]
    print_table("Collectives between ranks of this machine", ["collective", "ranks", "message", "time", "sent"], rows)


# --- validate and predict --------------------------------------------------------------------------------


COLUMNS = ("source", "figure", "rows", "fitted", "p90", "bias", "blind", "in 90%", "same MFU", "MFU 40%", "worst row")
DROP = ("worst row", "MFU 40%", "p90", "bias", "same MFU", "in 90%", "rows")
PART_COLUMNS = ("what a step is priced from", "how", "rows", "median", "mean", "p90")
OWN_COLUMNS = ("runs", "figure", "rows", "error", "p90", "bias", "in 90%", "same MFU", "worst run")
SHOWN_LEFT_OUT = 5
OWN_DROP = ("worst run", "same MFU", "p90", "bias")
Data = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="A folder with bulk sets that are not part of LMWorks.")
]
TABLES = Path(__file__).parents[3] / "validation"  # in a checkout


def validate(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUNS", help="Instead: your own runs, as folders, or as tables (CSV) with results."),
    ] = None,
    data: Data = None,
    tables: Annotated[
        Path, typer.Option(metavar="DIR", show_default=False, help="The folder validation/ of a checkout of LMWorks.")
    ] = TABLES,
    source: Annotated[str, typer.Option(help="One source alone, e.g. llm-foundry.")] = "",
    json: Json = False,
) -> None:
    """Compare the planner with published runs, or with your own.

    Mean absolute error per source, beside the guess that every run has the same MFU. `fitted`: the planner's constants
    were fitted with the source; `blind`: without it. Exit code 1 when an error has grown. The tables are part of a
    checkout of LMWorks, not of an installed wheel: there, `--tables` names them.

    RUNS are folders of runs of `lmworks train`, compared with what was predicted before their first step, or tables as
    `plan predict` reads them, with columns of step time, tokens/s or memory: these are read for the comparison alone.

    \b
    Examples:
      lmworks plan validate
      lmworks plan validate runs
      lmworks plan validate cluster.csv --json
      lmworks plan validate --source torchtitan
      lmworks plan validate --data measured --json
    """
    if runs:
        if data or source:
            raise SpecError("--data and --source are of the published tables: leave them out where RUNS are given")
        print_own(validate_own(runs), json)
        return
    import_validation(tables)
    from lmworks_validation.components import components
    from lmworks_validation.replay import regressions, replay

    report = replay(data, source)
    worse = regressions(report)
    parts = [] if source else components(data)
    if json:
        print_json({**report.to_dict(), "components": [part.to_dict() for part in parts], "grown": worse})
    else:
        print_report(report)
        if parts:
            print_parts(parts)
        for sentence in worse:
            typer.echo(f"grown: {sentence}")
    if worse:
        raise typer.Exit(1)


def validate_own(places: list[Path]) -> dict[str, Any]:
    """Errors of each place, figures run by run, and what could not be compared."""
    from ..plan.tables.score import errors_of
    from .plan_own_runs import scored_runs, scored_table

    lines, figures, left = [], {}, []
    for place in places:
        scored, why = scored_table(place) if place.is_file() else scored_runs(place)
        lines += [line.to_dict() for line in errors_of(str(place), scored)]
        figures[str(place)] = [one.to_dict() for one in scored]
        left += why
    if not lines:
        raise SpecError(f"{', '.join(map(str, places))}: nothing to compare. {'; '.join(left[:3])}".rstrip(". "))
    return {"lines": lines, "runs": figures, "not_compared": left}


def print_own(found: dict[str, Any], json: bool) -> None:
    if json:
        print_json(found)
        return
    rows = []
    for line in found["lines"]:
        score, covered = line["score"], line["coverage"]
        rows.append(
            [
                f"{line['source']} {line['group']}".strip(),
                line["figure"],
                str(score["rows"]),
                percent(score["mape"]),
                percent(score["p90"]),
                f"{100 * score['bias']:+.1f}",
                "-" if covered is None else f"{100 * covered:.0f}",
                percent(line["same_mfu"]),
                f"{score['worst']} ({100 * score['worst_error']:+.0f})",
            ]
        )
    print_table("Predicted against measured, mean absolute error, %", OWN_COLUMNS, rows, OWN_DROP)
    typer.echo("in 90%: percent of runs within their 90 % interval. same MFU: the constant that fits these runs best")
    left = found["not_compared"]
    for sentence in left[:SHOWN_LEFT_OUT]:
        typer.echo(f"not compared: {sentence}")
    if len(left) > SHOWN_LEFT_OUT:
        typer.echo(f"not compared: {len(left) - SHOWN_LEFT_OUT} more (--json lists them)")


def import_validation(folder: Path) -> None:
    """Make the package beside the tables importable."""
    if not (folder / "lmworks_validation").is_dir():
        missing = "the wheel has no published tables" if folder == TABLES else f"{folder} has no published tables"
        raise SpecError(
            f"{missing}: clone https://github.com/lmworks/lmworks and name its folder validation/ with --tables"
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def print_report(report: Report) -> None:
    rows = [cells(line) for line in report.lines]
    print_table("Mean absolute error against measurements, %", COLUMNS, rows, DROP)
    typer.echo("in brackets: without suspect rows. no constant: nothing is fitted, so there is no blind fit")
    typer.echo("in 90%: percent of rows within their 90 % interval, with the constants of `blind`")
    typer.echo("same MFU: the constant that fits the source best. formula: a paper's closed form, not a measurement")
    for name, why in report.uncovered.items():
        for sentence in why:
            typer.echo(f"not covered: {name}: {sentence}")
    for name, why in report.refused.items():
        for sentence in why:
            typer.echo(f"ran, but predicted not to fit: {name}: {sentence}")
    if report.missing:
        typer.echo(f"missing (name their folder with --data): {', '.join(report.missing)}")


def print_parts(parts: list[Part]) -> None:
    rows = [part_cells(part) for part in parts]
    print_table("Errors of single kernels and collectives, %", PART_COLUMNS, rows, drop=("p90", "rows"))
    typer.echo("unseen rows: held out of the fit. left out: the whole system was. replayed: with the current constants")


def cells(line: Line) -> list[str]:
    name = f"{line.source} {line.group}".strip()
    figures = {"tokens_per_s": "tokens/s", "step_s": "step time", "in_use": "in use (nvidia-smi)"}
    figure = figures.get(line.figure, line.figure)
    sure, guess = line.sure, line.baseline
    return [
        name,
        f"{figure} (formula)" if line.kind == "formula" else figure,
        str(line.fitted.rows),
        "-" if line.never_fitted else percent(line.fitted.mape) + (f" ({percent(sure.mape)})" if sure else ""),
        percent(line.fitted.p90),
        f"{100 * line.fitted.bias:+.1f}",
        percent(line.blind.mape) if line.blind else "no constant",
        "-" if line.coverage is None else f"{100 * line.coverage:.0f}",
        percent(guess.mape if guess else None),
        percent(guess.guess_mape if guess else None),
        f"{line.fitted.worst} ({100 * line.fitted.worst_error:+.0f})",
    ]


def part_cells(part: Part) -> list[str]:
    return [part.name, part.how, str(part.rows or "-"), *map(percent, part.spread)]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def predict(
    rows: Annotated[
        Path, typer.Argument(metavar="ROWS.csv", help="A table of runs; docs/validation.md lists columns.")
    ],
    json: Json = False,
) -> None:
    """Predict step time and memory of every row of a table.

    A missing field is unknown: the assumed value is printed, and the interval is wider. A row that cannot be predicted
    has an error; the others are predicted. Columns with results are ignored.

    \b
    Examples:
      lmworks plan predict runs.csv
      lmworks plan predict runs.csv --json
    """
    from ..plan.memory.sheet import budget
    from ..plan.step.price import price
    from ..plan.tables.columns import read
    from ..plan.tables.forecast import forecast_table

    result = forecast_table(read(rows), price, budget)
    if json:
        print_json(result)
    else:
        print_predictions(result)
    if all("error" in row for row in result["rows"]):
        raise SpecError(f"{rows}: no row of it can be predicted")


def print_predictions(result: dict[str, Any]) -> None:
    known = [row for row in result["rows"] if "error" not in row]
    columns = ["row", "step", "between", "tokens/s", "MFU %", "allocated GiB", "reserved GiB", "out of memory"]
    lines = [
        [
            f"{row['row']} {row['label']}",
            duration(row["step_s"]),
            f"{duration(row['step_s_low'])} – {duration(row['step_s_high'])}",
            short(row["tokens_per_s"]),
            f"{100 * row['mfu']:.1f}" if row["mfu"] else "-",
            f"{row['allocated_gib']:.1f}",
            f"{row['reserved_gib']:.1f}",
            "-" if row["oom_probability"] is None else f"{row['oom_probability']:.0%}",
        ]
        for row in known
    ]
    if lines:
        print_table("Predicted", columns, lines, drop=("allocated GiB", "MFU %", "between", "tokens/s"))
    for row in result["rows"]:
        if "error" in row:
            typer.echo(f"row {row['row']} {row['label']}: {row['error']}")
        elif row["assumed"]:
            typer.echo(f"row {row['row']} assumed: {'; '.join(row['assumed'])}")
    if result["unknown_columns"]:
        typer.echo(f"columns not understood: {', '.join(result['unknown_columns'])}")
