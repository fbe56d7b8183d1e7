"""Survey and bigram baseline against plain Python."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from corpora import stored_documents

from lmworks.data import TokenData, bigram_loss, prepare
from lmworks.data.survey import SPAN, survey


def flat(folder: Path, split: str) -> list[int]:
    return [token for document in stored_documents(folder, split) for token in [*document, 256]]


def plain_bigram(train: list[int], val: list[int], vocab: int) -> float:
    pairs = Counter(itertools.pairwise(train))
    before, after = Counter(train[:-1]), Counter(train[1:])
    kinds = Counter(a for a, _ in pairs)
    loss = 0.0
    for a, b in itertools.pairwise(val):
        unigram = (after[b] + 1) / (len(train) - 1 + vocab)
        room = max(1, kinds[a])
        loss -= math.log((pairs[a, b] + room * unigram) / (before[a] + room))
    return loss / (len(val) - 1)


def test_bigram_loss_equals_plain_counting(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, val = TokenData.open(prepared, "train"), TokenData.open(prepared, "val")
    expected = plain_bigram(flat(prepared, "train"), flat(prepared, "val"), 257)
    assert bigram_loss(train, val, 257) == pytest.approx(expected, rel=1e-12)
    whole = TokenData.chunks
    monkeypatch.setattr(TokenData, "chunks", lambda self: whole(self, 501))
    assert bigram_loss(train, val, 257) == pytest.approx(expected, rel=1e-12)  # nothing lost between pieces


def test_bigram_probabilities_sum_to_one(tmp_path: Path) -> None:
    """Over all successors of one token: a val of (a, b) for every b gives the whole distribution."""
    (tmp_path / "t.txt").write_text("abracadabra" * 5)
    prepare([str(tmp_path / "t.txt")], tmp_path / "train", val_fraction=0, workers=1)
    train = TokenData.open(tmp_path / "train", "train")
    val = copy.copy(train)
    total = 0.0
    for b in range(257):
        val.chunks = lambda b=b: iter([np.array([97, b])])
        total += math.exp(-bigram_loss(train, val, 257))
    assert total == pytest.approx(1, rel=1e-9)


def test_survey_counts(prepared: Path) -> None:
    result = survey(prepared, samples=2, top=3)
    for split, figures in result.splits.items():
        tokens, documents = flat(prepared, split), stored_documents(prepared, split)
        counts = Counter(tokens)
        shares = [count / len(tokens) for count in counts.values()]
        assert (figures.tokens, figures.documents) == (len(tokens), len(documents))
        assert figures.file_bytes == 2 * len(tokens)
        assert figures.bytes_per_token == 1.0
        assert figures.entropy_bits == pytest.approx(-sum(p * math.log2(p) for p in shares), rel=1e-9)
        assert (figures.top_tokens[0].id, figures.top_tokens[0].count) == counts.most_common(1)[0]
        assert figures.used_vocab == len(counts)
        lengths = sorted(len(d) + 1 for d in documents)
        assert (figures.document_tokens["p0"], figures.document_tokens["p100"]) == (lengths[0], lengths[-1])
        spans = [tuple(tokens[i : i + SPAN]) for i in range(len(tokens) - SPAN + 1)]
        assert figures.repeated_spans == pytest.approx(1 - len(set(spans)) / len(spans), abs=1e-9)
    assert result.shared_documents == 0
    assert len(result.samples) == 2
    assert all(text.startswith("document ") for text in result.samples)


def test_survey_finds_validation_leaks(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    passage = "the same long passage stands in every one of these files. " * 3
    for number in range(40):
        (source / f"{number}.txt").write_text(f"{number} {passage} {number * 7919}")
    prepare([str(source)], tmp_path / "out", val_fraction=0.3, workers=1)
    result = survey(tmp_path / "out")
    assert result.val_spans_in_train is not None
    assert result.val_spans_in_train > 0.6


def test_survey_of_tiny_dataset(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("ab")
    prepare([str(tmp_path / "t.txt")], tmp_path / "out", val_fraction=0, workers=1)
    result = survey(tmp_path / "out", samples=5)
    assert result.samples == ("ab",)
    assert result.splits["train"].repeated_spans == 0
    assert result.val_spans_in_train is None
