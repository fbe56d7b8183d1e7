"""Rules for documents beside datatrove's: documents a second on one core, taking turns, and whether decisions agree.

    make test-datatrove   # once: makes the environment
    PYTHONPATH=src:tests/curate .venv-datatrove/bin/python benchmarks/curate.py --out curate FOLDER…

Both see the same documents in the same process, in batches, one first and then the other first. datatrove keeps the
words of the last documents, so its filters share them in the chain; alone, each filter cuts its documents itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from datatrove.utils.text import split_into_parts
from datatrove_decisions import STAGES, oracle

from lmworks.curate.documents import Document, DocumentStage
from lmworks.curate.stages import make_stage

BATCH = 25
CHAIN = ("gopher_repetition", "gopher_quality", "c4", "fineweb")  # the order of FineWeb's own pipeline
Decide = Callable[[str], tuple[str, str]]


def read_texts(folders: list[str], most: int) -> list[str]:
    paths = sorted(path for folder in folders for path in Path(folder).rglob("*") if path.is_file())
    random.Random(0).shuffle(paths)
    texts: list[str] = []
    for path in paths:
        try:
            text = path.read_bytes().decode()
        except (OSError, ValueError):
            continue
        if text.strip() and "\0" not in text and len(text) < 200_000:
            texts.append(text)
        if len(texts) == most:
            break
    return texts


def ours(name: str) -> Decide:
    stage = make_stage(name)
    assert isinstance(stage, DocumentStage)
    decide = stage.open()

    def call(text: str) -> tuple[str, str]:
        document = Document("a", text)
        reason = decide(document)
        return reason, "" if reason else document.text

    return call


def chained(stages: list[Decide]) -> Decide:
    def call(text: str) -> tuple[str, str]:
        for stage in stages:
            reason, kept = stage(text)
            if reason:
                return reason, ""
            text = kept
        return "", text

    return call


def compare(texts: list[str], mine: Decide, theirs: Decide) -> dict[str, Any]:
    seconds = [0.0, 0.0]
    differ = 0
    for number, start in enumerate(range(0, len(texts), BATCH)):
        batch = texts[start : start + BATCH]
        found: list[list[tuple[str, str]]] = [[], []]
        for side in (0, 1) if number % 2 else (1, 0):
            split_into_parts.cache_clear()
            decide = (mine, theirs)[side]
            began = time.process_time()
            found[side] = [decide(text) for text in batch]
            seconds[side] += time.process_time() - began
        differ += sum(a != b for a, b in zip(*found, strict=True))
    return {
        "documents": len(texts),
        "decisions_that_differ": differ,
        "ours_documents_per_s": round(len(texts) / seconds[0], 1),
        "datatrove_documents_per_s": round(len(texts) / seconds[1], 1),
        "times": round(seconds[1] / seconds[0], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--documents", type=int, default=600)
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    texts = read_texts(given.folders, given.documents)
    theirs = oracle()
    results = {name: compare(texts, ours(name), theirs[name]) for name in STAGES}
    results["chain"] = compare(texts, chained([ours(n) for n in CHAIN]), chained([theirs[n] for n in CHAIN]))
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("datatrove", "spacy")},
        "corpus": {"documents": len(texts), "megabytes": round(sum(map(len, texts)) / 1e6, 1)},
        "seconds": "CPU time of the process",
        "stages": results,
    }
    print(json.dumps(result, indent=1))
    if given.out:
        path = Path(__file__).parent / "results" / f"{given.out}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
