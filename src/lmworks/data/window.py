"""The sequences of the global batch at a cursor: where each comes from, and statistics that show outliers.

A batch follows from (seed, cursor), so one process can describe what all ranks have read, at any later time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .loader import BatchSource, Origin

GRAM = 8  # tokens of a passage that counts as repeated
MAX_OUTLIERS = 3  # sequences that an event lists
NEAR, EACH = 8, 8  # what is usual: batches before this one, sequences of each
MIN_SPREAD_BITS = 0.1  # a spread of entropies that is taken as the smallest there is


@dataclass(frozen=True)
class Row:
    """One row of a global batch."""

    sample: int  # counted over the whole run
    source: str  # the prepared folder, or the file of examples
    window: int  # of that source: its tokens [window · seq, window · seq + seq], or its row
    documents: tuple[int, int]  # first and last of that split in it, counted from 0
    entropy_bits: float  # of its tokens' frequencies
    top_token: int
    top_share: float  # of the most frequent token
    repeated: float  # share of its 8-token passages that came before in the row
    examples: tuple[str, ...] = ()  # file and line of each, where a row is made of examples


def rows_at(batches: BatchSource, cursor: int) -> list[Row]:
    """Every sequence of the global batch, whichever rank trains on it; of online methods, the prompts of the round."""
    return rows_of(batches, batches.batch_number(cursor))


def rows_of(batches: BatchSource, number: int, most: int | None = None) -> list[Row]:
    samples = batches.samples_of(number)[:most]
    origins = batches.origins(samples)
    return [row_of(sample, origin) for sample, origin in zip(samples.tolist(), origins, strict=True)]


def row_of(sample: int, origin: Origin) -> Row:
    tokens = origin.tokens
    counts = np.bincount(tokens)
    shares = counts[counts > 0] / len(tokens)
    return Row(
        sample=sample,
        source=origin.source,
        window=origin.window,
        documents=origin.documents,
        entropy_bits=round(float(-(shares * np.log2(shares)).sum()) + 0.0, 3),
        top_token=int(counts.argmax()),
        top_share=round(float(counts.max() / len(tokens)), 4),
        repeated=round(repeated_share(tokens), 4),
        examples=origin.examples,
    )


def text_of(batches: BatchSource, row: Row) -> str:
    (origin,) = batches.origins(np.array([row.sample]))
    return batches.tokenizer.decode(origin.tokens.tolist())


def repeated_share(tokens: NDArray[np.int64]) -> float:
    """0 for a row in which no passage of GRAM tokens comes twice, near 1 for one that repeats a line."""
    count = len(tokens) - GRAM + 1
    if count < 2:
        return 0.0
    passages = np.lib.stride_tricks.sliding_window_view(tokens, GRAM)
    return 1 - len(np.unique(passages, axis=0)) / count


def describe(batches: BatchSource, cursor: int) -> dict[str, Any]:
    """For an event: statistics of the batch, and its outlier sequences.

    An outlier has far fewer bits per token than usual (one line repeated) or far more (noise, another language).
    """
    rows = rows_at(batches, cursor)
    sources = {row.source: sum(other.source == row.source for other in rows) for row in rows}
    usual, spread = usual_bits(batches, cursor)
    scored = [{**asdict(row), "z": round((row.entropy_bits - usual) / spread, 1)} for row in rows]
    return {
        "samples": [rows[0].sample, rows[-1].sample],
        "sources": sources,
        "entropy_bits": round(sum(row.entropy_bits for row in rows) / len(rows), 3),
        "usual_bits": round(usual, 3),
        "odd": sorted(scored, key=lambda row: -abs(row["z"]))[:MAX_OUTLIERS],
    }


def usual_bits(batches: BatchSource, cursor: int) -> tuple[float, float]:
    """Median entropy of the sequences before this batch (after it, at the very start), and their robust deviation."""
    number = batches.batch_number(cursor)
    near = range(max(0, number - NEAR), number) if number else range(1, 1 + NEAR)
    bits = np.array([row.entropy_bits for one in near for row in rows_of(batches, one, EACH)])
    middle = float(np.median(bits))
    return middle, max(MIN_SPREAD_BITS, 1.4826 * float(np.median(np.abs(bits - middle))))
