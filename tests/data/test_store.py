from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from corpora import stored_documents

from lmworks.data import TokenData, read_index, resolve
from lmworks.spec import DataError, SpecError

Copied = Callable[[], Path]


def flat(folder: Path, split: str) -> list[int]:
    return [token for document in stored_documents(folder, split) for token in [*document, 256]]


def test_read_across_shard_boundaries(prepared: Path) -> None:
    data, whole = TokenData.open(prepared, "train"), flat(prepared, "train")
    assert len(data.shards) > 2
    assert len(data) == len(whole)
    edge = data.shards[0].tokens
    for start, stop in [(0, 5), (edge - 3, edge + 3), (edge, edge + 1), (10, len(whole)), (7, 7), (0, len(whole))]:
        assert data.read(start, stop).tolist() == whole[start:stop]
    assert np.concatenate(list(data.chunks(700))).tolist() == whole


def test_document_starts(prepared: Path) -> None:
    data, whole = TokenData.open(prepared, "train"), flat(prepared, "train")
    starts = [0, *(i + 1 for i, token in enumerate(whole) if token == 256)][:-1]
    assert data.document_starts(0, len(whole)).tolist() == starts
    edge = data.shards[0].tokens
    for a, b in [(0, 1), (1, 2), (starts[3], starts[5]), (starts[3] + 1, starts[5] + 1), (edge - 9, edge + 1)]:
        assert data.document_starts(a, b).tolist() == [s for s in starts if a <= s < b]
    assert data.document_lengths().tolist() == np.diff([*starts, len(whole)]).tolist()
    assert data.documents == len(starts)


def test_pickle_holds_path_not_tokens(prepared: Path) -> None:
    data = TokenData.open(prepared, "train")
    raw = pickle.dumps(data)
    assert len(raw) < 3000 + 500 * len(data.shards)
    assert pickle.loads(raw).read(5, 50).tolist() == data.read(5, 50).tolist()


def flip_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 16
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0\0")


@pytest.mark.parametrize("name", ["train-00001.bin", "train-00001.idx"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "is missing"),
        (truncate, r"is truncated: [\d,]+ bytes, the index says"),
        (lengthen, r"is too long: [\d,]+ bytes, the index says"),
        (flip_bit, "is damaged: its SHA-256"),
    ],
)
def test_damage_is_detected_and_reported(copied: Copied, name: str, damage: Callable, message: str) -> None:
    folder = copied()
    damage(folder / name)
    with pytest.raises(DataError, match=f"{name} {message}") as caught:
        TokenData.open(folder, "train", verify=True)
    assert "\n" not in str(caught.value)
    TokenData.open(folder, "val", verify=True)  # the other split is none the worse


def test_only_verify_reads_all_bytes(copied: Copied) -> None:
    folder = copied()
    flip_bit(folder / "train-00000.bin")
    TokenData.open(folder, "train", verify=False)


def test_ranks_share_verification(copied: Copied) -> None:
    folder = copied()
    flip_bit(folder / "train-00001.bin")
    data, found = TokenData.open(folder, "train", verify=False), []
    for rank in range(3):
        try:
            data.verify(rank, 3)
        except DataError:
            found.append(rank)
    assert found == [1]


def test_folder_without_index_is_incomplete(copied: Copied, tmp_path: Path) -> None:
    folder = copied()
    (folder / "index.json").unlink()
    with pytest.raises(DataError, match=r"index\.json is missing: preparing was not finished; run the same"):
        resolve(str(folder))
    with pytest.raises(DataError, match=r"no prepared data at .*gone; make it with: lmworks data prepare"):
        resolve(str(tmp_path / "gone"))
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file is a file, not a folder"):
        resolve(str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[: len(raw) // 2], "is damaged"),
        (lambda raw: "[]", "version None"),
        (lambda raw: json.dumps({**json.loads(raw), "version": 99}), "version 99, this lmworks reads version 1"),
        (lambda raw: json.dumps({"version": 1}), "is damaged"),
        (lambda raw: json.dumps({**json.loads(raw), "splits": {"train": [{"nam": 1}]}}), "is damaged"),
        (lambda raw: "\udcff", "is damaged"),
        (
            lambda raw: raw.replace('"train-00000"', '"../train-00000"'),
            r"names a shard '\.\./train-00000': it is",
        ),
        (lambda raw: raw.replace('"train-00000"', '"/data/train-00000"'), "names a shard '/data/train-00000'"),
    ],
)
def test_damaged_index_is_reported(copied: Copied, change: Callable[[str], str], message: str) -> None:
    path = copied() / "index.json"
    path.write_bytes(change(path.read_text()).encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=rf"index\.json.*{message}|index\.json has {message}"):
        read_index(path.parent)


def test_embedded_corpus_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path) -> None:
    import lmworks.data.sources as sources

    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "stdlib_files", lambda: [str(path) for path in sorted(corpus.rglob("*.py"))])
    stages: list[str] = []
    folder = resolve("stdlib:bpe:300", lambda stage, done, total: stages.append(stage))
    assert folder.is_relative_to(tmp_path / "cache")
    assert read_index(folder).tokenizer == "bpe:300"
    assert read_index(folder).sources == ("stdlib",)
    assert "train tokenizer" in stages
    stages.clear()
    assert resolve("stdlib:bpe:300", lambda stage, done, total: stages.append(stage)) == folder
    assert not stages
    assert resolve("stdlib:bytes") != folder


def test_cache_path_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.spec.files import cache_root

    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("LMWORKS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == Path("/home/someone/.cache/lmworks")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_root() == Path("/x/lmworks")
    monkeypatch.setenv("LMWORKS_CACHE", "/own")
    assert cache_root() == Path("/own")


@pytest.mark.parametrize("path", ["stdlib", "stdlib:", "stdlib:word", "stdlib:bpe:9"])
def test_unknown_embedded_corpus_is_rejected(path: str) -> None:
    with pytest.raises(SpecError, match="bpe:N"):
        resolve(path)
