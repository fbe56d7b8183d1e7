"""Frozen weights in 4 and 8 bits: products, gradients, bytes, and the same numbers under every tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.model.quantized_weight import QuantizedWeight, empty_weight, quantized_product, rounded
from lmworks.spec import ModelSpec, RunSpec, SpecError, components
from lmworks.spec.lora import quantized_bytes

MODEL = ModelSpec(layers=1, hidden=64, heads=8, kv_heads=2, ffn=104, vocab=64, context=16)
LINEARS = {f"{linear.name}.weight" for linear in components.linears(MODEL)}
WEIGHTS = [weight for weight in components.block_weights(MODEL) if weight.name in LINEARS]


def draw(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(described: components.Weight, weight: Tensor, base: str) -> QuantizedWeight:
    found = empty_weight(described, weight.shape, base)
    found.store(weight)
    return found


@pytest.mark.parametrize("base", ["int8", "nf4"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_shards_have_the_numbers_of_the_whole(base: str, tp: int) -> None:
    for described in WEIGHTS:
        dim = described.sharded(tp)
        if dim is None:
            continue
        weight = draw(described.shape)
        whole = rounded(described, weight, base)
        for shard, expected in zip(weight.chunk(tp, dim), whole.chunk(tp, dim), strict=True):
            assert torch.equal(stored(described, shard, base).dequantize(), expected), described.name


@pytest.mark.parametrize(("base", "limit"), [("int8", 0.01), ("nf4", 0.1)])
def test_bytes_and_errors(base: str, limit: float) -> None:
    for described in WEIGHTS:
        for tp in (1, 2, 4):
            dim = described.sharded(tp)
            weight = draw(described.shape) if dim is None else draw(described.shape).chunk(tp, dim)[0]
            held = stored(described, weight, base)
            assert sum(part.nbytes for part in held.parameters()) == quantized_bytes(
                described, tuple(weight.shape), base
            )
            assert float((held.dequantize() - weight).norm() / weight.norm()) < limit
    mlp = components.Weight("mlp.up.weight", (14336, 4096), 0)  # Llama 3 8B's
    assert quantized_bytes(mlp, mlp.shape, "nf4") * 8 / mlp.size == pytest.approx(4.127, abs=1e-3)


@pytest.mark.parametrize("base", ["int8", "nf4"])
@pytest.mark.parametrize("rows", [None, slice(8, 24)])
def test_products_and_gradients_are_those_of_the_rounded_weight(base: str, rows: slice | None) -> None:
    weight = stored(WEIGHTS[0], draw(WEIGHTS[0].shape), base)
    plain = weight.dequantize() if rows is None else weight.dequantize()[rows]
    x = draw((3, 5, 64), seed=1).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = quantized_product(x, weight, rows)
    assert not saved  # neither the weight nor its input
    torch.testing.assert_close(y, F.linear(x, plain))
    grad = draw(y.shape, seed=2)
    (found,) = torch.autograd.grad(y, x, grad)
    torch.testing.assert_close(found, grad @ plain)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"parallel": {"strategy": "fsdp2", "dp": 2}}, ""),
        (
            {
                "parallel": {"tp": 4},
                "model": {"ffn": 90 * 4, "hidden": 66 * 4, "head_dim": 2, "heads": 4, "kv_heads": 4},
            },
            "",
        ),
        ({"parallel": {"tp": 16}, "model": {"hidden": 64, "heads": 16, "kv_heads": 16, "ffn": 128}}, "in 8 pieces"),
    ],
)
def test_layouts(table: dict[str, Any], words: str) -> None:
    table = {"lora": {"rank": 2, "base": "nf4"}, **table}
    if not words:
        RunSpec.from_dict(table)
        return
    with pytest.raises(SpecError) as error:
        RunSpec.from_dict(table)
    assert words in str(error.value)
