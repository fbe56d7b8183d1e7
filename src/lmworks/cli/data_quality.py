"""`lmworks data quality`: trains the classifier of the pipeline's stage `quality`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import Json, print_json, print_table


def quality(
    chosen: Annotated[
        list[str], typer.Argument(metavar="SOURCE", help="Documents as they should be: files, folders, …")
    ],
    raw: Annotated[list[str], typer.Option("--raw", help="Documents as they come; give it several times for more.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to make, e.g. quality.npz.")],
    text_field: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    glob: Annotated[str, typer.Option(help="Which files of a folder to take.")] = "**/*",
    documents: Annotated[int, typer.Option(min=20, help="Documents of each kind to train on, at most.")] = 50_000,
    json: Json = False,
) -> None:
    """Train a classifier of chosen against raw documents.

    One document in five is held out; the AUC is theirs.

    \b
    Examples:
      lmworks data quality wikipedia.jsonl --raw crawl.jsonl --out quality.npz
      lmworks data quality src/ --raw scraped/ --glob '**/*.py' --out quality.npz --json
    """
    from ..curate.quality import train_on
    from ..data.sources import Reading

    trained = train_on(chosen, raw, out, Reading(text_field, glob), documents)
    if json:
        print_json(
            {"model": str(out), "auc": trained.auc, "documents": trained.documents, "thresholds": trained.thresholds}
        )
        return
    counts = trained.documents
    typer.echo(
        f"{out}: AUC {trained.auc:.4f} on {counts['held_out']:,} held-out documents, trained on {counts['trained']:,}"
    )
    rows = [[keep, f"{score:.4f}"] for keep, score in trained.thresholds.items()]
    print_table("Raw documents that a least score keeps", ["kept", "min_score"], rows)
