from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from corpora import SMALL_PARTS, corpus_texts, folder_bytes, make_corpus, make_text, stored_documents, stored_texts

from lmworks.data import Reading, TokenData, load_tokenizer, prepare
from lmworks.spec import DataError, SpecError


def test_documents_are_stored_once_in_order(prepared: Path) -> None:
    texts = corpus_texts()
    train, val = stored_texts(prepared, "train"), stored_texts(prepared, "val")
    assert sorted(train + val) == sorted(texts)
    assert not set(train) & set(val)
    for split in (train, val):
        assert [texts.index(text) for text in split] == sorted(texts.index(text) for text in split)
    assert 3 <= len(val) <= 25  # 0.2 of 60, by hash


def test_index_describes_shards(prepared: Path) -> None:
    index = json.loads((prepared / "index.json").read_text())
    assert (index["version"], index["dtype"], index["tokenizer"], index["eot"]) == (1, "uint16", "bytes", 256)
    assert len(index["splits"]["train"]) > 2
    for split, shards in index["splits"].items():
        documents = stored_documents(prepared, split)
        assert sum(s["documents"] for s in shards) == len(documents)
        assert sum(s["tokens"] for s in shards) == sum(len(d) + 1 for d in documents)
        assert sum(s["text_bytes"] for s in shards) == sum(len(d) for d in documents)
        assert all(s["tokens"] <= 2000 for s in shards)
        at = 0
        for shard in shards:
            lengths = [len(d) + 1 for d in documents[at : at + shard["documents"]]]
            offsets = np.fromfile(prepared / f"{shard['name']}.idx", np.int64)
            assert offsets.tolist() == [0, *np.cumsum(lengths)]
            at += shard["documents"]


def test_result_does_not_depend_on_workers_or_parts(corpus: Path, tmp_path: Path) -> None:
    def made(name: str, workers: int, part_bytes: int) -> dict[str, bytes]:
        prepare([str(corpus)], tmp_path / name, "bpe:300", workers=workers, reading=Reading(part_bytes=part_bytes))
        return folder_bytes(tmp_path / name)

    one = made("one", 1, 600)
    assert set(one) == {".lock", "index.json", "tokenizer.json", "train-00000.bin", "train-00000.idx"} | {
        "val-00000.bin",
        "val-00000.idx",
    }
    assert made("two", 2, 600) == one
    assert made("large", 1, 10**6) == one


def test_second_run_is_a_no_op(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert not prepare([str(corpus)], out, workers=1).up_to_date
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*")}
    again = prepare([str(corpus)], out, workers=1)
    assert again.up_to_date
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*") if path.name != ".lock"} == {
        name: when for name, when in before.items() if name != ".lock"
    }


