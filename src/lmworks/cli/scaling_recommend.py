"""`lmworks scaling recommend`: the run that a budget buys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..record.formatting import binary_bytes, duration, short
from ..spec.errors import SpecError
from ..spec.files import check_writable
from ..spec.load import dump_toml
from . import options
from .output import Json, print_json, print_table, write_file

if TYPE_CHECKING:
    from ..scaling.downstream import Downstream
    from ..scaling.fitting import FittedLaw
    from ..scaling.hyperparameter_laws import HyperparameterLaw

SHOWN = 6  # rows of the comparison of --serve


def recommend(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP|CSV|LAW", help="Runs to fit, a law of `scaling fit --out`, or a published one: chinchilla."
        ),
    ],
    flops: Annotated[float | None, typer.Option(help="Budget in FLOPs of training.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="What it runs on, e.g. 256xh100.", autocompletion=options.clusters),
    ] = None,
    days: Annotated[float | None, typer.Option(help="Budget in days of that cluster.")] = None,
    dollars: Annotated[float | None, typer.Option(help="Budget in dollars.")] = None,
    serve: Annotated[
        float | None, typer.Option(help="Tokens to be served: the cost of training and serving is minimised.")
    ] = None,
    law: Annotated[str, typer.Option(help="Law that is fitted to runs: chinchilla, tied, kaplan or context.")] = "",
    target: Annotated[str, typer.Option(help="Column of the loss.")] = "",
    score: Annotated[str, typer.Option(help="Column of a downstream metric, also predicted.")] = "",
    vocab: Annotated[int | None, typer.Option(min=256, help="Rows of the vocabulary (by the budget).")] = None,
    seq: Annotated[int | None, typer.Option(min=64, help="Tokens of a sequence (by the budget).")] = None,
    data: Annotated[str, typer.Option(help="Folder of tokens, for the spec that --out writes.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write the spec of the run.")] = None,
    json: Json = False,
) -> None:
    """Choose the run that a budget buys, and write its spec.

    Size, tokens, shape, batch, learning rate and layout, with predicted loss, days, dollars and memory. Without
    --cluster the fewest H100s are taken that need no more than 30 days (or --days).

    \b
    Examples:
      lmworks scaling recommend chinchilla --flops 1e21
      lmworks scaling recommend chinchilla --cluster 256xh100 --days 30 --out run.toml
      lmworks scaling recommend law.json --dollars 50000 --serve 2e12 --json
    """
    from ..scaling.recommend import Budget, result
    from ..scaling.recommend import recommend as find

    if out:
        check_writable(out, "--out")
    fitted, lr_law, batch_law, metric = law_of_source(source, law, target, score)
    budget = Budget(flops, cluster, days, dollars, serve, vocab, seq, data)
    found = find(fitted, budget, lr_law, batch_law)
    facts = result(fitted, found, metric)
    if out:
        write_file(out, dump_toml(found.spec.to_dict()), "--out")
        facts["written"] = str(out)
    if json:
        print_json(facts)
        return
    print_recommendation(facts)
    if out:
        typer.echo(f"wrote {out}; check it with: lmworks plan run {out}")


def law_of_source(
    source: str, law: str, target: str, score: str
) -> tuple[FittedLaw, HyperparameterLaw | None, HyperparameterLaw | None, Downstream | None]:
    """Runs are fitted, and laws of learning rate and batch with them where they were varied."""
    from dataclasses import replace

    from ..scaling.downstream import fit_downstream
    from ..scaling.fitting import fit_law
    from ..scaling.hyperparameter_laws import tuned_hyperparameter_law
    from ..scaling.law_file import read_law
    from ..scaling.points import read_points

    if not (source.endswith(".csv") or Path(source).is_dir()):
        for option, given in (("--law", law), ("--target", target), ("--score", score)):
            if given:
                raise SpecError(f"{option} is for runs that are fitted; {source} is a law already")
        return read_law(source), None, None, None
    points = read_points(source, target=target)
    fit = fit_law(points, law or "chinchilla")
    fitted = replace(fit.fitted, warnings=fit.warnings)
    metric = fit_downstream(points, score) if score else None
    return fitted, tuned_hyperparameter_law(points, "lr"), tuned_hyperparameter_law(points, "batch"), metric


def print_recommendation(facts: dict[str, Any]) -> None:
    where = f"{facts['cluster']['gpus']} × {facts['cluster']['gpu']}"
    low_high = spans(facts["interval"], facts["level"])
    price = f"${facts['dollars']:,.0f}" if facts["dollars"] else "-"
    rows = [
        ["parameters N", f"{facts['n']:,}", f"{short(facts['n_no_embed'])} without the embedding"],
        ["tokens D", short(facts["d"]), f"{facts['tokens_per_param']:.3g} a parameter"],
        ["training FLOPs", f"{facts['flops']:.4g}", "exact, attention included"],
        ["shape", facts["shape_text"], ""],
        ["sequence", f"{facts['seq']:,}", "tokens"],
        [
            "batch",
            f"{facts['global_batch']:,}",
            f"sequences, {short(facts['batch_tokens'])} tokens; {facts['rules']['batch']}",
        ],
        ["steps", f"{facts['steps']:,}", ""],
        ["learning rate", f"{facts['lr']:.3g}", facts["rules"]["lr"]],
        ["predicted loss", f"{facts['loss']:.4f}", f"{low_high}{one_run(facts['run_interval'])}"],
        ["layout", facts["layout_text"], where],
        ["step", duration(facts["step_s"]), f"{short(facts['tokens_per_s'])} tokens/s, {facts['mfu']:.1%} MFU"],
        ["memory of a GPU", binary_bytes(int(facts["memory_bytes"])), "of the fullest"],
        ["days", f"{facts['days']:.3g}", "with the failures of such a cluster"],
        ["dollars", price, ""],
    ]
    for name, score in facts["scores"].items():
        rows.insert(9, [f"predicted {name}", f"{score['value']:.4g}", spans(score.get("interval"), facts["level"])])
    print_table(f"{facts['law']['method']}: {facts['law']['source']}", ["what", "value", ""], rows)
    if facts["serving"]:
        print_serving(facts["serving"])
    for note in facts["notes"]:
        typer.echo(note)
    for warning in facts["warnings"]:
        typer.echo(f"warning: {warning}")


def spans(limits: list[float] | None, level: float) -> str:
    return (
        f"{level:.0%}: {limits[0]:.4f} to {limits[1]:.4f}" if limits else "no interval: only parameters were published"
    )


def one_run(limits: list[float] | None) -> str:
    return f"; of one run {limits[0]:.4f} to {limits[1]:.4f}" if limits else ""


def print_serving(compared: list[dict[str, float]]) -> None:
    cheapest = compared[0]["n"]
    by_size = sorted(compared, key=lambda row: row["n"])
    every = max(1, len(by_size) // SHOWN)
    shown = [row for index, row in enumerate(by_size) if index % every == 0 or row["n"] == cheapest]
    shown += [by_size[-1]] if by_size[-1] not in shown else []
    rows = [
        [
            short(row["n"]),
            short(row["d"]),
            f"{row['tokens_per_param']:.3g}",
            *(f"${short(row[key])}" for key in ("train_dollars", "serve_dollars", "total_dollars")),
        ]
        for row in shown
    ]
    columns = ["N", "D", "tokens a parameter", "training", "serving", "in all"]
    print_table("Sizes that reach the loss of the compute-optimal run", columns, rows)
