"""A logistic regression over hashed words and word pairs: what tells chosen documents from others.

The kind of classifier that GPT-3's and DCLM's data were filtered with, small enough to be trained here in seconds.
Everything is deterministic: features are hashes, the held-out documents are chosen by their content, and the
convex loss is minimised over all documents by L-BFGS from zero.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..spec.errors import DataError
from ..spec.files import write_whole
from .minhash import BATCH
from .shingles import ngram_hashes, word_hashes

BITS = 18  # of a feature's number
CHARACTERS = 20_000  # of a document that count
HELD_OUT = 5  # one document in so many
FORMAT = 1

Vector = NDArray[np.float64]
Loss = Callable[[Vector], tuple[float, Vector]]


@dataclass(frozen=True)
class Features:
    """A sparse matrix by rows; each row has length 1, or is empty."""

    columns: NDArray[np.int32]
    values: NDArray[np.float32]
    starts: NDArray[np.int64]

    @property
    def rows(self) -> int:
        return len(self.starts) - 1

    def times(self, weights: Vector) -> Vector:
        sums = np.concatenate([[0.0], np.cumsum(self.values * weights[self.columns])])
        return sums[self.starts[1:]] - sums[self.starts[:-1]]

    def transposed_times(self, rows: Vector) -> Vector:
        spread = np.repeat(rows, np.diff(self.starts))
        sums = np.bincount(self.columns, weights=self.values * spread, minlength=2**BITS)
        return sums.astype(np.float64)

    def only(self, chosen: NDArray[np.bool_]) -> Features:
        sizes = np.diff(self.starts)
        inside = np.repeat(chosen, sizes)
        return Features(self.columns[inside], self.values[inside], starts_of(sizes[chosen]))


def starts_of(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes)])


def features(texts: Sequence[str]) -> Features:
    """Log counts of words and of pairs of neighbours."""
    words, starts = word_hashes([text[:CHARACTERS] for text in texts], fold=True)
    columns, values, sizes = [], [], []
    for first, last in pairwise(starts):
        own = words[first:last]
        hashes = np.concatenate([own, ngram_hashes(own, 2)]) >> np.uint64(64 - BITS)
        column, count = np.unique(hashes.astype(np.int32), return_counts=True)
        value = np.log1p(count.astype(np.float32))
        columns.append(column)
        values.append(value / max(np.linalg.norm(value), 1e-9))
        sizes.append(len(column))
    return Features(np.concatenate(columns), np.concatenate(values), starts_of(np.array(sizes)))


def together(parts: Sequence[Features]) -> Features:
    sizes = np.concatenate([np.diff(part.starts) for part in parts])
    columns, values = ([getattr(part, name) for part in parts] for name in ("columns", "values"))
    return Features(np.concatenate(columns), np.concatenate(values), starts_of(sizes))


@dataclass(frozen=True)
class Classifier:
    weights: Vector  # the last one is the bias

    def scores(self, found: Features) -> Vector:
        """Chance that a document is one of the chosen, where both kinds are equally many."""
        return logistic(found.times(self.weights[:-1]) + self.weights[-1])

    def save(self, path: Path) -> None:
        table = io.BytesIO()
        np.savez_compressed(table, format=np.array(FORMAT), weights=self.weights.astype(np.float32))
        write_whole(path, table.getvalue())

    @classmethod
    def load(cls, path: Path) -> Classifier:
        try:
            with np.load(path) as table:
                known = int(table["format"]) == FORMAT and table["weights"].shape == (2**BITS + 1,)
                if known:
                    return cls(table["weights"].astype(np.float64))
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{path} is no classifier of `lmworks data quality`: {error}") from None
        raise DataError(f"{path} was made by another version; make it again with `lmworks data quality`")


def logistic(values: Vector) -> Vector:
    return 0.5 * (1 + np.tanh(values / 2))


@dataclass(frozen=True)
class Trained:
    classifier: Classifier
    documents: dict[str, int]  # trained and held out
    auc: float  # of the held-out documents
    thresholds: dict[str, float]  # share of the raw documents that is kept → least score


def train(chosen: Iterable[str], raw: Iterable[str], penalty: float = 1e-5) -> Trained:
    """`penalty`: of the squared weights, for each document. Both kinds count the same, however many they are."""
    found: list[Features] = []
    labels: list[float] = []
    held: list[bool] = []
    for kind, texts in ((1.0, chosen), (0.0, raw)):
        for batch in batches(texts):
            found.append(features(batch))
            labels += [kind] * len(batch)
            held += [held_out(text) for text in batch]
    label, out = np.array(labels), np.array(held, bool)
    for kind, name in ((1.0, "chosen"), (0.0, "raw")):
        if min(int((out & (label == kind)).sum()), int((~out & (label == kind)).sum())) < 2:
            raise DataError(f"too few {name} documents to train a classifier on and to hold out: give at least 20")
    everything = together(found)
    inner, truth = everything.only(~out), label[~out]
    share = np.where(truth == 1, 0.5 / truth.mean(), 0.5 / (1 - truth.mean())) / len(truth)

    def loss(weights: Vector) -> tuple[float, Vector]:
        margin = inner.times(weights[:-1]) + weights[-1]
        error = share * (logistic(margin) - truth)
        value = float(share @ (np.logaddexp(0, margin) - truth * margin)) + penalty * float(weights @ weights) / 2
        return value, np.append(inner.transposed_times(error), error.sum()) + penalty * weights

    classifier = Classifier(lbfgs(loss, np.zeros(2**BITS + 1)))
    scores = classifier.scores(everything.only(out))
    of_raw = scores[label[out] == 0]
    thresholds = {f"{keep:.0%}": float(np.quantile(of_raw, 1 - keep)) for keep in (0.1, 0.3, 0.5, 0.7, 0.9)}
    documents = {"trained": int((~out).sum()), "held_out": int(out.sum())}
    return Trained(classifier, documents, auc(scores, label[out]), thresholds)


def held_out(text: str) -> bool:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=1).digest()[0] % HELD_OUT == 0


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    held: list[str] = []
    size = 0
    for text in texts:
        held.append(text[:CHARACTERS])
        size += len(held[-1])
        if size >= BATCH:
            yield held
            held, size = [], 0
    if held:
        yield held


def auc(scores: Vector, labels: Vector) -> float:
    """Chance that a chosen document has a higher score than another; equal scores count half."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # the mean rank of equal scores, from 1
    positive = labels == 1
    many, few = int(positive.sum()), int((~positive).sum())
    return float((rank[positive].sum() - many * (many + 1) / 2) / (many * few))


