"""`lmworks bench coordinate-check`: the size of activations by width and depth, under both parametrizations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..spec import SpecError, load_run
from .options import OnDevice, Overrides, Spec, on_device
from .output import Json, print_json, print_table

FLAT = 0.1  # a slope that is taken for none
NOISE = 0.2  # what one seed can make of none (docs/mup.md)


def coordinate_check(
    spec: Spec,
    overrides: Overrides = None,
    widths: Annotated[
        str, typer.Option("--widths", help="Widths (model.hidden) by commas; by default 1, 2, 4, 8 times the base.")
    ] = "",
    depths: Annotated[str, typer.Option("--depths", help="Depths (model.layers) to compare as well, e.g. 2,4,8.")] = "",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of the optimizer, all on one batch.")] = 8,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Initial weights to average over.")] = 1,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw |x| by width and depth.")] = None,
    device: OnDevice = "",
    json: Json = False,
) -> None:
    """Check that activations keep their size in any width.

    Builds the model in several sizes (heads keep their width, all else its proportion), takes a few steps at optim.lr,
    and prints the mean |x| of each role with the slope of its logarithm: about 0 under model.parametrization = "mup",
    above under "standard".

    \b
    Examples:
      lmworks bench coordinate-check tiny optim.lr=2e-3 --seeds 2
      lmworks bench coordinate-check tiny optim.lr=2e-3 --widths 64,128,256 --depths 2,4,8 --plot check.png
      lmworks bench coordinate-check configs/small.toml --widths 192,384,768 --seeds 3 --json
    """
    if plot:
        from ..report.plots import check_plot_path

        check_plot_path(plot, "--plot")
    loaded = load_run(spec, [*(overrides or ()), *on_device(device)])
    loaded.data.check_path_given()
    base = loaded.model.mup_base_hidden or loaded.model.hidden
    chosen = sizes_of(widths, "--widths") or [base * factor for factor in (1, 2, 4, 8)]
    from ..bench.coordinate_check import coordinate_check as check

    found = [one.to_dict() for one in check(loaded, chosen, sizes_of(depths, "--depths"), steps, seeds, print_progress)]
    if plot:
        from ..report.coordinate_plot import draw_coordinates

        draw_coordinates(found, plot)
    if json:
        print_json({"lr": loaded.optim.lr, "steps": steps, "seeds": seeds, "checks": found})
        return
    for one in found:
        print_check(one, steps, loaded.optim.lr)
    if plot:
        typer.echo(f"drawn: {plot}")


def print_progress(line: str) -> None:
    typer.echo(f"  {line}", err=True)


def sizes_of(text: str, option: str) -> list[int]:
    names = [word.strip() for word in text.split(",") if word.strip()]
    if not all(name.isdecimal() and int(name) for name in names):
        raise SpecError(f"{option} {text}: write whole numbers with commas, e.g. 64,128,256")
    return [int(name) for name in names]


def verdict_of(slope: float, axis: str) -> str:
    if abs(slope) <= FLAT:
        return "flat"
    return f"{axis} matters" if abs(slope) > NOISE else "not clear, more --seeds would tell"


def print_check(check: dict[str, Any], steps: int, lr: float) -> None:
    for name, roles in check["roles"].items():
        columns = ["role", *(f"{check['axis']} {size}" for size in check["sizes"]), "slope", "of the change"]
        rows = [
            [role, *(f"{points[-1]:.3g}" for points in curve["size"]), f"{curve['slopes'][-1]:+.2f}",
             f"{curve['change_slopes'][-1]:+.2f}"]
            for role, curve in roles.items()
        ]  # fmt: skip
        print_table(f"{name}: mean |x| after {steps} steps at lr {lr:g}", columns, rows, drop=("of the change",))
        steepest = check["steepest"][name]
        verdict = verdict_of(steepest["slope"], check["axis"])
        typer.echo(f"{name}: {verdict}; steepest is {steepest['role']}, {steepest['slope']:+.2f}\n")
