"""`lmworks scaling fit`: a scaling law of finished runs, with its error."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..record.formatting import short
from ..spec.errors import SpecError, did_you_mean
from ..spec.files import check_writable
from .output import Json, print_json, print_table, write_file
from .scaling_recommend import recommend
from .scaling_run import run

if TYPE_CHECKING:
    from ..scaling.fitting import Fit
    from ..scaling.points import Points

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Fit scaling laws; choose the run for a budget.",
)
SETTINGS = ("lr", "batch")
AUTO = "chinchilla where n and d are known, else compute"


app.command()(run)
app.command()(recommend)


@app.command()
def fit(
    source: Annotated[
        str, typer.Argument(metavar="CSV|SWEEP", help="Rows n,d,loss or flops,n,loss; or a sweep folder.")
    ],
    law: Annotated[
        str,
        typer.Option(help=f"chinchilla, tied, kaplan, compute, context, isoflop, lr or batch ({AUTO})."),
    ] = "",
    target: Annotated[str, typer.Option(help="Column of the loss (loss, or val_loss).")] = "",
    score: Annotated[str, typer.Option(help="Column of a downstream metric, fitted as a function of the loss.")] = "",
    where: Annotated[
        list[str] | None, typer.Option(help="Rows to take, e.g. train_set=rpj, 'n<1e9' or 'name=a|b'.")
    ] = None,
    drop: Annotated[int, typer.Option(min=0, help="Leave out so many rows of the largest losses.")] = 0,
    params: Annotated[str, typer.Option(help="What counts as N: total, or no-embed.")] = "total",
    flops: Annotated[float | None, typer.Option(help="Budget of the optimum (the largest run's).")] = None,
    predict: Annotated[
        list[str] | None, typer.Option(help="Predict the loss of a run, e.g. n=1.4e9,d=9e11; several times.")
    ] = None,
    delta: Annotated[float, typer.Option(help="Huber's δ on log-loss.")] = 1e-3,
    replicates: Annotated[int, typer.Option(min=0, help="Bootstrap replicates (0: no intervals).")] = 200,
    level: Annotated[float, typer.Option(min=0.5, max=0.999, help="Level of the intervals.")] = 0.9,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Also draw it: a .png, .svg or .pdf.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the law, for `lmworks scaling recommend`.")] = None,
    json: Json = False,
) -> None:
    """Fit a scaling law to finished runs.

    Parameters with bootstrap intervals, the compute-optimal N and D, the error on the largest runs when they are left
    out of the fit, and what makes the result doubtful. Runs that branch off one trunk are named alike in a column
    `trunk`, and are resampled together.

    \b
    Examples:
      lmworks scaling fit runs.csv
      lmworks scaling fit runs.csv --law isoflop --plot isoflop.svg
      lmworks scaling fit runs.csv --score accuracy --predict n=7e9,d=1e12 --json
    """
    from ..report.plots import check_plot_path
    from ..scaling.laws import LAWS
    from ..scaling.points import read_points

    if params not in ("total", "no-embed"):
        raise SpecError(f"--params {params}: give total or no-embed")
    for option, value in (("--delta", delta), ("--flops", 1.0 if flops is None else flops)):
        if not 0 < value < float("inf"):
            raise SpecError(f"{option} {value:g} must be more than 0")
    methods = (*LAWS, "isoflop", *SETTINGS)
    if law and law not in methods:
        raise SpecError(f"--law {law} is not known{did_you_mean(law, methods)}")
    if plot:
        check_plot_path(plot, "--plot")
    if out:
        check_writable(out, "--out")
    points = read_points(source, target=target, conditions=where or (), drop=drop, convention=params)
    law = law or ("chinchilla" if points.n is not None else "compute")
    more = {"replicates": replicates, "seed": seed, "level": level}
    if law in ("isoflop", *SETTINGS):
        for option, given in (("--score", score), ("--predict", predict), ("--out", out)):
            if given:
                raise SpecError(f"{option} needs a law of the loss; --law {law} has none")
        result = other_method(points, law, flops, more, plot)
    else:
        result = loss_law(points, law, flops, {**more, "delta": delta}, score, predict or [], plot, out)
    if json:
        print_json(result)
    else:
        print_result(result, source)
        for option, path in (("plot", plot), ("law", out)):
            if path:
                typer.echo(f"{option}: {path}")


def loss_law(
    points: Points,
    law: str,
    flops: float | None,
    more: dict[str, Any],
    score: str,
    predict: list[str],
    plot: Path | None,
    out: Path | None,
) -> dict[str, Any]:
    from ..scaling.downstream import fit_downstream
    from ..scaling.fitting import fit_law
    from ..scaling.law_file import law_to_dict
    from ..scaling.laws import law_of
    from ..scaling.results import finite, law_result

    wanted = [read_variables(text) for text in predict]
    for text, variables in zip(predict, wanted, strict=True):
        if missing := [name for name in law_of(law).variables if name not in variables]:
            raise SpecError(f"--predict {text}: --law {law} also needs {missing[0]}=")
    found = fit_law(points, law, **more)
    fitted = found.fitted
    best = fitted.optimum(flops or largest(points), default_seq(found))
    metric, warnings = None, list[str]()
    if score:
        metric = fit_downstream(points, score, replicates=more["replicates"], seed=more["seed"], level=more["level"])
        warnings += metric.warnings
    result = law_result(found, best, warnings)
    result["predictions"] = [{**variables, **fitted.predict(**variables)} for variables in wanted]
    if metric:
        result["downstream"] = metric.to_dict()
        for one in [*result["predictions"], result["optimum"]]:
            one[score] = metric.at(one["loss"], fitted.losses(one))
    if plot:
        from ..scaling.plots import draw_law

        draw_law(found, plot)
    if out:
        text = json_format.dumps(finite(law_to_dict(fitted)), indent=1)
        write_file(out, text + "\n", "--out")
    answer: dict[str, Any] = finite(result)
    return answer


def default_seq(found: Fit) -> float:
    """Of an optimum: the longest context of the runs, where the law has a term for it."""
    return found.fitted.ranges["seq"][1] if "seq" in found.fitted.law.variables else 0.0


def other_method(
    points: Points, law: str, flops: float | None, more: dict[str, Any], plot: Path | None
) -> dict[str, Any]:
    from ..scaling.hyperparameter_laws import fit_hyperparameter_law
    from ..scaling.isoflop import fit_isoflop
    from ..scaling.results import hyperparameter_result, isoflop_result

    if law == "isoflop":
        found = fit_isoflop(points, **more)
        if plot:
            from ..scaling.plots import draw_isoflop

            draw_isoflop(found, plot)
        return isoflop_result(found, found.optimum(flops or largest(points)))
    if plot:
        raise SpecError(f"--plot draws laws of the loss and iso-FLOP curves, not --law {law}")
    setting = fit_hyperparameter_law(points, law, **more)
    top = max(setting.places, key=lambda place: place["n"] * place["d"])
    return hyperparameter_result(setting, {"n": top["n"], "d": top["d"], **setting.at(top["n"], top["d"])})


def largest(points: Points) -> float:
    return float(points.need("flops", "an optimum").max())


def read_variables(text: str) -> dict[str, float]:
    """n=1e9,d=2e10 → {"n": 1e9, "d": 2e10}; a missing one of n, d and flops follows from C = 6ND."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if name.strip() not in ("n", "d", "flops", "seq") or not 0 < number < float("inf"):
            raise SpecError(f"--predict {text}: write n=1.4e9,d=9e11 (of n, d, flops and seq)")
        found[name.strip()] = number
    if "flops" in found and "n" in found:
        found.setdefault("d", found["flops"] / 6 / found["n"])
    if "n" in found and "d" in found:
        found.setdefault("flops", 6 * found["n"] * found["d"])
    return found


