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
    """An index of texts by path."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.counts = {path: Counter(identifiers(text)) for path, text in files.items()}
        self.lengths = {path: sum(counts.values()) for path, counts in self.counts.items()}
        self.mean_length = sum(self.lengths.values()) / max(1, len(files)) or 1.0
        self.holders = Counter(name for counts in self.counts.values() for name in counts)

    def rank(self, query: str, most: int = 5, method: str = "bm25", but: str = "") -> list[tuple[str, float]]:
        """(path, score) of the most similar files, best first, ties by path; none that shares no name.

        `but`: the file that is being written.
        """
        names = set(identifiers(query))
        score = self.bm25 if method == "bm25" else self.jaccard
        scored = [(path, score(path, names)) for path in self.counts if path != but]
        return sorted((one for one in scored if one[1] > 0), key=lambda one: (-one[1], one[0]))[:most]

    def bm25(self, path: str, names: set[str]) -> float:
        counts, files = self.counts[path], len(self.counts)
        norm = K1 * (1 - B + B * self.lengths[path] / self.mean_length)
        total = 0.0
        for name in sorted(names & counts.keys()):
            rarity = math.log(1 + (files - self.holders[name] + 0.5) / (self.holders[name] + 0.5))
            total += rarity * counts[name] * (K1 + 1) / (counts[name] + norm)
        return total

    def jaccard(self, path: str, names: set[str]) -> float:
        there = self.counts[path].keys()
        return len(names & there) / max(1, len(names | there))


def context_files(files: Mapping[str, str], path: str, text: str, most_characters: int) -> list[tuple[str, str]]:
    """(path, text) for a prompt that completes `text` in `path`: the most similar last, next to it, as many as fit."""
    chosen: list[tuple[str, str]] = []
    left = most_characters
    for other, _ in SimilarFiles(files).rank(text, len(files), but=path):
        size = len(other) + len(files[other]) + 1
        if size <= left:
            chosen.append((other, files[other]))
            left -= size
    return chosen[::-1]
