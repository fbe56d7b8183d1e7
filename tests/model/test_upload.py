"""Weights on their way from files to a device: nothing is lost between buffers, and precision is the engine's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lmworks.model import GPT, hf
from lmworks.model.tensor_files import DoubleBuffer, save_tensors, spans, upload_in_threads
from lmworks.spec import CheckpointError, ModelSpec

CPU = torch.device("cpu")


def stored(path: Path, tensors: dict[str, Tensor]) -> BinaryIO:
    save_tensors(tensors, path)
    return path.open("rb")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(), (1,), (7, 33), (16, 16)])
def test_a_tensor_arrives_whole_in_pieces(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    """And is the one that was asked for: others lie before and behind it."""
    buffer = DoubleBuffer(CPU, piece=60)  # neither a power of two nor a divisor of any row
    luck = torch.Generator().manual_seed(0)
    hosts = {
        name: torch.randint(-100, 100, shape, generator=luck).to(dtype) for name in "abc"
    }  # buffers are used again
    with stored(tmp_path / "some", hosts) as file:
        for name, span in spans(tmp_path / "some").items():
            there = buffer.fetch(file.fileno(), span)
            assert there.dtype == dtype and there.shape == shape and torch.equal(there, hosts[name])


def test_spans_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(5, dtype=torch.int32), "none": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "some", metadata={"format": "pt"})
    raw = (tmp_path / "some").read_bytes()
    found = spans(tmp_path / "some")
    assert found.keys() == tensors.keys()
    for name, span in found.items():
        assert raw[span.start : span.start + span.bytes] == tensors[name].numpy().tobytes()
        assert span.shape == tensors[name].shape and span.dtype == tensors[name].dtype


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path: Path) -> None:
    with stored(tmp_path / "some", {"a": torch.arange(100.0)}) as file:
        span = spans(tmp_path / "some")["a"]
        os.truncate(tmp_path / "some", span.start + 200)
        with pytest.raises(CheckpointError, match="shorter"):
            DoubleBuffer(CPU, piece=64).fetch(file.fileno(), span)


def test_every_item_is_worked_on_and_an_error_is_raised(tmp_path: Path) -> None:
    seen: list[int] = []

    def work(item: str, buffer: DoubleBuffer) -> None:
        if item == "13":
            raise CheckpointError("thirteen")
        seen.append(int(buffer.fetch(file.fileno(), table[item])))

    with stored(tmp_path / "some", {str(number): torch.tensor(number) for number in range(30)}) as file:
        table = spans(tmp_path / "some")
        with pytest.raises(CheckpointError, match="thirteen"):
            upload_in_threads(table, work, CPU)
    assert sorted(seen) == [item for item in range(30) if item != 13]


def test_a_model_gets_room_without_loading_what_to_empty_loads() -> None:
    """In the engine's precision; and no symbolic mathematics, which takes a GPU's host seconds."""
    code = """
import sys, torch
from lmworks.model import GPT
from lmworks.model.tensor_files import to_empty
from lmworks.spec import ModelSpec
with torch.device("meta"):
    model = GPT(ModelSpec.from_preset("tiny"))
to_empty(model, torch.device("cpu"), torch.bfloat16)
assert all(one.dtype == torch.bfloat16 and one.device.type == "cpu" for one in model.parameters())
print("sympy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("preset", ["gpt2", "llama"])
def test_weights_go_straight_to_the_device_in_the_wanted_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    kind = {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True, "kv_heads": 4}
    spec = ModelSpec.from_preset("tiny", **(kind if preset == "gpt2" else {}))  # GPT-2: transposed, q, k, v in one
    model = GPT(spec, seed=3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_hf(tmp_path)
    plain = hf.load_hf(GPT, tmp_path, dtype=torch.bfloat16)
    monkeypatch.setattr(hf, "STAGED_DEVICES", ("cpu",))
    staged = hf.load_hf(GPT, tmp_path, dtype=torch.bfloat16)
    wanted: dict[str, Tensor] = dict(model.to(torch.bfloat16).named_parameters())
    for loaded in (plain, staged):
        assert all(torch.equal(value, wanted[name]) for name, value in loaded.named_parameters())
