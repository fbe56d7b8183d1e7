"""Bytes of optimizer states against those that PyTorch's own optimizers make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lmworks.plan.exact.optimizers import optimizer_bytes
from lmworks.spec import SpecError

SHAPES = [(30, 50), (7, 3), (4, 20, 32), (64,), (1,)]
MATRICES = SHAPES[:2]


def made(make: Callable[..., torch.optim.Optimizer], shapes: list[tuple[int, ...]]) -> int:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(parameters)
    optimizer.step()
    states: list[Any] = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return sum(tensor.nbytes for tensor in states if isinstance(tensor, torch.Tensor))


def test_states_are_those_of_pytorch() -> None:
    assert optimizer_bytes("adamw", SHAPES) == made(torch.optim.AdamW, SHAPES)
    assert optimizer_bytes("sgd", SHAPES) == made(torch.optim.SGD, SHAPES) == 0
    assert optimizer_bytes("adafactor", SHAPES) == made(torch.optim.Adafactor, SHAPES)
    assert optimizer_bytes("muon", MATRICES) == made(torch.optim.Muon, MATRICES)
    assert optimizer_bytes("muon", SHAPES[3:]) == made(torch.optim.AdamW, SHAPES[3:])


def test_eight_bits() -> None:
    """A byte for each moment, and 4 for every 256 of them; short ones stay fp32."""
    assert optimizer_bytes("adamw8bit", [(64, 64)]) == 2 * (4096 + 16 * 4) + 4
    assert optimizer_bytes("adamw8bit", [(64, 65)]) == 2 * (4160 + 17 * 4) + 4
    assert optimizer_bytes("adamw8bit", [(64, 63)]) == optimizer_bytes("adamw", [(64, 63)])


def test_what_is_not_there() -> None:
    assert optimizer_bytes("adamw", [(0, 32)]) == 0
    with pytest.raises(SpecError, match="did you mean 'adafactor'"):
        optimizer_bytes("adafacter", SHAPES)
