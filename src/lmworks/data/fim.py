"""Fill-in-the-middle: documents of a row become infilling examples, as a function of (seed, sample number).

Context-level, as Bavarian et al. (2022) found better and StarCoder trains: a row is cut into the pieces of documents
that lie in it, and each piece becomes an example by itself, so no part crosses from one document to another. Text is
cut between characters, and prefix, middle and suffix are encoded each for itself, as they are in a prompt. A
repository in one document (<file_sep> between its files) has examples of its files.

Sentinels make a piece longer. Whole pieces keep all their text; the piece that no longer fits into the row is cut at
its end first, and becomes an example after that, so every middle is complete. Where encoding anew leaves a few tokens
over, the row is padded with end-of-text that is not trained.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec.errors import DataError
from ..spec.fim import FAMILIES, FimSpec
from .grammars import syntax_parser
from .order import GOLDEN, key_of, mix
from .tokenizer import FILE_TOKENS, FileTokenizer, Tokenizer

STREAM = 0x46494D  # of the draws, beside those of the sources' orders
DRAWS = 4  # of a piece: whether, which order, two cuts
LEAST = 3  # tokens of a piece that is worth cutting in three
BROKEN = "\ufffd"  # what a decoder makes of half a character
PROBE = "def naïve(x):\n    return  x + 1\n"


@dataclass(frozen=True)
class Sentinels:
    """The tokens that mark the parts, by id, for training and for prompts."""

    prefix: int
    suffix: int
    middle: int
    end: int | None
    joined: bool
    suffix_first: bool = False  # of prompts: the run has learned no other order

    @classmethod
    def of(cls, spec: FimSpec, tokenizer: Tokenizer) -> Sentinels:
        names = spec.names
        found = {name: tokenizer.token_id(name) for name in (names.prefix, names.suffix, names.middle, names.end)}
        missing = [name for name, number in found.items() if name and number is None]
        if missing:
            raise DataError(
                f"data.fim.sentinels = '{spec.sentinels}': the tokenizer has no token {', '.join(missing)}; prepare "
                "the data with one that has (bpe:N+code reserves StarCoder's), or name its own: sentinels = 'own'"
            )
        first, second, third = (int(found[name] or 0) for name in (names.prefix, names.suffix, names.middle))
        end = found[names.end] if names.end else None
        return cls(first, second, third, end, names.joined, suffix_first=spec.spm_rate == 1)

    @property
    def ids(self) -> list[int]:
        return [self.prefix, self.suffix, self.middle, *([] if self.end is None else [self.end])]

    def prompt(self, prefix: list[int], suffix: list[int], suffix_first: bool | None = None) -> list[int]:
        """What a model completes with the middle."""
        if not (self.suffix_first if suffix_first is None else suffix_first):
            return [self.prefix, *prefix, self.suffix, *suffix, self.middle]
        if self.joined:
            return [self.prefix, self.suffix, *suffix, self.middle, *prefix]
        return [self.suffix, *suffix, self.prefix, *prefix, self.middle]

    def example(self, prefix: list[int], middle: list[int], suffix: list[int], suffix_first: bool) -> list[int]:
        end = [] if self.end is None else [self.end]
        return [*self.prompt(prefix, suffix, suffix_first), *middle, *end]


def find_sentinels(tokenizer: Tokenizer, trained: FimSpec | None = None) -> Sentinels | None:
    """Those that a run was trained with; without a run, of the first family that the tokenizer knows.

    None: the model knows none, and only the text before a gap can be continued.
    """
    if trained is not None:
        return Sentinels.of(trained, tokenizer) if trained.rate else None
    if isinstance(tokenizer, FileTokenizer):
        for name in FAMILIES:
            try:
                return Sentinels.of(FimSpec(sentinels=name), tokenizer)
            except DataError:
                continue
    return None


def vocab_with_sentinels(tokenizer: Tokenizer, trained: FimSpec) -> int:
    """Ids that a model of this data knows: those of bytes have their sentinels beyond the vocabulary."""
    sentinels = find_sentinels(tokenizer, trained)
    return max(tokenizer.vocab_size, *(number + 1 for number in sentinels.ids)) if sentinels else tokenizer.vocab_size


@dataclass(frozen=True)
class Row:
    tokens: NDArray[np.int64]
    starts: NDArray[np.int64]  # where documents begin in it, but for column 0
    used: int  # tokens before the padding


class FillInMiddle:
    """Makes examples of the documents in rows of tokens."""

    def __init__(self, spec: FimSpec, tokenizer: Tokenizer, seed: int) -> None:
        self.spec, self.tokenizer, self.seed = spec, tokenizer, seed
        self.sentinels = Sentinels.of(spec, tokenizer)
        numbers = [tokenizer.token_id(name) for name in FILE_TOKENS]
        self.marks = {number for number in numbers if number is not None}  # no text, but a structure that stays
        if spec.split == "syntax":
            syntax_parser(spec.language, asked(spec.language))  # a grammar that is missing is reported now
        if spec.split != "token":
            check_cuts(tokenizer)

    def row(self, tokens: NDArray[np.int64], starts: NDArray[np.int64], sample: int) -> Row:
        """The row of a sample; `starts`: where documents begin in `tokens`, but for column 0."""
        marks = np.flatnonzero(np.isin(tokens, list(self.marks)))
        begins = set(starts.tolist())
        edges = [0, *sorted(begins | set(marks[marks > 0].tolist())), len(tokens)]
        draws = uniforms(self.seed, sample, len(edges) - 1)
        made: list[int] = []
        new_starts = []
        for (first, last), draw in zip(pairwise(edges), draws.tolist(), strict=True):
            if first in begins:
                new_starts.append(len(made))
            piece, whole = self.fitted(tokens[first:last].tolist(), draw, len(tokens) - len(made), last == len(tokens))
            made += piece
            if not whole or len(made) == len(tokens):
                break
        filled = np.full(len(tokens), self.tokenizer.eot, np.int64)
        filled[: len(made)] = made
        return Row(filled, np.array(new_starts, np.int64), len(made))

    def fitted(self, piece: list[int], draw: list[float], room: int, last: bool) -> tuple[list[int], bool]:
        """The piece, or the example that is made of it, in at most `room` tokens, and whether all of it is there."""
        kept = piece[:room]
        while draw[0] < self.spec.rate and len(kept) >= LEAST:
            made = self.example(kept, draw, ends=last or len(kept) < len(piece))
            if len(made) <= room:
                return made, len(kept) == len(piece)
            kept = kept[: len(kept) - (len(made) - room)]
        return piece[:room], len(piece) <= room

    def example(self, piece: list[int], draw: list[float], ends: bool = False) -> list[int]:
        """A piece of a document as an infilling example: the same text in another order.

        `ends`: nothing follows in the row. End-of-text then follows the middle, whether or not the document ends there:
        the middle does, and in rows shorter than documents a model would seldom see that.
        """
        head = next((n for n, token in enumerate(piece) if token not in self.marks), len(piece))
        stop = len(piece) - (piece[-1] == self.tokenizer.eot)
        prefix, middle, suffix = self.cut(piece[head:stop], draw[2], draw[3])
        made = self.sentinels.example(prefix, middle, suffix, draw[1] < self.spec.spm_rate)
        end = piece[stop:] or ([self.tokenizer.eot] if ends else [])
        return [*piece[:head], *made, *end]

    def cut(self, body: list[int], a: float, b: float) -> tuple[list[int], list[int], list[int]]:
        """Prefix, middle and suffix of the tokens of a text, by two numbers in [0, 1)."""
        if self.spec.split == "token":
            first, last = between(a, b, len(body), self.spec.max_middle)
            return body[:first], body[first:last], body[last:]
        head, text, tail = self.whole_characters(body)
        first, last = self.span(text, a, b)
        prefix, middle, suffix = (self.tokenizer.encode(part) for part in (text[:first], text[first:last], text[last:]))
        return head + prefix, middle, suffix + tail

    def whole_characters(self, body: list[int]) -> tuple[list[int], str, list[int]]:
        """The text of the tokens, and those at both ends that hold halves of characters: a row may begin in one."""
        head, tail = 0, len(body)
        text = self.tokenizer.decode(body)
        while text.startswith(BROKEN) and head < min(4, tail):
            head += 1
            text = self.tokenizer.decode(body[head:])
        while text.endswith(BROKEN) and tail > max(head, len(body) - 4):
            tail -= 1
            text = self.tokenizer.decode(body[head:tail])
        return body[:head], text, body[tail:]

    def span(self, text: str, a: float, b: float) -> tuple[int, int]:
        """Where the middle begins and ends."""
        if self.spec.split == "syntax":
            node = syntax_span(
                syntax_parser(self.spec.language, asked(self.spec.language)), text, a, b, self.spec.max_middle
            )
            if node:
                return node
        if self.spec.split == "line":
            begins = [0, *(at + 1 for at, character in enumerate(text) if character == "\n")]
            cuts = begins if begins[-1] == len(text) else [*begins, len(text)]
            first, last = sorted((cuts[int(a * len(cuts))], cuts[int(b * len(cuts))]))
            if self.spec.max_middle and last - first > self.spec.max_middle:
                last = max(first, cuts[bisect_right(cuts, first + self.spec.max_middle) - 1])
            return first, last
        return between(a, b, len(text), self.spec.max_middle)


def between(a: float, b: float, length: int, most: int) -> tuple[int, int]:
    """Two uniform places in a sequence; a middle that is too long keeps its beginning."""
    first, last = sorted((int(a * (length + 1)), int(b * (length + 1))))
    return first, min(last, first + most) if most else last


def uniforms(seed: int, sample: int, pieces: int) -> NDArray[np.float64]:
    """(pieces, DRAWS) numbers in [0, 1), a function of the seed and the number of the sample."""
    key = key_of(seed, STREAM, np.array([sample]))
    counters = np.arange(1, pieces * DRAWS + 1, dtype=np.uint64)
    bits = mix(key + counters * GOLDEN)
    return ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(pieces, DRAWS)


def check_cuts(tokenizer: Tokenizer) -> None:
    """That parts of a text, encoded each for itself, are the text again. A tokenizer that puts a space before every
    text (SentencePiece), or normalizes it, has other text there."""
    for at in range(len(PROBE) + 1):
        parts = (PROBE[:at], PROBE[at:])
        if any(tokenizer.decode(tokenizer.encode(part)) != part for part in parts):
            raise DataError(
                "data.fim.split: this tokenizer changes text that is cut between characters (it adds or drops spaces, "
                "or normalizes); data.fim.split = 'token' cuts between its tokens"
            )


# --- syntax ----------------------------------------------------------------------------------------------


def asked(language: str) -> str:
    return f"data.fim.split = 'syntax' with language = '{language}'"


def syntax_span(parser: Any, text: str, a: float, b: float, most: int) -> tuple[int, int] | None:
    """A node of the syntax tree, in characters: one of those around a random place, the whole text aside.

    None where no node there is short enough, or parsed without an error: the caller cuts between characters.
    """
    raw = text.encode("utf-8")
    place = int(a * len(raw))
    node = parser.parse(raw).root_node.named_descendant_for_byte_range(place, place)
    spans = []
    while node is not None and node.parent is not None:
        if not node.has_error and node.end_byte > node.start_byte:
            spans.append((node.start_byte, node.end_byte))
        node = node.parent
    around = [tuple(len(raw[:at].decode("utf-8")) for at in span) for span in dict.fromkeys(spans)]
    fitting = [(first, last) for first, last in around if not most or last - first <= most]
    return fitting[int(b * len(fitting))] if fitting else None
