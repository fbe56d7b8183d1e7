"""Weights on their way into memory before anyone asks for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lmworks import weight_prefetch


def test_every_byte_of_the_weights_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[Path, int]] = []
    monkeypatch.setattr(weight_prefetch, "PIECE", 10)
    monkeypatch.setattr(weight_prefetch, "read_pieces", lambda pieces: read.extend(pieces))
    for name, size in (("a.safetensors", 25), ("b.safetensors", 10), ("consolidated.safetensors", 99)):
        (tmp_path / name).write_bytes(b"x" * size)
    index = {"weight_map": {"embed": "a.safetensors", "head": "b.safetensors", "norm": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for thread in weight_prefetch.prefetch_weights(tmp_path):
        thread.join()
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert sorted(read) == [(a, 0), (a, 10), (a, 20), (b, 0)]


def test_a_file_that_is_gone_is_left_to_who_needs_it(tmp_path: Path) -> None:
    weight_prefetch.read_pieces([(tmp_path / "gone.safetensors", 0)])


def test_what_does_not_fit_into_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    monkeypatch.setattr(weight_prefetch, "available_bytes", lambda: 2 * weight_prefetch.PIECE)
    assert weight_prefetch.prefetch_weights(tmp_path)
    monkeypatch.setattr(weight_prefetch, "available_bytes", lambda: 2 * weight_prefetch.PIECE - 1)
    assert not weight_prefetch.prefetch_weights(tmp_path)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_left_to_who_needs_it(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert not weight_prefetch.prefetch_weights(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "{outside}", "sub/../../outside.safetensors"])
def test_a_file_of_another_folder_is_not_read(tmp_path: Path, name: str) -> None:
    folder, outside = tmp_path / "folder" / "sub", tmp_path / "folder" / "outside.safetensors"
    folder.mkdir(parents=True)
    outside.write_bytes(b"x" * 100)
    index = {"weight_map": {"embed": name.format(outside=outside)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_prefetch.weight_files(folder) == []


def test_a_preset_has_nothing_to_read() -> None:
    assert not weight_prefetch.prefetch_weights("llama3-8b")


def test_it_is_there_before_torch_is() -> None:
    code = "import sys, lmworks.weight_prefetch, lmworks.cli.generate, lmworks.cli.serve; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
