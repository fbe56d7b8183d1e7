from __future__ import annotations

import json
import random
import sys
import types
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import stored_texts

from lmworks.data import Reading, prepare, sources
from lmworks.data.sources import documents_of, parts_of, stdlib_files
from lmworks.spec import DataError, SpecError


def texts_of(source: str | Path, reading: Reading = Reading()) -> list[str]:
    parts = parts_of(str(source), reading, Path("nowhere"))
    return [document.text for part in parts for document in documents_of(part, reading) if not document.skipped]


def test_jsonl_lines_are_in_exactly_one_part(tmp_path: Path) -> None:
    """Whatever the cut: parts shorter than a line, cuts on a newline, one part."""
    rng = random.Random(0)
    texts = ["é\n" * rng.randint(0, 40) + str(i) for i in range(50)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}, ensure_ascii=i % 2 == 0) for i, t in enumerate(texts)))
    for part_bytes in [1, 2, 7, 64, 1000, 10**6]:
        assert texts_of(path, Reading(part_bytes=part_bytes)) == texts


def test_long_lines_are_looked_through_by_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "WINDOW_BYTES", 5)
    texts = ["short", "x" * 100, "", "y" * 23]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    for part_bytes in [1, 4, 30, 10**6]:
        assert texts_of(path, Reading(part_bytes=part_bytes)) == texts


def test_jsonl_other_field_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one"}\n\n  \n{"body": "half \\ud83d"}\n')
    assert texts_of(path, Reading(text_field="body")) == ["one", "half ?"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', r"bad\.jsonl line 3: no field 'text'; it has body; choose one with --text-field"),
        ('{"text": 5}', r"bad\.jsonl line 3: field 'text' is not a string"),
        ('{"text": ', r"bad\.jsonl line 3 is not JSON"),
        ("[1]", r"bad\.jsonl line 3 is not a JSON object"),
    ],
)
def test_bad_line_is_reported(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        prepare([str(path)], tmp_path / "out", workers=1, reading=Reading(part_bytes=14))


def test_worker_error_is_same_message(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a"}\n' * 20 + "oops\n")
    with pytest.raises(DataError, match=r"bad\.jsonl line 21 is not JSON"):
        prepare([str(path)], tmp_path / "out", workers=2, reading=Reading(part_bytes=30))


def test_parquet_row_groups_are_parts(tmp_path: Path) -> None:
    texts = [f"row {i} 日本" for i in range(25)]
    pq.write_table(pa.table({"n": list(range(26)), "text": [*texts, None]}), tmp_path / "a.parquet", row_group_size=10)
    assert len(parts_of(str(tmp_path / "a.parquet"), Reading(), tmp_path)) == 3
    assert texts_of(tmp_path / "a.parquet") == [*texts, ""]
    with pytest.raises(DataError, match=r"a\.parquet: no column 'body'; it has n, text; choose one with --text-field"):
        texts_of(tmp_path / "a.parquet", Reading(text_field="body"))
    with pytest.raises(DataError, match="field 'n' is not a string"):
        texts_of(tmp_path / "a.parquet", Reading(text_field="n"))


def test_broken_parquet_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"b\.parquet is not a readable parquet file"):
        texts_of(tmp_path / "b.parquet")


def test_missing_pyarrow_names_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"needs pyarrow: pip install 'lmworks\[data\]'"):
        texts_of(tmp_path / "a.parquet")


def test_text_files_with_and_without_separator(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("one\r\ntwo\n\nthree é".encode())
    assert texts_of(path) == ["one\r\ntwo\n\nthree é"]
    assert texts_of(path, Reading(separator="\n\n")) == ["one\r\ntwo", "three é"]
    path.write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 text"):
        texts_of(path)


def test_folder_reads_text_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name, content in {
        "b.py": b"b",
        "a/z.py": b"z",
        "a/y.md": b"y",
        ".git/config": b"hidden",
        "logo.png": b"\x89PNG\0\xff",
        "latin.txt": b"caf\xe9",
    }.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    assert texts_of(source) == ["y", "z", "b"]
    assert texts_of(source, Reading(glob="**/*.py")) == ["z", "b"]
    done = prepare([str(source)], source / "tokens", workers=1)
    assert sorted(Path(name).name for name in done.unreadable) == ["latin.txt", "logo.png"]
    assert prepare([str(source)], source / "tokens", workers=1).up_to_date  # the result is not its own source
    with pytest.raises(DataError, match=r"no file in .*source matches '\*\.rs'"):
        texts_of(source, Reading(glob="*.rs"))


def test_stdlib_source() -> None:
    files = [Path(file) for file in stdlib_files()]
    names = {file.name for file in files}
    assert {"argparse.py", "ast.py", "dataclasses.py"} <= names
    assert all(file.suffix == ".py" for file in files)
    assert not any({"site-packages", "test", "tests", "__pycache__"} & set(file.parts) for file in files)
    assert len(files) > 300


def test_missing_source_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no source at 'gone\.txt': give a file, a folder, stdlib, or hf:NAME"):
        prepare(["gone.txt"], tmp_path / "out")


def test_blank_documents_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text("  \n")
    with pytest.raises(DataError, match=r"no text in .*blank\.txt"):
        prepare([str(tmp_path / "blank.txt")], tmp_path / "out", workers=1)


class FakeStream:
    """As much of datasets.IterableDataset as is used: records in shards, `shard` takes some of them."""

    def __init__(self, shards: list[list[dict]]) -> None:
        self.shards, self.num_shards = shards, len(shards)

    def shard(self, num_shards: int, index: int) -> FakeStream:
        assert num_shards == self.num_shards
        return FakeStream([self.shards[index]])

    def __iter__(self):
        for shard in self.shards:
            yield from shard


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    calls: list[tuple] = []
    stream = FakeStream([[{"text": f"shard {s} row {r}"} for r in range(10)] for s in range(3)])

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> FakeStream:
        calls.append((name, config, split, streaming))
        if name == "gone":
            raise ConnectionError("no such dataset\non the hub")
        return stream

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    sources.hf_stream.cache_clear()
    yield calls
    sources.hf_stream.cache_clear()


def test_hub_dataset_is_streamed_by_shard(hub: list[tuple], tmp_path: Path) -> None:
    prepare(["hf:owner/web:sample:test"], tmp_path / "one", workers=1, val_fraction=0)
    assert set(hub) == {("owner/web", "sample", "test", True)}
    assert stored_texts(tmp_path / "one", "train") == [f"shard {s} row {r}" for s in range(3) for r in range(10)]
    prepare(["hf:owner/web"], tmp_path / "two", workers=2, val_fraction=0)
    assert hub[-1] == ("owner/web", None, "train", True)
    assert (tmp_path / "two" / "train-00000.bin").read_bytes() == (tmp_path / "one" / "train-00000.bin").read_bytes()


def test_unreachable_hub_is_one_line_error(hub: list[tuple], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^hf:gone cannot be opened: no such dataset on the hub$"):
        prepare(["hf:gone"], tmp_path / "out")
    with pytest.raises(SpecError, match="write hf:NAME"):
        prepare(["hf:a:b:c:d"], tmp_path / "out")


def test_missing_datasets_package_names_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    sources.hf_stream.cache_clear()
    with pytest.raises(DataError, match=r"needs `datasets`: pip install 'lmworks\[data\]'"):
        prepare(["hf:owner/web"], tmp_path / "out")
