"""English words and sentences, as spaCy's rules cut them, which datatrove's filters count.

A word is found in what lies between white space, by that alone: prefixes and suffixes are taken off, special cases
("don't", "e.g.") and addresses stay as they are, and the rest is cut at hyphens, slashes and the like. So a corpus,
where the same strings return, is cut by looking them up. One rule looks further: special cases, most of them emoticons
such as "):", are also found among the pieces, and one that reaches over a space keeps others from being found.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

MOST_CACHED = 200_000  # strings
LONGEST_CACHED = 48  # characters


@functools.cache
def rules() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("english.json").read_bytes())
    return found


@functools.cache
def characters(name: str) -> frozenset[str]:
    return frozenset(rules()[name])


class Rules:
    """The tokenizer itself, without memory."""

    def __init__(self) -> None:
        given = rules()
        self.prefix, self.suffix = re.compile(given["prefix"]).search, re.compile(given["suffix"]).search
        self.infixes, self.url = re.compile(given["infix"]).finditer, re.compile(given["url"]).match
        self.special: dict[str, list[str]] = given["special_cases"]
        self.none: dict[str, list[str]] = {}
        # Special cases that the rules would cut are looked for in what they left, too.
        cut = {text: self.cut(text, self.none) for text in self.special if self.is_cut(text)}
        self.phrases: dict[str, list[tuple[list[str], str]]] = {}
        for text, tokens in cut.items():
            self.phrases.setdefault(tokens[0], []).append((tokens, text))

    def is_cut(self, text: str) -> bool:
        return bool(self.prefix(text) or self.suffix(text) or any(True for _ in self.infixes(text)))

    def cut(self, text: str, special: dict[str, list[str]]) -> list[str]:
        prefixes, text, suffixes = self.affixes(text, special)
        return [*prefixes, *(self.inner(text, special) if text else ()), *reversed(suffixes)]

    def affixes(self, text: str, special: dict[str, list[str]]) -> tuple[list[str], str, list[str]]:
        prefixes: list[str] = []
        suffixes: list[str] = []
        before = 0
        while text and len(text) != before and text not in special:
            before = len(text)
            found = self.prefix(text)
            head = found.end() - found.start() if found else 0
            if head and text[head:] in special:
                prefixes.append(text[:head])
                text = text[head:]
                break
            found = self.suffix(text[head:])
            tail = found.end() - found.start() if found else 0
            if tail and text[:-tail] in special:
                suffixes.append(text[-tail:])
                text = text[:-tail]
                break
            if head and tail and head + tail <= len(text):
                prefixes.append(text[:head])
                suffixes.append(text[-tail:])
                text = text[head:-tail]
            elif head:
                prefixes.append(text[:head])
                text = text[head:]
            elif tail:
                suffixes.append(text[-tail:])
                text = text[:-tail]
        return prefixes, text, suffixes

    def inner(self, text: str, special: dict[str, list[str]]) -> list[str]:
        if text in special:
            return special[text]
        if self.url(text):
            return [text]
        words, start = [], 0
        for found in self.infixes(text):
            if found.start() == 0:
                continue
            if found.start() != start:
                words.append(text[start : found.start()])
            if found.start() != found.end():
                words.append(found.group())
            start = found.end()
        return [*words, text[start:]] if start < len(text) else words

    def with_phrases(self, tokens: list[str], spaces: Set[int] = frozenset()) -> list[str]:
        """Sequences of tokens that are a special case: the longest first, then the leftmost. `spaces`: the tokens that
        come after a space; a sequence with a space inside stays as it is, but none that overlaps it is found."""
        found = []
        for start, token in enumerate(tokens):
            for phrase, text in self.phrases.get(token, ()):
                if tokens[start : start + len(phrase)] == phrase:
                    found.append((-len(phrase), start, text))
        if not found:
            return tokens
        seen: set[int] = set()
        chosen: dict[int, tuple[int, str]] = {}
        for length, start, text in sorted(found):
            end = start - length
            if start not in seen and end - 1 not in seen and spaces.isdisjoint(range(start + 1, end)):
                chosen[start] = (end, text)
            seen.update(range(start, end))
        result: list[str] = []
        at = 0
        while at < len(tokens):
            if at in chosen:
                at, text = chosen[at]
                result += self.special[text]
            else:
                result.append(tokens[at])
                at += 1
        return result


class Cache(dict[str, Sequence[str]]):
    """String without white space → its words."""

    def __init__(self) -> None:
        self.rules = Rules()
        self.pieces: dict[str, Sequence[str]] = {}  # of strings in which special cases were found: before they were

    def __missing__(self, chunk: str) -> Sequence[str]:
        pieces = self.rules.cut(chunk, self.rules.special)
        words = self.rules.with_phrases(pieces)
        if words is not pieces:
            self.pieces[chunk] = pieces
        if len(chunk) <= LONGEST_CACHED:
            self[chunk] = words
        return words

    def changes(self, text: str, chunks: Sequence[str]) -> Iterator[tuple[int, int, Sequence[str]]]:
        """(first chunk, last + 1, words) where words are others than those of the chunks, because of a space between
        them. `chunks` are those of the text, all looked up before."""
        if self.pieces.keys().isdisjoint(chunks):
            return
        at = 0
        for segment in SEGMENTS.split(text):
            inside = segment.split()
            if len(inside) > 1 and not self.pieces.keys().isdisjoint(inside):
                pieces = [self.pieces.get(chunk) or self[chunk] for chunk in inside]
                starts = frozenset(itertools.accumulate(map(len, pieces)))
                words = self.rules.with_phrases(list(itertools.chain.from_iterable(pieces)), starts)
                if list(words) != list(itertools.chain.from_iterable(self[chunk] for chunk in inside)):
                    yield at, at + len(inside), words
            at += len(inside)


SEGMENTS = re.compile(r"\s{2,}|[^\S ]")  # white space that is more than one space


@functools.cache
def full_cache() -> Cache:
    return Cache()


def cache() -> Cache:
    """Emptied between documents, where it has become too large."""
    found = full_cache()
    if len(found) > MOST_CACHED or len(found.pieces) > MOST_CACHED:
        found.clear()
        found.pieces.clear()
    return found


def split_words(text: str) -> list[str]:
    memory, chunks = cache(), text.split()
    words = list(map(memory.__getitem__, chunks))
    for start, stop, others in memory.changes(text, chunks):
        words[start:stop] = [others, *[()] * (stop - start - 1)]
    return list(itertools.chain.from_iterable(words))


# --- counts -----------------------------------------------------------------------------------------------


@dataclass
class WordCounts:
    """What quality rules ask of the words of a document."""

    words: int = 0
    not_punctuation: int = 0  # words with a character that is none of the punctuation
    letters: int = 0  # characters of those
    alphabetic: int = 0  # words with a letter

    @classmethod
    def of(cls, text: str, chunks: Sequence[str]) -> Self:
        """`chunks`: the text, cut at white space."""
        total = cls()
        memory, counts = cache(), count_cache()
        for chunk, times in Counter(chunks).items():
            total.add(times, counts[chunk])
        for start, stop, words in memory.changes(text, chunks):
            for chunk in chunks[start:stop]:
                total.add(-1, counts[chunk])
            total.add(1, word_counts(words))
        return total

    def add(self, times: int, counts: tuple[int, int, int, int]) -> None:
        words, not_punctuation, letters, alphabetic = counts
        self.words += times * words
        self.not_punctuation += times * not_punctuation
        self.letters += times * letters
        self.alphabetic += times * alphabetic


def word_counts(words: Sequence[str]) -> tuple[int, int, int, int]:
    punctuation = characters("punctuation")
    content = [word for word in words if not punctuation.issuperset(word)]
    return len(words), len(content), sum(map(len, content)), sum(any(map(str.isalpha, word)) for word in words)


class CountCache(dict[str, tuple[int, int, int, int]]):
    def __missing__(self, chunk: str) -> tuple[int, int, int, int]:
        found = word_counts(full_cache()[chunk])
        if len(chunk) <= LONGEST_CACHED:
            self[chunk] = found
        return found


@functools.cache
def full_count_cache() -> CountCache:
    return CountCache()


def count_cache() -> CountCache:
    """Emptied with the words: what was counted was looked up there."""
    found = full_count_cache()
    if not full_cache():
        found.clear()
    return found


# --- sentences --------------------------------------------------------------------------------------------


def count_sentences(line: str, most: int) -> int:
    """A sentence ends with a mark such as ".", and the next begins with the next word that is no punctuation. Counting
    ends at `most`."""
    ends = characters("sentence_ends")
    sentences, ended = 1, False
    for run in re.findall(r"\s+|\S+", line):
        for word in ((run,) if run != " " else ()) if run.isspace() else cache()[run]:
            if word in ends:
                ended = True
            elif ended and not is_punctuation(word):
                sentences, ended = sentences + 1, False
                if sentences >= most:
                    return sentences
    return sentences


@functools.lru_cache(10_000)
def is_punctuation(word: str) -> bool:
    return all(unicodedata.category(character)[0] == "P" for character in word)
