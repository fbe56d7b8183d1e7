"""Runs one corpus stage over texts in memory, the way the pipeline does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lmworks.curate.documents import KEPT, CorpusStage, Document


def decisions(stage: CorpusStage, parts: Sequence[Sequence[str]], folder: Path) -> list[list[tuple[str, str]]]:
    """(why it was dropped or "", its text) of each document of each part."""

    def made(name: str) -> Path:
        path = folder / name
        path.mkdir(parents=True)
        return path

    summaries = [made(f"summary-{number}") for number in range(len(parts))]
    for number, texts in enumerate(parts):
        summary = stage.summarise(number, summaries[number])
        for at, text in enumerate(texts):
            summary.add(Document(f"{number}-{at}", text))
        summary.close()
    merged = [made(f"merged-{task}") for task in range(stage.merge_tasks)]
    for task, into in enumerate(merged):
        stage.merge(task, summaries, into)
    concluded = made("concluded")
    stage.conclude(merged, summaries, concluded)
    found = []
    for number, texts in enumerate(parts):
        decide = stage.open(number, merged, concluded, summaries[number])
        documents = [Document(f"{number}-{at}", text) for at, text in enumerate(texts)]
        found.append([(decide(document), document.text) for document in documents])
    return found


def kept(stage: CorpusStage, parts: Sequence[Sequence[str]], folder: Path) -> list[str]:
    return [text for part in decisions(stage, parts, folder) for why, text in part if why == KEPT]
