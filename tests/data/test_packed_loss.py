"""A packed row trains as its examples do alone: the same loss and gradients."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chat_files import talk, write_lines
from lmworks.data.example_batches import ExampleBatches
from lmworks.model import GPT
from lmworks.spec import ModelSpec
from lmworks.spec.run import DataSpec

SHAPES: dict[str, dict[str, object]] = {
    "dense": {},
    "gpt2": {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True},
    "moe": {"experts": 4, "top_k": 2, "expert_ffn": 32},
}


def loss_and_gradients(model: GPT, batches: ExampleBatches, rows: int) -> tuple[float, list[Tensor]]:
    model.zero_grad()
    total, count = 0.0, 0
    for cursor in range(rows):
        for batch in batches.at(cursor):
            _, loss = model(batch.tokens, batch.targets, documents=batch.documents, reduction="sum")
            loss.backward()
            total, count = total + loss.item(), count + batch.count()
    return total / count, [parameter.grad / count for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_loss_equals_unpacked(tmp_path: Path, shape: str) -> None:
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdef ", k=draw.randint(2, 40))) + "." for _ in range(24)]
    records = [{"messages": talk(*texts[i : i + 2])} for i in range(0, 24, 2)]
    data = DataSpec(
        kind="conversations",
        path=str(write_lines(tmp_path / "a.jsonl", records)),
        tokenizer="bytes",
        seq=256,
        micro_batch=1,
        val_fraction=0.0,
    )
    small = {"preset": "tiny", "layers": 2, "hidden": 32, "heads": 2, "kv_heads": 2, "ffn": 64, "context": 256}
    model = GPT(ModelSpec.from_dict(small | SHAPES[shape]))
    packed = ExampleBatches(data, seed=0, shuffle=False)
    alone = ExampleBatches(data.replace(packing=False), seed=0, shuffle=False)
    assert alone.windows == 12 and packed.windows <= 6
    (one, gradients), (other, expected) = (loss_and_gradients(model, made, made.windows) for made in (packed, alone))
    assert one == pytest.approx(other, abs=1e-6)
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
