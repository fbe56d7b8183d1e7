"""What a check says of an answer: the smallest case that fails, what was expected and what came."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SHOWN = 24  # numbers of a tensor


@dataclass
class Mismatch(Exception):
    """An answer that is wrong; raised by a check at its first, so smallest, failing case."""

    case: str
    expected: Any
    got: Any
    inputs: dict[str, Any] = field(default_factory=dict)
    remark: str = ""


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(
            one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True
        )
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and bool(one == other)


def expect_close(
    case: str, got: Any, expected: Tensor, *, rtol: float = 1e-4, atol: float = 1e-6, remark: str = "", **inputs: Any
) -> None:
    if not isinstance(got, Tensor):
        raise Mismatch(case, expected, got, inputs, remark or f"a tensor is expected, this is {kind_of(got)}")
    if got.shape != expected.shape:
        raise Mismatch(
            case,
            expected,
            got,
            inputs,
            remark or f"wrong shape: {tuple(expected.shape)} expected, {tuple(got.shape)} given",
        )
    if got.dtype != expected.dtype:
        raise Mismatch(
            case, expected, got, inputs, remark or f"wrong dtype: {expected.dtype} expected, {got.dtype} given"
        )
    if not torch.allclose(got, expected, rtol=rtol, atol=atol):
        raise Mismatch(case, expected, got, {**inputs, **first_difference(got, expected, rtol, atol)}, remark)


def first_difference(got: Tensor, expected: Tensor, rtol: float, atol: float) -> dict[str, str]:
    """Where the first wrong number stands, if it is not among those that are shown."""
    wrong = ~torch.isclose(got, expected, rtol=rtol, atol=atol)
    at = int(wrong.flatten().nonzero()[0])
    if at < SHOWN:
        return {}
    place = [int(index) for index in torch.unravel_index(torch.tensor(at), got.shape)]
    numbers = f"{expected.flatten()[at]:.4g} expected, {got.flatten()[at]:.4g} given"
    return {"differs": f"first at {place}: {numbers}; {int(wrong.sum())} of {wrong.numel()} numbers are wrong"}


def expect_equal(case: str, got: Any, expected: Any, *, remark: str = "", **inputs: Any) -> None:
    if not alike(got, expected):
        raise Mismatch(case, expected, got, inputs, remark)


def expect_at_most(case: str, got: float, limit: float, *, remark: str = "", **inputs: Any) -> None:
    """A target of a puzzle: bytes, steps, time."""
    if got > limit:
        raise Mismatch(case, f"at most {shown(limit)}", got, inputs, remark)


def kind_of(value: Any) -> str:
    return "None: is a `return` missing?" if value is None else f"a {type(value).__name__}"


def shown(value: Any) -> str:
    """Shape and numbers, short."""
    if isinstance(value, Tensor):
        about = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        flat = value.detach().flatten()
        numbers = ", ".join(f"{number:.4g}" for number in flat[:SHOWN].tolist())
        return f"{about}: [{numbers}{', …' if len(flat) > SHOWN else ''}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if len(text) < 500 else text[:500] + "…"
