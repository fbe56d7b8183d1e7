"""Text → hashed word n-grams (shingles), thousands of documents at once.

A word is a run of letters, digits and bytes above 127, found in the UTF-8 text by numpy; its bytes are read as
64-bit integers and mixed, and n neighbours give a shingle of 32 bits. No object is made for a word, and the result
does not depend on the process or the machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PIECE = 2**17  # characters: a longer document is cut, so that memory does not grow with it
WORD = 64  # bytes of a word that count, with its length
LOADED = 8  # bytes read at once

# characters of scripts that write no spaces: each is a word
UNSPACED = re.compile("([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff])")
# general, CJK, full-width and Arabic marks, and spaces other than the ASCII ones
MARKS = re.compile("[\u00a0-\u00bf\u2000-\u206f\u3000-\u303f\uff00-\uff0f\uff1a-\uff20\u060c\u061b\u061f\u06d4]+")

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
STEP = np.uint64(0xD6E8FEB86659FD93)
HALF = np.uint64(32)
MASKS = np.array([(1 << 8 * size) - 1 for size in range(LOADED)] + [2**64 - 1], np.uint64)


DIGITS = bytes.maketrans(b"123456789_", b"000000000\0")


def byte_table(fold: bool) -> bytes:
    """What each byte counts as; 0 separates words. Folded: lower case, every digit a zero, no underscores."""
    table = [byte if byte >= 128 or chr(byte).isalnum() or chr(byte) == "_" else 0 for byte in range(256)]
    if fold:
        table = [*bytes(table[:128]).lower().translate(DIGITS), *table[128:]]
    return bytes(table)


TABLES = {fold: byte_table(fold) for fold in (False, True)}


@dataclass(frozen=True)
class Shingles:
    """Of documents in a row: those of document i are values[starts[i] : starts[i + 1]]."""

    values: NDArray[np.uint32]
    starts: NDArray[np.int64]


def word_bytes(text: str, fold: bool) -> bytes:
    """The text with a zero between words."""
    if not text.isascii():
        text = UNSPACED.sub(r" \1 ", MARKS.sub(" ", text.lower() if fold else text))
    return text.encode("utf-8", "replace").translate(TABLES[fold])


def hashed_words(joined: bytes) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """(hash of each word, where it begins). `joined` begins with a zero and ends with at least eight."""
    raw = np.frombuffer(joined, np.uint8)
    inside = raw != 0
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    begins, sizes = edges[::2] + 1, edges[1::2] - edges[::2]
    loads = np.ndarray((len(raw) - LOADED + 1,), np.dtype("<u8"), joined, strides=(1,))
    hashes = mixed(loads[begins] & MASKS[np.minimum(sizes, LOADED)])
    long = np.flatnonzero(sizes > LOADED)
    for at in range(LOADED, WORD, LOADED):
        long = long[sizes[long] > at]
        if not len(long):
            break
        more = loads[begins[long] + at] & MASKS[np.minimum(sizes[long] - at, LOADED)]
        hashes[long] = mixed(hashes[long] * STEP + more)
    long = np.flatnonzero(sizes > WORD)
    hashes[long] = mixed(hashes[long] * STEP + sizes[long].astype(np.uint64))
    return hashes, begins


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values * MULTIPLIER
    values ^= values >> HALF
    values *= STEP
    values ^= values >> HALF
    return values


def word_hashes(texts: Sequence[str], fold: bool) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """(hashes of the words of all texts, where each text begins among them, with the end of the last)."""
    words = [word_bytes(text, fold) for text in texts]
    hashes, begins = hashed_words(b"\0" + b"\0".join(words) + b"\0" * LOADED)
    offsets = np.cumsum([1, *(len(text) + 1 for text in words)])
    return hashes, np.searchsorted(begins, offsets)


def ngram_hashes(words: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    """Of all n neighbours, in order; fewer words than n have none."""
    count = max(0, len(words) - n + 1)
    total = np.zeros(count, np.uint64)
    for at in range(n):
        total *= STEP
        total += words[at : at + count]
    return mixed(total)


def shingles(texts: Sequence[str], n: int, fold: bool) -> Shingles:
    words, starts = word_hashes(texts, fold)
    found = (ngram_hashes(words, n) >> HALF).astype(np.uint32)
    owner = np.repeat(np.arange(len(texts), dtype=np.int32), np.diff(starts))
    within = owner[: len(found)] == owner[len(owner) - len(found) :]
    counts = np.maximum(0, np.diff(starts) - n + 1)
    return Shingles(found[within], np.concatenate([[0], np.cumsum(counts)]))


def pieces(text: str) -> list[str]:
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)] or [""]
