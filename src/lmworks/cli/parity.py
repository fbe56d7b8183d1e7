"""`lmworks prove parity`: the proof that a layout computes what one rank computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import complete
from .output import Json, Overrides, print_json, print_table
from .run_options import Force

if TYPE_CHECKING:
    from ..prove.parity import Result
    from ..spec.layouts import Layout

COLUMNS = (
    "layout", "ranks", "loss", "worst gradient", "of", "worst weight, SGD", "AdamW", "gradient norm", "× one rank",
    "tokens", "peak memory", "collectives of a step", "",
)  # fmt: skip
DROP = ("collectives of a step", "peak memory", "tokens", "AdamW", "gradient norm", "× one rank", "worst weight, SGD")


def parity(
    spec: Annotated[
        str | None,
        typer.Argument(
            metavar="[SPEC]",
            help="A TOML file, a run folder or a preset; by default small models of ours.",
            autocompletion=complete.sources,
        ),
    ] = None,
    overrides: Overrides = None,
    layouts: Annotated[
        str | None,
        typer.Option(
            "--layouts", metavar="NAME[,NAME…]|all", help="Which to prove (by default the spec's own, or else all)."
        ),
    ] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Do not stop at the first that fails.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, metavar="SECONDS", help="How long the ranks of a layout may take.")
    ] = 120,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown, for a document.")] = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Compare training under each layout with training on one rank.

    Ranks are processes on this machine's CPU. Every gradient of five steps is compared on every rank that holds a part
    of it, and every weight after them; a layout outside the tolerance is named with the parameter, and the exit code
    is 1. The layouts of `all`, with their models and tolerances, stand in src/lmworks/spec/layouts.toml.

    \b
    Examples:
      lmworks prove parity --layouts all
      lmworks prove parity --layouts fsdp2,tp2-sp,pp2-zbv --json
      lmworks prove parity tiny parallel.dp=2 parallel.tp=2
      lmworks prove parity configs/tiny.toml --layouts all --keep-going
    """
    from ..spec import SpecError

    if spec is not None and "=" in spec:  # `parity model.layers=4`: there is no spec to change
        raise SpecError(f"'{spec}' changes a spec, but none is given; e.g. lmworks prove parity tiny {spec}")
    given, chosen = choose_layouts(spec, overrides or [], layouts)
    skip = given is not None and layouts == "all"
    results = prove(given, chosen, keep_going, skip_illegal=skip, timeout=timeout, force=force)
    if json:
        print_json([result.to_dict() for result in results])
    elif markdown:
        typer.echo(as_markdown(results))
    elif results:
        print_table("Against one rank", COLUMNS, [row_of(result) for result in results], DROP)
    failed = [result for result in results if not result.ok]
    for result in failed:
        typer.echo(f"lmworks: error: {result.layout}: {result.failure}", err=True)
    if failed:
        raise typer.Exit(1)


def choose_layouts(
    spec: str | None, overrides: list[str], names: str | None
) -> tuple[dict[str, Any] | None, list[Layout]]:
    """Tables of the spec, if there is one, and what is laid over it."""
    from ..spec import RunSpec
    from ..spec.layouts import Layout, choose
    from ..spec.load import apply_overrides, read_source

    if spec is None:
        return None, choose(names or "all")
    given = apply_overrides(read_source(spec), overrides)
    if names is None and RunSpec.from_dict(given).parallel.world > 1:
        own: dict[str, Any] = {key: given[key] for key in ("parallel", "precision") if key in given}
        return given, [Layout("the spec's own", own)]
    return given, choose(names or "all")


def prove(
    given: dict[str, Any] | None,
    chosen: list[Layout],
    keep_going: bool,
    skip_illegal: bool,
    timeout: float,
    force: bool,
) -> list[Result]:
    """Results so far are shown as they come."""
    from ..prove.parity import parity as proofs
    from ..spec import SpecError

    results: list[Result] = []
    with proofs(given, timeout=timeout, force=force) as proof:
        for number, layout in enumerate(chosen, 1):
            place = f"[{number}/{len(chosen)}] {layout.name}"
            try:
                layout.run(given)
            except SpecError as error:
                if not skip_illegal:
                    raise
                typer.echo(f"{place}: left out, {error}", err=True)
                continue
            result = proof.prove(layout)
            results.append(result)
            worst = f"worst gradient {figure(result.worst_grad)}, {result.worst_grad_name}"
            typer.echo(f"{place}: {worst if result.ok else 'FAILED'} ({result.seconds:.1f} s)", err=True)
            if not (result.ok or keep_going):
                break
    return results


def row_of(result: Result) -> list[str]:
    return [
        result.layout,
        str(result.ranks),
        figure(result.loss_diff),
        figure(result.worst_grad),
        result.worst_grad_name,
        figure(result.worst_param),
        figure(result.adamw_param),
        figure(result.grad_norm_diff),
        "-" if result.times_one_rank is None else f"{result.times_one_rank:.2f} of {result.times_one_rank_limit:.2f}",
        str(result.tokens),
        f"{result.peak_bytes / 1e3:,.0f} kB",
        "; ".join(f"{c['count']} {c['kind']} {c['group']} {c['bytes'] / 1e3:,.0f} kB" for c in result.collectives),
        "ok" if result.ok else "FAILED",
    ]


def figure(value: float) -> str:
    return "-" if value != value else f"{value:.1e}"


def as_markdown(results: list[Result]) -> str:
    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *(row_of(result) for result in results)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    causes = {
        result.cause: [r.layout for r in results if r.cause == result.cause] for result in results if result.cause
    }
    notes = [f"- {', '.join(names)}: {cause}." for cause, names in causes.items()]
    return "\n".join([table, *(["", "Tolerances that are wider than usual, and why:", "", *notes] if notes else [])])
