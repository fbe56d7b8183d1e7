"""Weights on their way from files to a device: nothing is lost between buffers, and precision is the engine's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmworks.model import GPT, hf
from lmworks.model.upload import Lane, in_lanes
from lmworks.spec import CheckpointError, ModelSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(), (1,), (7, 33), (16, 16)])
def test_a_tensor_arrives_whole_in_pieces(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    lane = Lane(CPU, piece=60)  # neither a power of two nor a divisor of any row
    for seed in range(3):  # buffers are used again
        host = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        there = lane.upload(host)
        assert there.dtype == dtype and there.shape == host.shape and torch.equal(there, host)
        assert there.data_ptr() != host.data_ptr()


def test_a_transposed_tensor_keeps_its_places() -> None:
    host = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(Lane(CPU, piece=20).upload(host), host)


def test_every_item_is_worked_on_and_an_error_is_raised() -> None:
    seen: list[int] = []

    def work(item: int, lane: Lane) -> None:
        if item == 13:
            raise CheckpointError("thirteen")
        seen.append(int(lane.upload(torch.tensor(item))))

    with pytest.raises(CheckpointError, match="thirteen"):
        in_lanes(range(30), work, CPU)
    assert sorted(seen) == [item for item in range(30) if item != 13]


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
    monkeypatch.setattr(hf, "STAGED", ("cpu",))
    staged = hf.load_hf(GPT, tmp_path, dtype=torch.bfloat16)
    wanted: dict[str, Tensor] = dict(model.to(torch.bfloat16).named_parameters())
    for loaded in (plain, staged):
        assert all(torch.equal(value, wanted[name]) for name, value in loaded.named_parameters())
