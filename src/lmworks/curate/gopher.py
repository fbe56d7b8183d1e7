"""The rules of Gopher (Rae et al. 2021, https://arxiv.org/abs/2112.11446): quality, A.1.1, and repetition, table A1.

Decisions and reasons are those of datatrove 0.10 with the same thresholds. 0 switches a rule off.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import ClassVar

from ..spec.errors import SpecError
from ..spec.schema import opt
from .documents import KEPT, Decide, Document, DocumentStage
from .words import WordCounts, cache, split_words

PAPER = "Rae et al. 2021, arXiv:2112.11446"


@dataclass(frozen=True)
class GopherQuality(DocumentStage):
    section: ClassVar[str] = "stages.gopher_quality"
    name: ClassVar[str] = "gopher_quality"
    about: ClassVar[str] = "Prose by the number and length of words, symbols, bullets, ellipses, stop words."
    source: ClassVar[str] = f"{PAPER}, section A.1.1"

    min_words: int = opt(50, "Words that are not punctuation.", ge=0)
    max_words: int = opt(100_000, "More are no document.", ge=0)
    min_mean_word_length: float = opt(3.0, "Characters.", ge=0)
    max_mean_word_length: float = opt(10.0, "Characters.", ge=0)
    max_symbol_ratio: float = opt(0.1, "'#' to words, and ellipses to words.", ge=0)
    max_bullet_lines: float = opt(0.9, "Share of lines that begin with a bullet or a hyphen.", ge=0)
    max_ellipsis_lines: float = opt(0.3, "Share of lines that end with an ellipsis.", ge=0)
    min_alphabetic_words: float = opt(0.8, "Share of words with a letter.", ge=0)
    min_stop_words: int = opt(2, "Different ones of stop_words.", ge=0)
    stop_words: list[str] = opt(
        ["the", "be", "to", "of", "and", "that", "have", "with"], "English prose has most of these."
    )

    def open(self) -> Decide:
        return functools.partial(quality, self, frozenset(self.stop_words))


def quality(keys: GopherQuality, stop_words: frozenset[str], document: Document) -> str:
    text = document.text
    chunks = text.split()
    counts = WordCounts.of(text, chunks)
    if keys.min_words and counts.not_punctuation < keys.min_words:
        return "gopher_short_doc"
    if keys.max_words and counts.not_punctuation > keys.max_words:
        return "gopher_long_doc"
    length = counts.letters / counts.not_punctuation if counts.not_punctuation else 0.0
    if keys.min_mean_word_length and length < keys.min_mean_word_length:
        return "gopher_below_avg_threshold"
    if keys.max_mean_word_length and length > keys.max_mean_word_length:
        return "gopher_above_avg_threshold"
    if keys.max_symbol_ratio and counts.words:
        if text.count("#") / counts.words > keys.max_symbol_ratio:
            return "gopher_too_many_hashes"
        if (text.count("...") + text.count("…")) / counts.words > keys.max_symbol_ratio:
            return "gopher_too_many_ellipsis"
    lines = text.splitlines()
    if (
        keys.max_bullet_lines
        and share(lines, lambda line: line.lstrip().startswith(("•", "-"))) > keys.max_bullet_lines
    ):
        return "gopher_too_many_bullets"
    if keys.max_ellipsis_lines and share(lines, lambda line: line.rstrip().endswith(("...", "…"))) > (
        keys.max_ellipsis_lines
    ):
        return "gopher_too_many_end_ellipsis"
    if keys.min_alphabetic_words and counts.words and counts.alphabetic / counts.words < keys.min_alphabetic_words:
        return "gopher_below_alpha_threshold"
    if keys.min_stop_words and too_few_stop_words(chunks, stop_words, keys.min_stop_words):
        return "gopher_enough_stop_words"
    return KEPT


def share(lines: list[str], holds: Callable[[str], bool]) -> float:
    return sum(map(holds, lines)) / len(lines) if lines else 0.0


def too_few_stop_words(chunks: list[str], stop_words: frozenset[str], least: int) -> bool:
    if len(stop_words.intersection(chunks)) >= least:  # mostly: a stop word between spaces is a word
        return False
    words = itertools.chain.from_iterable(map(cache().__getitem__, set(chunks)))
    return len(stop_words.intersection(words)) < least


# --- repetition -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GopherRepetition(DocumentStage):
    section: ClassVar[str] = "stages.gopher_repetition"
    name: ClassVar[str] = "gopher_repetition"
    about: ClassVar[str] = "Repeated lines, paragraphs and word n-grams within a document."
    source: ClassVar[str] = f"{PAPER}, table A1"

    max_duplicate_lines: float = opt(0.3, "Share of lines that were there before.", ge=0)
    max_duplicate_paragraphs: float = opt(0.3, "Share of paragraphs that were there before.", ge=0)
    max_duplicate_line_characters: float = opt(0.2, "Share of characters in such lines.", ge=0)
    max_duplicate_paragraph_characters: float = opt(0.2, "Share of characters in such paragraphs.", ge=0)
    top_ngrams: dict[str, float] = opt(
        {"2": 0.2, "3": 0.18, "4": 0.16}, "n → share of characters in the most frequent n-gram of words."
    )
    duplicate_ngrams: dict[str, float] = opt(
        {"5": 0.15, "6": 0.14, "7": 0.13, "8": 0.12, "9": 0.11, "10": 0.1},
        "n → share of characters in n-grams that were there before.",
    )

    def check(self) -> None:
        for key in ("top_ngrams", "duplicate_ngrams"):
            for n in getattr(self, key):
                if not n.isdecimal() or int(n) < 1:
                    raise SpecError(f'stages.gopher_repetition.{key}: {n!r} is not a number of words, e.g. "2" = 0.2')

    def open(self) -> Decide:
        return functools.partial(repetition, self)


PARAGRAPHS, LINES = re.compile(r"\n{2,}"), re.compile("\n+")


def repetition(keys: GopherRepetition, document: Document) -> str:
    text = document.text
    if not text:
        return "empty"
    size = len(text)
    paragraphs = PARAGRAPHS.split(text.strip())
    count, characters = duplicates(paragraphs)
    if keys.max_duplicate_paragraphs and count / len(paragraphs) > keys.max_duplicate_paragraphs:
        return "dup_para_frac"
    if keys.max_duplicate_paragraph_characters and characters / size > keys.max_duplicate_paragraph_characters:
        return "dup_para_char_frac"
    lines = LINES.split(text)
    count, characters = duplicates(lines)
    if keys.max_duplicate_lines and count / len(lines) > keys.max_duplicate_lines:
        return "dup_line_frac"
    if keys.max_duplicate_line_characters and characters / size > keys.max_duplicate_line_characters:
        return "dup_line_char_frac"
    words = split_words(text)
    if not words:
        return KEPT
    longest = max(map(len, words))
    spaced, ends = " ".join(words), [0, *itertools.accumulate(len(word) + 1 for word in words)]
    most = len(words)  # the count of the most frequent n-gram of fewer words, which none of more exceeds
    fewer = 0
    for n, limit in sorted((int(n), limit) for n, limit in keys.top_ngrams.items()):
        if len(words) < n or (fewer and most * (n * (longest + 1) - 1) / size <= limit):
            continue
        counts = Counter(spaced[a : b - 1] for a, b in zip(ends, ends[n:], strict=False))
        gram, most = max(counts.items(), key=itemgetter(1))
        fewer = n
        if len(gram) * most / size > limit:
            return f"top_{n}_gram"
    joined, ends = "".join(words), [0, *itertools.accumulate(map(len, words))]
    for n, limit in sorted((int(n), limit) for n, limit in keys.duplicate_ngrams.items()):
        if repeated_characters(joined, ends, n, longest, limit * size) / size > limit:
            return f"duplicated_{n}_n_grams"
    return KEPT


def duplicates(pieces: list[str]) -> tuple[int, int]:
    """Pieces that were there before, and their characters."""
    different = set(pieces)
    if len(different) == len(pieces):
        return 0, 0
    return len(pieces) - len(different), sum(map(len, pieces)) - sum(map(len, different))


def repeated_characters(joined: str, ends: list[int], n: int, longest: int, enough: float) -> int:
    """Characters of n-grams that were there before, each counted once; 0 where they cannot be more than `enough`."""
    grams = [joined[a:b] for a, b in zip(ends, ends[n:], strict=False)]
    again = len(grams) - len(set(grams))
    if again * n * longest <= enough:
        return 0
    seen: set[str] = set()
    repeated = at = 0
    while at < len(grams):
        gram = grams[at]
        if gram in seen:
            repeated += len(gram)
            at += n
        else:
            seen.add(gram)
            at += 1
    return repeated


STAGES = (GopherQuality, GopherRepetition)
