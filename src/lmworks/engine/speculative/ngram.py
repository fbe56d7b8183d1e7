"""N-gram proposer (prompt lookup): propose what followed the last time that the text read as it does now.

Code, quotations and lists repeat themselves, so the longest earlier match of the newest tokens is often a good draft,
and it needs no model. As in LZ77, all positions where a pair of tokens ended are chained, newest first: a token costs
one entry, and a proposal follows at most `CHAIN` links and compares at most `LONGEST` tokens at each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.request import Sequence

PAIR = 2  # tokens that must match
CHAIN = 16  # earlier positions that are compared
LONGEST = 32  # longest match that is looked for
NOWHERE = -1
KEY = "ngram"  # key of a sequence's index in `extra`


@dataclass
class NgramIndex:
    """Positions where pairs of tokens ended, in one growing text."""

    seen: int = 0  # tokens whose pairs are entered
    newest: dict[tuple[int, int], int] = field(default_factory=dict)  # pair → index of the token after it
    earlier: list[int] = field(default_factory=list)  # the previous such index: one link for each token

    def enter(self, tokens: list[int], known: int) -> None:
        """Index pairs that another token follows; the last pair is the query."""
        for after in range(self.seen, known):
            link = NOWHERE
            if after >= PAIR:
                pair = (tokens[after - 2], tokens[after - 1])
                link = self.newest.get(pair, NOWHERE)
                self.newest[pair] = after
            self.earlier.append(link)
        self.seen = max(self.seen, known)

    def propose(self, tokens: list[int], known: int, count: int) -> list[int]:
        """The tokens that followed the longest match, the newest of equals.

        The text is tokens[:known], which only grows.
        """
        self.enter(tokens, known)
        if known < PAIR or count < 1:
            return []
        best, length = NOWHERE, 0
        place = self.newest.get((tokens[known - 2], tokens[known - 1]), NOWHERE)
        for _ in range(CHAIN):
            if place == NOWHERE or length >= LONGEST:
                break
            match = common_suffix(tokens, place, known)
            if match > length:
                best, length = place, match
            place = self.earlier[place]
        if best == NOWHERE:
            return []
        found: list[int] = []
        for index in range(best, best + count):  # a match at the end continues into the draft itself
            found.append(tokens[index] if index < known else found[index - known])
        return found


def common_suffix(tokens: list[int], end: int, known: int) -> int:
    """Length of the common suffix of tokens[:end] and tokens[:known], up to LONGEST."""
    most = min(end, LONGEST)
    for length in range(PAIR, most):
        if tokens[end - 1 - length] != tokens[known - 1 - length]:
            return length
    return most


class NgramProposer:
    """Proposes draft tokens from the sequence's own text."""

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        lookup: NgramIndex = sequence.extra.setdefault(KEY, NgramIndex())
        return lookup.propose(sequence.tokens, sequence.num_known_tokens, count)
