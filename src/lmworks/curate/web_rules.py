"""Rules for pages of the web: C4's, and those that FineWeb added.

Decisions and reasons are those of datatrove 0.10 with the same thresholds.
"""

from __future__ import annotations

import functools
import heapq
import re
from dataclasses import dataclass
from typing import ClassVar

from ..spec.schema import opt
from .documents import KEPT, Decide, Document, DocumentStage
from .gopher import duplicates
from .words import WordCounts, characters, count_sentences

CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
ENDS = (".", "?", "!", '"', "'")
POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


@dataclass(frozen=True)
class C4(DocumentStage):
    section: ClassVar[str] = "stages.c4"
    name: ClassVar[str] = "c4"
    about: ClassVar[str] = "Keeps lines that are sentences; drops pages with few of them, code and placeholder text."
    source: ClassVar[str] = "Raffel et al. 2020, JMLR 21(140), section 2.2, and its code in tensorflow_datasets"

    remove_citations: bool = opt(True, "[1], [edit] and [citation needed] of Wikipedia.")
    terminal_punctuation: bool = opt(True, "Lines that do not end with a punctuation mark are removed.")
    min_sentences: int = opt(5, "Of what is left; fewer: the page is dropped.", ge=0)
    min_line_words: int = opt(3, "Shorter lines are removed.", ge=0)
    max_word_length: int = opt(1000, "Lines with a longer word are removed; 0: none.", ge=0)
    lorem_ipsum: bool = opt(True, "Pages with it are dropped.")
    javascript: bool = opt(True, "Lines with the word are removed.")
    curly_bracket: bool = opt(True, "Pages with a { are dropped: code.")
    policy: bool = opt(True, "Lines about cookies and terms of use are removed.")

    def open(self) -> Decide:
        return functools.partial(c4, self)


def c4(keys: C4, document: Document) -> str:
    sentences, kept = 0, []
    lines = document.text.splitlines()
    for line in lines:
        line = line.strip()
        words = line.split()
        if keys.max_word_length and len(line) > keys.max_word_length and max(map(len, words)) > keys.max_word_length:
            continue
        if keys.remove_citations and "[" in line:
            line = CITATION.sub("", line)
        if keys.terminal_punctuation and (not line.endswith(ENDS) or line.endswith("...")):
            continue
        if len(words) < keys.min_line_words:
            continue
        lower = line.lower()
        if keys.lorem_ipsum and "lorem ipsum" in lower:
            return "lorem_ipsum"
        if keys.javascript and "javascript" in lower:
            continue
        if keys.curly_bracket and "{" in line:
            return "curly_bracket"
        if keys.policy and any(phrase in lower for phrase in POLICIES):
            continue
        if sentences < keys.min_sentences:
            sentences += count_sentences(line, keys.min_sentences - sentences)
        kept.append(line)
    if sentences < keys.min_sentences:
        return "too_few_sentences"
    text = "\n".join(kept).strip()
    if text != document.text:
        document.note("lines_removed", len(lines) - len(kept))
        document.text = text
    return KEPT if text else "empty"


@dataclass(frozen=True)
class C4Paragraphs(DocumentStage):
    section: ClassVar[str] = "stages.c4_paragraphs"
    name: ClassVar[str] = "c4_paragraphs"
    about: ClassVar[str] = "Drops pages without several long lines (mC4)."
    source: ClassVar[str] = "Xue et al. 2021, arXiv:2010.11934, section 3.1"

    min_paragraphs: int = opt(3, "Lines that long.", ge=1)
    min_paragraph_length: int = opt(200, "Characters.", ge=0)

    def open(self) -> Decide:
        return functools.partial(c4_paragraphs, self)


def c4_paragraphs(keys: C4Paragraphs, document: Document) -> str:
    lengths = heapq.nlargest(keys.min_paragraphs, map(len, document.text.split("\n")))
    enough = len(lengths) == keys.min_paragraphs and lengths[-1] >= keys.min_paragraph_length
    return KEPT if enough else f"< {keys.min_paragraphs} paragraphs"


@dataclass(frozen=True)
class FineWeb(DocumentStage):
    section: ClassVar[str] = "stages.fineweb"
    name: ClassVar[str] = "fineweb"
    about: ClassVar[str] = "Pages by how many lines end like sentences, are short, are repeated, and lists."
    source: ClassVar[str] = "Penedo et al. 2024, arXiv:2406.17557, section 3.5, with the values of its released code"

    min_punctuation_lines: float = opt(0.12, "Share of lines that end with a punctuation mark.", ge=0, le=1)
    max_short_lines: float = opt(0.67, "Share of lines of at most short_line characters.", ge=0, le=1)
    short_line: int = opt(30, "Characters.", ge=0)
    max_duplicate_characters: float = opt(0.01, "Share of characters in repeated lines.", ge=0, le=1)
    max_newlines: float = opt(0.3, "Newlines to words: more is a list.", ge=0)

    def open(self) -> Decide:
        return functools.partial(fineweb, self)


def fineweb(keys: FineWeb, document: Document) -> str:
    text = document.text
    lines = [line for line in text.split("\n") if line and not line.isspace()]
    if not lines:
        return "empty"
    ended = characters("terminal_punctuation")
    if sum(line[-1] in ended for line in lines) / len(lines) < keys.min_punctuation_lines:
        return "line_punct_ratio"
    if sum(len(line) <= keys.short_line for line in lines) / len(lines) > keys.max_short_lines:
        return "short_line_ratio"
    newlines = text.count("\n")
    if duplicates(lines)[1] / (len(text) - newlines) > keys.max_duplicate_characters:
        return "char_dup_ratio"
    if newlines / WordCounts.of(text, text.split()).words > keys.max_newlines:
        return "list_ratio"
    return KEPT


STAGES = (C4, C4Paragraphs, FineWeb)
