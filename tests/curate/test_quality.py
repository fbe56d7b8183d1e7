"""The quality classifier: its optimum, its AUC and its decisions against what others compute."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from lmworks.curate.classifier import BITS, Classifier, auc, features, lbfgs, train
from lmworks.curate.documents import Document
from lmworks.curate.quality import Quality, train_on
from lmworks.data.sources import Reading
from lmworks.spec.errors import DataError, SpecError

GOOD = re.findall(r"\w+", "the theorem follows from a lemma which we prove by induction over all finite sets")
BAD = re.findall(r"\w+", "click here to buy cheap offers now best deal online free shipping subscribe today")


def documents(count: int, share: float, seed: int) -> list[str]:
    """`share` of the words from GOOD, the others from BAD."""
    draw = random.Random(seed)
    return [" ".join(draw.choice(GOOD if draw.random() < share else BAD) for _ in range(60)) for _ in range(count)]


def test_held_out_auc_is_high_where_kinds_differ_and_one_half_where_they_do_not() -> None:
    assert train(documents(50, 0.8, 1), documents(70, 0.2, 2)).auc > 0.99
    same = train(documents(80, 0.5, 3), documents(80, 0.5, 4))
    held = same.documents["held_out"] / 2
    assert abs(same.auc - 0.5) < 4 * ((2 * held + 1) / (12 * held * held)) ** 0.5  # of the rank statistic by chance


def test_auc_is_the_share_of_pairs_in_order() -> None:
    draw = np.random.default_rng(0)
    scores, labels = draw.integers(0, 6, 60) / 6, draw.integers(0, 2, 60).astype(float)
    pairs = [(a > b) + (a == b) / 2 for a in scores[labels == 1] for b in scores[labels == 0]]
    assert auc(scores, labels) == pytest.approx(sum(pairs) / len(pairs))


def test_minimum_is_scipys() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    draw = np.random.default_rng(1)
    rows, truth = draw.normal(size=(80, 12)), draw.integers(0, 2, 80)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        margin = rows @ weights
        value = np.mean(np.logaddexp(0, margin) - truth * margin) + 0.01 * weights @ weights
        return float(value), rows.T @ (1 / (1 + np.exp(-margin)) - truth) / 80 + 0.02 * weights

    expected = optimize.minimize(loss, np.zeros(12), jac=True, method="BFGS", options={"gtol": 1e-9}).x
    assert np.abs(lbfgs(loss, np.zeros(12)) - expected).max() < 1e-4


def test_sparse_products_are_those_of_the_dense_matrix() -> None:
    found = features(["a b a c", "", "d e f a a a a", "b"])
    dense = np.zeros((4, 2**BITS))
    for row in range(4):
        inside = slice(found.starts[row], found.starts[row + 1])
        dense[row, found.columns[inside]] = found.values[inside]
    draw = np.random.default_rng(2)
    weights, rows = draw.normal(size=2**BITS), draw.normal(size=4)
    assert np.allclose(found.times(weights), dense @ weights)
    assert np.allclose(found.transposed_times(rows), dense.T @ rows)
    assert np.allclose(np.linalg.norm(dense, axis=1), [1, 0, 1, 1])
    counts = sorted(found.values[: found.starts[1]].tolist())  # a twice; b, c and the pairs ab, ba, ac once
    assert np.allclose(counts, np.log1p([1, 1, 1, 1, 1, 2]) / np.linalg.norm(np.log1p([1, 1, 1, 1, 1, 2])))


def test_stage_decides_as_the_trained_classifier(tmp_path: Path) -> None:
    for name, share in (("good", 0.8), ("bad", 0.2)):
        (tmp_path / name).mkdir()
        for number, text in enumerate(documents(150, share, len(name))):
            (tmp_path / name / f"{number}.txt").write_text(text)
    files = [tmp_path / "one.npz", tmp_path / "two.npz"]
    for file in files:
        trained = train_on([str(tmp_path / "good")], [str(tmp_path / "bad")], file, Reading(), 10_000)
    assert files[0].read_bytes() == files[1].read_bytes()  # the same every time
    decide = Quality(model=str(files[0]), min_score=trained.thresholds["50%"]).open()
    fresh = [Document("a", text) for text in documents(40, 0.8, 9) + documents(40, 0.2, 10)]
    reasons = [decide(document) for document in fresh]
    assert reasons[:40] == [""] * 40
    assert 8 <= reasons[40:].count("low_quality") <= 32
    expected = Classifier.load(files[0]).scores(features([document.text for document in fresh]))
    assert [document.meta["quality"] for document in fresh] == [round(score, 4) for score in expected.tolist()]


def test_errors_say_what_would_work(tmp_path: Path) -> None:
    (tmp_path / "no.npz").write_text("nothing")
    with pytest.raises(DataError, match=r"no\.npz is no classifier of `lmworks data quality`"):
        Quality(model=str(tmp_path / "no.npz")).require()
    with pytest.raises(SpecError, match=r"stages\.quality\.model names no classifier"):
        Quality().require()
    with pytest.raises(DataError, match=r"too few raw documents .* at least 20"):
        train(documents(50, 1, 1), documents(2, 0, 1))
