"""A small corpus, and ways to look at what was made of it without the code under test."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from lmworks.data.sources import Reading

WORDS = ["def", "return", "self", "for", "in", "naïve", "x", "日本", "lambda", "=", "(", ")", "\n    ", "🙂"]
SMALL_PARTS = Reading(part_bytes=600)


def make_text(number: int, words: int) -> str:
    rng = random.Random(number)
    return f"document {number}\n" + " ".join(rng.choice(WORDS) for _ in range(words))


def corpus_texts(documents: int = 60, words: int = 30) -> list[str]:
    return [make_text(number, words + number % 7 * 5) for number in range(documents)]


def make_corpus(folder: Path, documents: int = 60, words: int = 30) -> list[str]:
    """One file a document, in nested folders; the texts in the order in which prepare reads the files."""
    texts = corpus_texts(documents, words)
    for number, text in enumerate(texts):
        path = folder / f"d{number // 10:02d}" / f"{number:04d}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return texts


def stored_documents(folder: Path, split: str) -> list[list[int]]:
    """The documents of a split, read by their end-of-text tokens and not by their offsets."""
    index = json.loads((folder / "index.json").read_text())
    documents: list[list[int]] = [[]]
    for shard in index["splits"].get(split, []):
        for token in np.fromfile(folder / f"{shard['name']}.bin", index["dtype"]).tolist():
            if token == index["eot"]:
                documents.append([])
            else:
                documents[-1].append(token)
    assert documents.pop() == []
    return documents


def stored_texts(folder: Path, split: str) -> list[str]:
    """Of a folder made with the bytes tokenizer."""
    return [bytes(document).decode("utf-8") for document in stored_documents(folder, split)]


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