def lbfgs(loss: Loss, start: Vector, steps: int = 200, memory: int = 10, tolerance: float = 1e-6) -> Vector:
    """L-BFGS with a line search by halving (Nocedal & Wright, algorithms 7.4 and 3.1)."""
    at, (value, slope) = start, loss(start)
    history: list[tuple[Vector, Vector]] = []
    for _ in range(steps):
        if np.abs(slope).max() < tolerance:
            break
        direction = -two_loop_recursion(slope, history)
        length, reach = 1.0 if history else 1.0 / float(np.linalg.norm(slope)), float(slope @ direction)
        while (tried := loss(at + length * direction))[0] > value + 1e-4 * length * reach:
            length /= 2
            if length < 1e-12:
                return at
        step, change = length * direction, tried[1] - slope
        if float(step @ change) > 1e-12:
            history = [*history[1 - memory :], (step, change)]
        at, (value, slope) = at + step, tried
    return at


def two_loop_recursion(slope: Vector, history: Sequence[tuple[Vector, Vector]]) -> Vector:
    """The inverse Hessian of the last steps times the slope."""
    result, used = slope.copy(), []
    for step, change in reversed(history):
        factor = float(step @ result) / float(step @ change)
        result -= factor * change
        used.append(factor)
    if history:
        step, change = history[-1]
        result *= float(step @ change) / float(change @ change)
    for (step, change), factor in zip(history, reversed(used), strict=True):
        result += (factor - float(change @ result) / float(step @ change)) * step
    return result
