"""Files of a repository that are like what is being written: by the identifiers they share, without a model.

For completion prompts: definitions and uses of the names around the cursor are in those files. BM25 weighs a name by
how rare it is among the files (Robertson & Zaragoza 2009); Jaccard compares the sets of names.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping

IDENTIFIER = re.compile(r"[A-Za-z_]\w+")
K1, B = 1.2, 0.75  # BM25: how soon repetition stops to count, how much the length of a file does


def identifiers(text: str) -> list[str]:
    return IDENTIFIER.findall(text)


class SimilarFiles:
    """An inverted index of texts by path: a query costs what its names occur, not how many files there are."""

    def __init__(self, files: Mapping[str, str] | None = None) -> None:
        self.texts: dict[str, str] = {}
        self.names: dict[str, tuple[str, ...]] = {}  # of a path, each once
        self.lengths: dict[str, int] = {}
        self.total_length = 0
        self.holders: dict[str, dict[str, int]] = {}  # name → path → how often
        for path, text in (files or {}).items():
            self.put(path, text)

    def put(self, path: str, text: str) -> None:
        """Add a file, or the text that it has now."""
        self.remove(path)
        counts = Counter(identifiers(text))
        for name, count in counts.items():
            self.holders.setdefault(name, {})[path] = count
        self.texts[path], self.names[path] = text, tuple(counts)
        self.lengths[path] = counts.total()
        self.total_length += counts.total()

    def remove(self, path: str) -> None:
        if self.texts.pop(path, None) is None:
            return
        self.total_length -= self.lengths.pop(path)
        for name in self.names.pop(path):
            del self.holders[name][path]
            if not self.holders[name]:
                del self.holders[name]

    def rank(self, query: str, most: int = 5, method: str = "bm25", but: str = "") -> list[tuple[str, float]]:
        """(path, score) of the most similar files, best first, ties by path; none that shares no name.

        `but`: the file that is being written.
        """
        names = set(identifiers(query))
        scores = self.bm25(names) if method == "bm25" else self.jaccard(names)
        scores.pop(but, None)
        return sorted(scores.items(), key=lambda one: (-one[1], one[0]))[:most]

    def bm25(self, names: set[str]) -> dict[str, float]:
        files = len(self.texts)
        mean_length = self.total_length / max(1, files) or 1.0
        norms: dict[str, float] = {}
        scores: dict[str, float] = {}
        for name in sorted(names & self.holders.keys()):  # in one order, so that sums are the same every time
            holders = self.holders[name]
            rarity = math.log(1 + (files - len(holders) + 0.5) / (len(holders) + 0.5))
            for path, count in holders.items():
                norm = norms.get(path)
                if norm is None:
                    norm = norms[path] = K1 * (1 - B + B * self.lengths[path] / mean_length)
                scores[path] = scores.get(path, 0.0) + rarity * count * (K1 + 1) / (count + norm)
        return scores

    def jaccard(self, names: set[str]) -> dict[str, float]:
        shared = Counter(path for name in names & self.holders.keys() for path in self.holders[name])
        return {path: both / (len(names) + len(self.names[path]) - both) for path, both in shared.items()}


def context_files(index: SimilarFiles, path: str, text: str, most_characters: int) -> list[tuple[str, str]]:
    """(path, text) for a prompt that completes `text` in `path`: the most similar last, next to it, as many as fit."""
    chosen: list[tuple[str, str]] = []
    left = most_characters
    for other, _ in index.rank(text, len(index.texts), but=path):
        size = len(other) + len(index.texts[other]) + 1
        if size <= left:
            chosen.append((other, index.texts[other]))
            left -= size
    return chosen[::-1]
