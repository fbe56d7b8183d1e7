"""Prepared data that change, or are wrong, while a run reads them: one line that names the file, and no signal."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from lmworks.checkpoint.format.folders import MARKER, discard
from lmworks.data import Batches
from lmworks.data.pipeline import prepare
from lmworks.data.tokenizer import convert_panics
from lmworks.model.hf import read_config
from lmworks.spec import CheckpointError, DataError, SpecError
from lmworks.spec.run import DataSpec


@pytest.fixture
def copy(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "data"))


def batches(path: Path) -> Batches:
    return Batches(DataSpec(path=str(path), seq=16, micro_batch=2, verify=False), seed=0)


@pytest.mark.parametrize("workers", [0, 1])
def test_truncated_shard_is_reported_during_training(copy: Path, workers: int) -> None:
    """Not SIGBUS, in a worker as little as here."""
    made = batches(copy)
    shard = sorted(copy.glob("train-*.bin"))[0]
    os.truncate(shard, 10)
    with pytest.raises(DataError, match=f"{shard.name} was truncated while it is in use: 10 bytes of ") as caught:
        for _ in made.stream(0, 50, workers):
            pass
    assert "\n" not in str(caught.value)


def test_token_beyond_vocabulary_is_reported_with_position(copy: Path) -> None:
    made = batches(copy)
    shard = sorted(copy.glob("train-*.bin"))[0]
    tokens = np.memmap(shard, made.sources[0].index.token_dtype, mode="r+")
    tokens[20] = 60_000
    tokens.flush()
    with pytest.raises(DataError, match=rf"{shard.name} at token 20: token id 60,000 is not below .* size of 257"):
        for cursor in range(made.windows):
            made.at(cursor)


def test_stopped_worker_ends_with_stream(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)  # seconds that it is waited for, twice
    stream = batches(copy).stream(0, 50, workers=1)
    next(stream)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    worker = int(children[-1])
    os.kill(worker, signal.SIGSTOP)
    stream.close()  # type: ignore[attr-defined]
    path = Path(f"/proc/{worker}/stat")
    assert not path.exists() or ") Z" in path.read_text() or os.waitpid(worker, 0)


def test_pruning_does_not_follow_symlinks(tmp_path: Path) -> None:
    target, link = tmp_path / "elsewhere", tmp_path / "step-000001"
    target.mkdir()
    (target / MARKER).write_text("committed")
    link.symlink_to(target)
    discard(link)
    assert not link.is_symlink() and (target / MARKER).exists()


def test_tokenizers_panic_is_one_line_error() -> None:
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(DataError, match=r"^x: the tokenizers library fails in it \(Onig: over\)$"), convert_panics("x"):
        raise panic("Onig:\nover")


def test_oversized_or_deeply_nested_config_is_rejected(tmp_path: Path) -> None:
    sizes = '"num_attention_heads":4,"num_hidden_layers":2,"intermediate_size":64,"vocab_size":260'
    text = f'{{"model_type":"llama","architectures":["LlamaForCausalLM"],"hidden_size":1e12,{sizes}}}'
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecError, match=r"model.hidden would be 1,000,000,000,000, more than any model has"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        read_config(tmp_path)


def test_edited_tokenizer_is_detected(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"document {n} says something" for n in range(200)))
    prepare([str(text)], tmp_path / "bpe", tokenizer="bpe:300", workers=1, val_fraction=0)
    batches(tmp_path / "bpe")
    path = tmp_path / "bpe" / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(DataError, match=r"tokenizer\.json is not the tokenizer that the tokens were made with"):
        batches(tmp_path / "bpe")