def print_result(result: dict[str, Any], source: str) -> None:
    title = f"{result['formula']}: {result['points']} points of {source}"
    rows = [[name, f"{value:.6g}", span(result["interval"].get(name))] for name, value in result["params"].items()]
    print_table(title, ["parameter", "value", f"{result['level']:.0%} interval"], rows)
    best = result["optimum"]
    if result["method"] in SETTINGS:
        name = result["method"]
        where = f"N = {short(best['n'])}, D = {short(best['d'])}"
        typer.echo(f"best {name} at {where}: {best[name]:.3g}{within(best)}")
    else:
        print_optimum(best)
    for one in result.get("predictions", ()):
        where = ", ".join(f"{name} = {one[name]:.3g}" for name in ("n", "d", "flops", "seq") if name in one)
        typer.echo(f"predicted loss at {where}: {one['loss']:.4f}{within(one)}{run_span(one)}")
    if "downstream" in result:
        print_downstream(result)
    error = result["holdout_error"]
    if error is not None:
        held = result.get("holdout")
        largest = f"N* of the largest budget, fitted without it, is off by {error:.1%}"
        if result["method"] in SETTINGS:
            largest = f"the best {result['method']} of the largest run, fitted without it, is off by {error:.1%}"
        if held:
            runs = f"{held['rows']} largest runs" if held["rows"] > 1 else "largest run"
            beyond = f"{held['beyond']:.2g} times the FLOPs of the others"
            largest = f"the {runs} ({beyond}), predicted without them, would be off by {error:.2%}"
        typer.echo(largest)
    if "residuals" in result:
        typer.echo(f"residuals: {result['residuals']['rms']:.2%} rms, {result['residuals']['median']:.2%} median")
    for warning in result["warnings"]:
        typer.echo(f"warning: {warning}")


def print_optimum(best: dict[str, Any]) -> None:
    spread = best.get("interval") or {}
    if best["n"] is None:
        typer.echo(f"at {best['flops']:.3g} FLOP: loss {best['loss']:.4f}{within(best)}{run_span(best)}")
        return
    rows = [
        ["parameters N", f"{best['n']:.4g}", span(spread.get("n"))],
        ["tokens D", f"{best['d']:.4g}", span(spread.get("d"))],
        ["tokens a parameter", f"{best['tokens_per_param']:.3g}", span(spread.get("tokens_per_param"))],
        ["N grows as C^", f"{best['n_exponent']:.3f}", span(spread.get("n_exponent"))],
    ]
    if best.get("loss") is not None:
        rows.insert(3, ["loss", f"{best['loss']:.4f}", span(spread.get("loss"))])
    print_table(f"Compute-optimal at {best['flops']:.4g} FLOP", ["", "value", "interval"], rows)


def print_downstream(result: dict[str, Any]) -> None:
    found = result["downstream"]
    values = ", ".join(f"{name} {value:.4g}" for name, value in found["params"].items())
    typer.echo(f"{found['metric']} of loss: {found['formula']} with {values}; off by {found['rms']:.3g} rms")
    for one in result["predictions"]:
        value = one[found["metric"]]
        typer.echo(f"predicted {found['metric']} at loss {one['loss']:.4f}: {value['value']:.4g}{within(value)}")


def span(limits: list[float] | None) -> str:
    return "-" if not limits or None in limits else f"{limits[0]:.4g} to {limits[1]:.4g}"


def within(one: dict[str, Any]) -> str:
    limits = one.get("interval")
    return f" ({span(limits)})" if isinstance(limits, list) else ""


def run_span(one: dict[str, Any]) -> str:
    return f"; one run: {span(one['run_interval'])}" if one.get("run_interval") else ""