def test_changed_source_or_tokenizer_is_detected(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    make_corpus(source, documents=20)
    prepare([str(source)], out, workers=1)
    (source / "d00" / "0003.py").write_text("changed = True\n")
    assert not prepare([str(source)], out, workers=1).up_to_date
    assert "changed = True\n" in stored_texts(out, "train") + stored_texts(out, "val")
    (source / "new.py").write_text("new = True\n")
    assert not prepare([str(source)], out, workers=1).up_to_date
    assert not prepare([str(source)], out, "bpe:270", workers=1).up_to_date
    assert load_tokenizer(out).vocab_size == 270
    assert not prepare([str(source)], out, workers=1).up_to_date
    assert not (out / "tokenizer.json").exists()


def test_damaged_folder_is_rebuilt(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([str(corpus)], out, workers=1)
    good = folder_bytes(out)
    raw = bytearray(good["train-00000.bin"])
    raw[100] ^= 1
    (out / "train-00000.bin").write_bytes(raw)
    assert not prepare([str(corpus)], out, workers=1).up_to_date
    assert folder_bytes(out) == good


@pytest.mark.parametrize("failure", ["one document", "no text", "tokenizer", "full disk", "interrupted"])
def test_failed_prepare_keeps_old_dataset(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    import lmworks.data.assemble as assemble

    out, other = tmp_path / "out", tmp_path / "other.txt"
    prepare([str(corpus)], out, "bpe:300", workers=1)
    good = folder_bytes(out)
    other.write_text("" if failure == "no text" else "all there is")
    tokenizer, val_fraction = "bytes", 0.05 if failure == "one document" else 0.0
    if failure == "tokenizer":
        (tmp_path / "broken.json").write_text("{}")
        tokenizer = str(tmp_path / "broken.json")

    def fails(self: object, raw: bytes) -> None:
        raise KeyboardInterrupt if failure == "interrupted" else OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        if failure in ("full disk", "interrupted"):
            patched.setattr(assemble.ShardWriter, "write", fails)
        with pytest.raises((DataError, SpecError, KeyboardInterrupt)):
            prepare([str(other)], out, tokenizer, val_fraction=val_fraction, workers=1)
    assert folder_bytes(out) == good
    assert prepare([str(corpus)], out, "bpe:300", workers=1).up_to_date


@pytest.mark.parametrize("renames", range(6))
def test_interrupted_swap_is_recovered(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """After any number of its renames the folder is not finished, and the same request finishes it."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    prepare([str(corpus)], out, "bpe:300", workers=1, shard_tokens=500)  # more shards than its successor
    prepare([str(corpus)], whole, "bpe:280", workers=1)
    replace, left = Path.replace, [renames]

    def stopping(self: Path, target: Path) -> Path:
        if Path(target).parent == out:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", stopping)
        with pytest.raises(KeyboardInterrupt):
            prepare([str(corpus)], out, "bpe:280", workers=1)
    with pytest.raises(DataError, match=r"index\.json is missing: preparing was not finished"):
        TokenData.open(out, "train")
    assert not prepare([str(corpus)], out, "bpe:280", workers=1).up_to_date
    assert folder_bytes(out) == folder_bytes(whole)
    assert not (out / ".work").exists()


def test_tokenizer_of_old_dataset_can_be_reused(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([str(corpus)], out, "bpe:300", workers=1)
    given = (out / "tokenizer.json").read_bytes()
    prepare([str(corpus)], out, str(out / "tokenizer.json"), val_fraction=0.3, workers=1)
    assert (out / "tokenizer.json").read_bytes() == given
    TokenData.open(out, "val", verify=True)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
@pytest.mark.parametrize("content", ["", " \n"])
def test_empty_file_is_reported(tmp_path: Path, content: str, tokenizer: str) -> None:
    (tmp_path / "afile").write_text(content)
    with pytest.raises(DataError, match=r"no text in .*afile: empty, or nothing but white space$"):
        prepare([str(tmp_path / "afile")], tmp_path / "out", tokenizer, workers=1)


KILLED = """
import multiprocessing, os, signal, sys
from lmworks.data import Reading, prepare
source, out, stage, count, workers = sys.argv[1:]
def progress(name, done, total):
    if name == stage and done == int(count):
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
prepare([source], out, "bpe:300", workers=int(workers), reading=Reading(part_bytes=600), progress=progress)
"""


@pytest.mark.parametrize(("stage", "count", "workers"), [("tokenize", 4, 2), ("write shards", 5, 1)])
def test_killed_prepare_resumes_to_same_result(
    corpus: Path, tmp_path: Path, stage: str, count: int, workers: int
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(corpus), str(out), stage, str(count), str(workers)]
    # Workers that outlive their parent would hold its output open: the time limit turns that into a failure.
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert_gone([int(pid) for pid in run.stdout.split()], expected=workers if workers > 1 else 0)
    with pytest.raises(DataError, match=r"index\.json is missing: preparing was not finished"):
        TokenData.open(out, "train")

    finished = {path.name: path.stat().st_mtime_ns for path in out.glob(".work/*/part-*.npz")}
    assert len(finished) >= count
    tokenized: list[int] = []
    resumed = prepare(
        [str(corpus)],
        out,
        "bpe:300",
        workers=1,
        reading=SMALL_PARTS,
        progress=lambda name, done, total: tokenized.append(done) if name == "tokenize" else None,
    )
    assert not resumed.up_to_date
    assert tokenized[0] == len(finished)  # what was finished was not done again
    whole = tmp_path / "whole"
    prepare([str(corpus)], whole, "bpe:300", workers=1, reading=SMALL_PARTS)
    assert folder_bytes(out) == folder_bytes(whole)
    assert not (out / ".work").exists()


def assert_gone(pids: list[int], expected: int) -> None:
    """Workers end with a parent that had no chance to tell them."""
    assert len(pids) == expected

    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, pids))


def test_duplicates_are_dropped_across_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    texts = make_corpus(first, documents=12)
    make_corpus(second, documents=12)
    (second / "a.py").write_text("more = 1\n")
    (second / "empty.py").write_text(" \n")
    sources = [str(first), str(second)]
    done = prepare(sources, tmp_path / "out", val_fraction=0, workers=1, reading=SMALL_PARTS)
    assert stored_texts(tmp_path / "out", "train") == [*texts, "more = 1\n"]  # the first of each is the one kept
    assert done.index.dropped == {"duplicate": 12, "empty": 1, "unreadable": 0}


def test_added_documents_keep_splits(tmp_path: Path) -> None:
    make_corpus(tmp_path / "few", documents=40)
    make_corpus(tmp_path / "many", documents=60)
    for name in ("few", "many"):
        prepare([str(tmp_path / name)], tmp_path / f"{name}-out", val_fraction=0.3, workers=1)
    few, many = (set(stored_texts(tmp_path / f"{name}-out", "val")) for name in ("few", "many"))
    assert few <= many
    assert not few & set(stored_texts(tmp_path / "many-out", "train"))


def test_two_documents_give_one_held_out(tmp_path: Path) -> None:
    make_corpus(tmp_path / "source", documents=2)
    index = prepare([str(tmp_path / "source")], tmp_path / "out", val_fraction=0.001, workers=1).index
    assert (index.documents("train"), index.documents("val")) == (1, 1)


def test_single_document_is_not_split(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("all there is")
    with pytest.raises(DataError, match=r"one\.txt: only one document.*--separator.*--val-fraction 0"):
        prepare([str(tmp_path / "one.txt")], tmp_path / "out", workers=1)
    index = prepare([str(tmp_path / "one.txt")], tmp_path / "out", val_fraction=0, workers=1).index
    assert list(index.splits) == ["train"]
    with pytest.raises(DataError, match="has no split 'val', only train"):
        TokenData.open(tmp_path / "out", "val")


def test_bpe_is_trained_on_train_split_only(tmp_path: Path) -> None:
    """It is the tokenizer that one gets when the held-out documents are not there at all."""
    source = tmp_path / "source"
    make_corpus(source, documents=30)
    prepare([str(source)], tmp_path / "first", val_fraction=0.3, workers=1)
    held = stored_texts(tmp_path / "first", "val")
    tokenizer_of = {}
    for name, val_fraction in (("with", 0.0), ("without", 0.3)):
        prepare([str(source)], tmp_path / name, "bpe:400", val_fraction=val_fraction, workers=1)
        tokenizer_of[name] = (tmp_path / name / "tokenizer.json").read_text()
    for path in source.rglob("*.py"):
        if path.read_text(encoding="utf-8") in held:
            path.unlink()
    prepare([str(source)], tmp_path / "train-only", "bpe:400", val_fraction=0, workers=1)
    assert (tmp_path / "train-only" / "tokenizer.json").read_text() == tokenizer_of["without"]
    assert tokenizer_of["with"] != tokenizer_of["without"]


def test_given_tokenizer_is_copied(corpus: Path, tmp_path: Path) -> None:
    prepare([str(corpus)], tmp_path / "first", "bpe:300", workers=1)
    given = tmp_path / "first" / "tokenizer.json"
    prepare([str(corpus)], tmp_path / "second", str(given), workers=1)
    first, second = folder_bytes(tmp_path / "first"), folder_bytes(tmp_path / "second")
    assert first.pop("index.json") != second.pop("index.json")
    assert first == second


def test_large_vocabulary_uses_uint32(tmp_path: Path) -> None:
    import tokenizers

    vocab = {chr(0x4E00 + i % 20000) + chr(97 + i // 20000): i for i in range(70_000)} | {"a": 70_000, "b": 70_001}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    inner.add_special_tokens(["</s>"])
    inner.save(str(tmp_path / "t.json"))
    (tmp_path / "t.txt").write_text("abba")
    index = prepare(
        [str(tmp_path / "t.txt")], tmp_path / "out", str(tmp_path / "t.json"), val_fraction=0, workers=1
    ).index
    assert index.dtype == "uint32"
    data = TokenData.open(tmp_path / "out", "train")
    assert data.read(0, len(data)).tolist() == [70_000, 70_001, 70_001, 70_000, 70_002]


def test_concurrent_prepares_make_one_folder(corpus: Path, tmp_path: Path) -> None:
    script = "import sys; from lmworks.data import prepare; print(prepare([sys.argv[1]], sys.argv[2]).up_to_date)"
    command = [sys.executable, "-c", script, str(corpus), str(tmp_path / "out")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(run.communicate()[0].strip() for run in runs) == ["False", "True"]
    TokenData.open(tmp_path / "out", "train", verify=True)


def test_foreign_folder_is_not_overwritten(corpus: Path, tmp_path: Path) -> None:
    mine = tmp_path / "model" / "tokenizer.json"
    mine.parent.mkdir()
    mine.write_text("precious")
    with pytest.raises(DataError, match="is not empty and was not made by"):
        prepare([str(corpus)], mine.parent, workers=1)
    assert mine.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder_is_reported(corpus: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DataError, match="Permission denied"):
        prepare([str(corpus)], tmp_path / "out", workers=1)


def test_full_disk_is_one_line_error_and_keeps_parts(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lmworks.data.assemble as assemble

    def full(self: object, raw: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(assemble.ShardWriter, "write", full)
        with pytest.raises(DataError, match=r"out: No space left on device; run again to continue"):
            prepare([str(corpus)], tmp_path / "out", workers=1, reading=SMALL_PARTS)
    assert list((tmp_path / "out").glob(".work/*/part-*.npz"))
    prepare([str(corpus)], tmp_path / "out", workers=1, reading=SMALL_PARTS)
    TokenData.open(tmp_path / "out", "train", verify=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 1.0}, "--val-fraction 1 is out of range"),
        ({"val_fraction": -0.1}, "--val-fraction -0.1 is out of range"),
        ({"workers": -1}, "--workers -1 is out of range"),
        ({"tokenizer": "bpe:10"}, "at least 257"),
        ({"tokenizer": "nope"}, "tokenizer 'nope' is not bytes, bpe:N"),
        ({"sources": []}, "no source"),
    ],
)
def test_invalid_request_writes_nothing(corpus: Path, tmp_path: Path, options: dict, message: str) -> None:
    arguments = {"sources": [str(corpus)], "out": tmp_path / "out", "tokenizer": "bytes", **options}
    with pytest.raises(SpecError, match=message):
        prepare(**arguments)
    assert not (tmp_path / "out").exists()


def test_long_documents_get_own_shard(tmp_path: Path) -> None:
    for number, words in enumerate([5, 400, 5, 5]):
        (tmp_path / "s").mkdir(exist_ok=True)
        (tmp_path / "s" / f"{number}.txt").write_text(make_text(number, words), encoding="utf-8")
    done = prepare([str(tmp_path / "s")], tmp_path / "out", val_fraction=0, workers=1, shard_tokens=300)
    assert [shard.documents for shard in done.index.splits["train"]] == [1, 1, 2]
