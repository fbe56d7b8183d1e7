"""`lmworks data curate`: raw documents → clean shards and a data card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..spec.errors import SpecError
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..curate.curate import Curated
    from ..curate.pipeline import Pipeline


def curate(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="A pipeline (.toml), or text files, .jsonl[.gz|.zst], .parquet, folders, stdlib, hf:NAME.",
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The folder to make.")] = None,
    rules: Annotated[str, typer.Option(help="Stages that look at single documents, e.g. gopher,c4,fineweb,code.")] = "",
    dedup: Annotated[str, typer.Option(help="Stages that compare documents, e.g. exact,minhash.")] = "",
    workers: Annotated[int, typer.Option(help="Processes; 0: one a core. The result does not depend on it.")] = 0,
    ray: Annotated[bool, typer.Option("--ray", help="Workers as tasks of a Ray cluster (RAY_ADDRESS).")] = False,
    text_field: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    glob: Annotated[str, typer.Option(help="Which files of a folder to take.")] = "**/*",
    output_format: Annotated[
        str, typer.Option("--format", help="Of the shards: jsonl, jsonl.gz or parquet.")
    ] = "jsonl",
    json: Json = False,
) -> None:
    """Clean, filter and deduplicate documents, in parallel.

    Killed in the middle, it continues where it was; run again, it does nothing. The same command on several machines
    with a shared folder (a Slurm array) shares the work. Beside the shards, which `data prepare` reads, it writes a
    data card: what each stage kept and dropped, by reason and with samples.

    \b
    Examples:
      lmworks data curate stdlib --rules code --out data/clean
      lmworks data curate web.jsonl.gz --rules gopher,fineweb --dedup exact,minhash --out data/web
      lmworks data curate pipeline.toml --json
    """
    from ..curate.curate import curate as run
    from ..curate.ray import in_ray
    from ..data import console_progress

    options = {"--rules": rules, "--dedup": dedup, "--text-field": text_field != "text", "--glob": glob != "**/*"}
    reading = {"text_field": text_field, "glob": glob}
    asked = pipeline_of(sources, out, options | {"--format": output_format != "jsonl"}, reading, output_format)
    try:
        with console_progress() as progress:
            done = run(asked, workers, progress, in_ray if ray else None)
    except KeyboardInterrupt:
        typer.echo("lmworks: interrupted; run the same command again to continue", err=True)
        raise typer.Exit(130) from None
    if json:
        print_json(done.summary())
    else:
        print_curated(done)


def pipeline_of(
    sources: list[str], out: Path | None, options: dict[str, Any], reading: dict[str, str], output_format: str
) -> Pipeline:
    from ..curate.pipeline import Pipeline, common_pipeline

    if len(sources) == 1 and sources[0].endswith(".toml"):
        if given := [name for name, value in options.items() if value]:
            raise SpecError(f"{', '.join(given)}: write that into {sources[0]}, which describes the whole pipeline")
        return Pipeline.load(Path(sources[0]), out)
    if out is None:
        raise SpecError("--out is missing: name a folder for the documents")
    written = {"out": str(out), "reading": reading, "output": {"format": output_format}}
    return Pipeline.from_dict(common_pipeline(sources, options["--rules"], options["--dedup"], **written))


def print_curated(done: Curated) -> None:
    index = done.index
    rows = []
    for name, stage in index["stages"].items():
        dropped = sum(entry["documents"] for entry in stage["dropped"].values())
        most = sorted(stage["dropped"].items(), key=lambda item: (-item[1]["documents"], item[0]))[:3]
        reasons = ", ".join(f"{reason} {entry['documents']:,}" for reason, entry in most)
        kept = stage["kept"]
        rows.append([name, f"{kept['documents']:,}", f"{kept['bytes'] / 1e6:,.1f}", f"{dropped:,}", reasons])
    print_table("Stages", ["stage", "kept", "MB", "dropped", "most frequent reasons"], rows)
    kept, read = index["kept"], index["read"]
    typer.echo(
        f"kept {kept['documents']:,} of {read['documents']:,} documents, {kept['bytes'] / 1e6:,.1f} of "
        f"{read['bytes'] / 1e6:,.1f} MB; the data card: {done.folder / 'card.html'}"
    )
    typer.echo(
        f"{done.folder} is up to date, nothing to do"
        if done.up_to_date
        else f"{done.folder} is ready: lmworks data prepare {done.folder} --tokenizer bpe:32768 --out DIR"
    )
