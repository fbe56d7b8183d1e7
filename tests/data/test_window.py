"""What a cursor holds: the same sequences that the ranks were given, where they come from, and how odd they are."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from corpora import stored_documents
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.data import Batches, prepare
from lmworks.data.window import describe, repeated_share, rows_at, text_of, usual_bits
from lmworks.record import RunFolder
from lmworks.spec import DataSpec, RunSpec


def data_of(**keys: object) -> DataSpec:
    return DataSpec.from_dict({"seq": 24, "micro_batch": 2, "global_batch": 8, **keys})


def test_rows_cover_all_ranks(prepared: Path) -> None:
    data = data_of(path=str(prepared))
    ranks = [Batches(data, seed=3, rank=rank, world=2) for rank in range(2)]
    rows = rows_at(ranks[1], 5)
    assert [row.sample for row in rows] == list(range(40, 48))
    seen = [list(tokens) for rank in ranks for batch in rank.at(5) for tokens in batch.tokens.tolist()]
    for row, tokens in zip(rows, seen, strict=True):
        assert list(ranks[0].sources[0].read(row.window * 24, row.window * 24 + 24)) == tokens
        text = ranks[0].tokenizer.decode(
            [*tokens, int(ranks[0].sources[0].read(row.window * 24 + 24, row.window * 24 + 25)[0])]
        )
        assert text_of(ranks[0], row) == text and len(text) > 0


def test_documents_are_counted_over_all_shards(prepared: Path) -> None:
    """By the end-of-text tokens, not by the offsets."""
    batches = Batches(data_of(path=str(prepared)), seed=0)
    owner = [n for n, document in enumerate(stored_documents(prepared, "train")) for _ in (*document, None)]
    source = batches.sources[0]
    assert len(source.shards) > 1
    assert [source.document_at(position) for position in range(len(source))] == owner
    for row in rows_at(batches, 2):
        start = row.window * 24
        assert row.documents == (owner[start], owner[start + 24])


def test_entropy_separates_outliers() -> None:
    assert repeated_share(np.arange(40)) == 0
    assert repeated_share(np.array([1, 2, 3] * 20)) == pytest.approx(1 - 3 / 53)
    assert repeated_share(np.array([7] * 5)) == 0  # too short to tell


@pytest.fixture
def mixed(tmp_path: Path, prepared: Path) -> RunFolder:
    """A quarter of the samples from a source that says one thing for ever."""
    odd = tmp_path / "odd.jsonl"
    odd.write_text("".join(json.dumps({"text": "A" * 500 + str(number)}) + "\n" for number in range(40)))
    folder = prepare([str(odd)], tmp_path / "odd", workers=1).folder
    table = {"data": {"mix": {str(prepared): 0.75, str(folder): 0.25}, "seq": 24, "micro_batch": 2, "global_batch": 8}}
    return RunFolder.create(tmp_path / "run", RunSpec.from_dict({"model": {"preset": "tiny"}, **table}))


def test_event_lists_outliers_and_sources(mixed: RunFolder) -> None:
    spec = mixed.spec()
    told = describe(Batches(spec.data, seed=spec.seed), 4)
    assert list(told["sources"].values()) == [6, 2] and told["samples"] == [32, 39]
    assert len(told["odd"]) == 3
    for row in told["odd"][:2]:
        assert row["source"].endswith("odd") and row["top_token"] == ord("A")
        assert row["top_share"] > 0.8 and row["entropy_bits"] < 1 < told["entropy_bits"] < math.log2(25)
        assert row["z"] < -5


def test_noise_and_repetition_are_outliers(tmp_path: Path) -> None:
    """In stored order: 20 windows of words, then one of every byte once, then one of a single letter."""
    text = ("the cat sat on the mat and the dog " * 60)[: 24 * 20]
    noise = "".join(chr(33 + number) for number in range(24))
    source = tmp_path / "text.txt"
    source.write_text(text + noise + "x" * 40)
    folder = prepare([str(source)], tmp_path / "tokens", val_fraction=0, workers=1).folder
    batches = Batches(data_of(path=str(folder), shuffle=False, micro_batch=1, global_batch=1), seed=0)
    usual, spread = usual_bits(batches, 19)
    assert [describe(batches, cursor)["odd"][0]["z"] for cursor in (20, 21)] == [
        pytest.approx((describe(batches, cursor)["entropy_bits"] - usual) / spread, abs=0.5) for cursor in (20, 21)
    ]
    assert describe(batches, 20)["odd"][0]["z"] > 6 and describe(batches, 21)["odd"][0]["z"] < -6
    assert abs(describe(batches, 12)["odd"][0]["z"]) < 4 and describe(batches, 0)["usual_bits"] == pytest.approx(
        usual, abs=0.3
    )


def test_event_values_equal_manual_computation_and_are_json(mixed: RunFolder) -> None:
    spec = mixed.spec()
    batches = Batches(spec.data, seed=spec.seed)
    found = describe(batches, 4)
    assert json.loads(json.dumps(found)) == {
        **found,
        "odd": [{**row, "documents": [*row["documents"]], "examples": []} for row in found["odd"]],
    }
    rows = rows_at(batches, 4)
    assert found["entropy_bits"] == round(sum(row.entropy_bits for row in rows) / 8, 3)
    for row in rows:
        number = [str(source.folder) for source in batches.sources].index(row.source)
        tokens = list(batches.sources[number].read(row.window * 24, row.window * 24 + 25))
        shares = [tokens.count(token) / 25 for token in set(tokens)]
        assert row.entropy_bits == pytest.approx(-sum(share * math.log2(share) for share in shares), abs=1e-3)
        assert row.top_share == pytest.approx(max(shares), abs=1e-4)


def test_command_sorts_by_deviation(mixed: RunFolder) -> None:
    result = CliRunner().invoke(app, ["data", "window", str(mixed.path), "--cursor", "4", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["cursor"] == 4 and len(found["rows"]) == 8
    assert max(row["entropy_bits"] for row in found["rows"][:2]) < min(row["entropy_bits"] for row in found["rows"][2:])
    assert found["rows"][0]["text"].startswith("AAAA") and found["rows"][0]["repeated"] > 0.5
    shown = CliRunner().invoke(app, ["data", "window", str(mixed.path), "--cursor", "4", "--text", "6"]).stdout
    assert "cursor 4: samples 32 to 39" in shown and "'AAAAAA'" in shown
    assert "2 from " in shown
