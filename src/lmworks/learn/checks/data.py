"""Further exercises, `src/data/`: worked out by hand; rows against those of LMWorks' own packing."""

from __future__ import annotations

import random
from types import ModuleType

from ...data.packing import pack as best_fit
from ..checking.expect import Mismatch, expect_at_most, expect_equal


def pack(module: ModuleType) -> None:
    draw = random.Random(0)
    cases: list[tuple[list[int], int]] = [
        ([], 4),
        ([4], 4),
        ([1, 1], 4),
        ([2, 2], 4),
        ([3, 2], 4),
        ([1, 3, 1, 3], 4),
        ([2, 2, 3, 3, 4, 6], 10),
        ([4, 3, 3, 5, 5], 10),
    ]
    cases += [([draw.randint(1, 100) for _ in range(200)], 100), ([draw.randint(20, 60) for _ in range(200)], 128)]
    for lengths, size in cases:
        many = f"{len(lengths)} documents" if len(lengths) > 9 else f"lengths {lengths}"
        case = f"{many}, rows of {size}"
        given = list(lengths)
        rows = module.pack(given, size)
        placed = sorted(document for row in rows for document in row)
        expect_equal(f"{case}: documents, sorted", placed, list(range(len(lengths))), remark="each document once")
        expect_equal(f"{case}: `lengths` is left as it was", given, lengths)
        fullest = max((sum(lengths[document] for document in row) for row in rows), default=0)
        expect_at_most(f"{case}: tokens of the fullest row", fullest, size, remark="no row holds more than it can")
        most = len(best_fit(lengths, size))
        remark = "a target of this exercise: the rows of best fit, the longest document first"
        expect_at_most(f"{case}: rows", len(rows), most, remark=remark)


WORDS = {"low": 5, "lower": 2, "newest": 6, "widest": 3}  # of Sennrich, Haddow and Birch (2016)


def bpe(module: ModuleType) -> None:
    for pieces, pair, expected in (
        (["a", "b"], ("a", "b"), ["ab"]),
        (["a", "b", "a", "b"], ("a", "b"), ["ab", "ab"]),
        (["a", "a", "a"], ("a", "a"), ["aa", "a"]),
        (["b", "a"], ("a", "b"), ["b", "a"]),
        (["ab", "a", "b"], ("ab", "a"), ["aba", "b"]),
        ([], ("a", "b"), []),
    ):
        given = list(pieces)
        expect_equal(f"merge {pieces} by {pair}", module.merge(given, pair), expected)
        expect_equal(f"merge {pieces} by {pair}: the pieces are left as they were", given, pieces)
    for words, merges, learns, remark in (
        ({"ab": 1}, 1, [("a", "b")], ""),
        ({"abab": 1}, 1, [("a", "b")], "the pair that occurs most"),
        ({"ab": 1, "cd": 2}, 1, [("c", "d")], "a pair counts as often as its word occurs"),
        ({"cd": 1, "ab": 1}, 1, [("a", "b")], "equally frequent: the first in alphabetical order"),
        ({"ab": 1}, 5, [("a", "b")], "no pair is left"),
        ({"abab": 1}, 2, [("a", "b"), ("ab", "ab")], "pairs are counted anew after each merge"),
        (WORDS, 3, [("e", "s"), ("es", "t"), ("l", "o")], "es 9 times, then est 9, then lo 7"),
    ):
        given_words = dict(words)
        got = module.train_bpe(given_words, merges)
        expect_equal(f"{merges} merges from {words}", [tuple(pair) for pair in got], learns, remark=remark)
    for word, learned, cut, remark in (
        ("lowest", [("e", "s"), ("es", "t"), ("l", "o")], ["lo", "w", "est"], "a word that was not trained on"),
        ("abc", [("b", "c"), ("a", "b")], ["a", "bc"], "in the order learned: b c comes first"),
        ("abc", [("a", "b"), ("b", "c")], ["ab", "c"], "in the order learned: a b comes first"),
        ("x", [], ["x"], ""),
    ):
        expect_equal(f"encode {word!r} by {learned}", module.encode(word, learned), cut, remark=remark)


def minhash(module: ModuleType) -> None:
    for shingles, functions, expected in (
        ({7}, [(1, 0)], [7]),
        ({7, 3}, [(1, 0)], [3]),
        ({7, 3}, [(1, 0), (2, 5)], [3, 11]),
        ({1, 2}, [(2**61 - 2, 0)], [2**61 - 3]),
    ):
        remark = "the least of all values of each function; modulo PRIME before comparing"
        got = list(module.signature(shingles, functions))
        expect_equal(f"signature of {sorted(shingles)} by {functions}", got, expected, remark=remark)
    for one, other, share in (([1, 2], [1, 2], 1.0), ([1, 2], [1, 3], 0.5), ([1, 2, 3, 4], [4, 3, 2, 1], 0.0)):
        remark = "the share of functions that agree, place by place"
        expect_equal(f"similarity of {one} and {other}", float(module.similarity(one, other)), share, remark=remark)
    for similar, bands, rows, likely in (
        (0.5, 1, 1, 0.5),
        (0.5, 1, 2, 0.25),
        (0.5, 2, 1, 0.75),
        (0.8, 14, 8, 0.923548),
    ):
        got_chance = float(module.chance(similar, bands, rows))
        if abs(got_chance - likely) > 1e-5:
            raise Mismatch(f"similarity {similar}, {bands} bands of {rows}", likely, got_chance,
                           remark="all rows of a band agree, in at least one band")  # fmt: skip
    draw = random.Random(1)
    functions = [(draw.randrange(1, 2**61 - 1), draw.randrange(2**61 - 1)) for _ in range(2000)]
    hashed = [draw.randrange(2**60) for _ in range(80)]
    found = module.similarity(*(module.signature(set(part), functions) for part in (hashed[:60], hashed[20:])))
    remark = "40 of 80 are common: 0.5, within what 2,000 functions leave to chance"
    expect_equal("two sets of 60 with 40 in common: within 0.05", abs(found - 0.5) < 0.05, True, remark=remark)


CHECKS = {"pack": pack, "bpe": bpe, "minhash": minhash}
