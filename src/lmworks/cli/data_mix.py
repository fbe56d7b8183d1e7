"""`lmworks data mix` and `fit-mix`: weights of a mixture by size, by temperature, or fitted on small runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..spec.errors import DataError, SpecError
from .output import Json, print_json, print_table


def mix(
    folders: Annotated[list[str], typer.Argument(metavar="FOLDER", help="Prepared folders with the same tokenizer.")],
    temperature: Annotated[
        float, typer.Option(help="Shares are tokens^(1/T): 1: by size; more: nearer to equal shares.")
    ] = 1.0,
    samples: Annotated[int, typer.Option(min=0, help="Mixtures around that one for `lmworks sweep` to try.")] = 0,
    seed: Annotated[int, typer.Option(help="Of these mixtures.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write their space here, e.g. mixtures.toml.")] = None,
    json: Json = False,
) -> None:
    """Weights of a mixture by the sizes of its sources.

    \b
    Examples:
      lmworks data mix data/code data/web --temperature 2
      lmworks data mix data/code data/web --samples 12 --out mixtures.toml
      lmworks sweep small.toml --space mixtures.toml --name mixtures
      lmworks data fit-mix sweeps/mixtures
    """
    from ..curate.mixture import by_size, mixtures_to_try
    from ..data import read_index

    if len(set(folders)) < 2:
        raise SpecError("a mixture has at least two folders")
    if bool(samples) != (out is not None):
        raise SpecError("--samples and --out go together: mixtures to try, and the space file for them")
    tokens = {folder: read_index(folder).tokens("train") for folder in folders}
    weights = by_size(tokens, temperature)
    tried = mixtures_to_try(weights, samples, seed) if samples else []
    if out is not None:
        tables = ",\n".join(f"  {inline(one)}" for one in tried)
        out.write_text(f"[data.mix]\nvalues = [\n{tables},\n]\n", encoding="utf-8")
    if json:
        print_json({"tokens": tokens, "mix": weights, "space": None if out is None else str(out)})
        return
    typer.echo("[data.mix]")
    for folder, weight in weights.items():
        typer.echo(f'"{folder}" = {weight:g}  # {tokens[folder]:,} tokens')
    if out is not None:
        typer.echo(f"# {out}: {samples} mixtures for `lmworks sweep SPEC --space {out}`")


def inline(weights: dict[str, float]) -> str:
    return "{" + ", ".join(f'"{folder}" = {weight:g}' for folder, weight in weights.items()) + "}"


def fit_mix(
    sweep: Annotated[Path, typer.Argument(help="A sweep whose trials differ in data.mix.")],
    target: Annotated[
        list[str] | None, typer.Option("--target", help="FOLDER=WEIGHT: what its held-out loss counts (all: 1).")
    ] = None,
    batches: Annotated[int, typer.Option(min=0, help="Micro-batches of each measurement (0: all held-out data).")] = 0,
    json: Json = False,
) -> None:
    """Fit a law of the loss to tried mixtures, and recommend one.

    Every finished trial is measured on the held-out data of each source.

    \b
    Examples:
      lmworks data fit-mix sweeps/mixtures
      lmworks data fit-mix sweeps/mixtures --target data/code=3 --target data/web=1 --json
    """
    from ..curate.mixture import fit
    from ..data import console_progress
    from ..sweep.folder import Sweep
    from ..train.evaluate import evaluate, held_out
    from ..train.load_run import load_trained

    opened = Sweep.open(sweep)
    finished = [trial.number for trial in opened.trials() if trial.state == "finished"]
    mixes = {number: opened.folder(number).spec().data.mix for number in finished}
    names = list(dict.fromkeys(name for one in mixes.values() for name in one))
    if len(names) < 2:
        raise DataError(f"{sweep}: its finished trials have no mixtures of two sources or more (data.mix)")
    counts = dict.fromkeys(names, 1.0) | weights_of(target or [], names)
    losses = []
    with console_progress() as progress:
        for done, number in enumerate(finished):
            progress("measure", done, len(finished))
            trained = load_trained(opened.folder(number).path)
            specs = {name: trained.spec.replace(data=trained.spec.data.replace(path=name, mix={})) for name in names}
            losses.append(
                {name: evaluate(trained.model, held_out(spec), spec, batches).loss for name, spec in specs.items()}
            )
    found = fit(list(mixes.values()), losses, counts)
    if json:
        trials = [{"trial": n, "mix": mixes[n], "loss": loss} for n, loss in zip(finished, losses, strict=True)]
        print_json({**vars(found), "target": counts, "trials": trials})
        return
    rows = [
        [number, *(f"{mixes[number].get(name, 0):.3f}" for name in names), *(f"{loss[name]:.4f}" for name in names)]
        for number, loss in zip(finished, losses, strict=True)
    ]
    print_table("Trials", ["trial", *names, *(f"loss on {name}" for name in names)], rows)
    typer.echo("[data.mix]")
    for name, weight in found.weights.items():
        typer.echo(f'"{name}" = {weight:g}  # predicted loss {found.predicted[name]:.4f}')
    typer.echo(
        f"# runs left out of the fit are predicted within {found.left_out_error:.4f}; differ by {found.spread:.4f}"
    )


def weights_of(given: list[str], names: list[str]) -> dict[str, float]:
    found = dict.fromkeys(names, 0.0) if given else {}
    for one in given:
        name, _, weight = one.rpartition("=")
        name = name if name in names else str(Path(name).absolute())  # as a spec of a run has it
        try:
            found[name] = float(weight)
        except ValueError:
            raise SpecError(f"--target {one}: write FOLDER=WEIGHT, e.g. {names[0]}=1") from None
        if name not in names or found[name] < 0:
            raise SpecError(f"--target {one}: a weight of at least 0 for one of {', '.join(names)}")
    return found
