"""Bytes of an optimizer's states, from the shapes of what a rank updates.

    adamw       two moments of every element, fp32 or bf16, and an fp32 count of steps for each tensor
    sgd         none (plain, without momentum); of bf16 weights the count of steps
    adamw8bit   two moments of one byte, and for each an fp32 scale of every 256 elements (Dettmers et al. 2021);
                tensors of fewer than 4,096 elements keep fp32 moments
    adafactor   of a matrix one fp32 number for each row and each column, of a vector the second moment
                (Shazeer and Stern 2018, as `torch.optim.Adafactor`, without a first moment)
    muon        one fp32 momentum of a matrix (`torch.optim.Muon`); vectors have AdamW's states. Embedding and head are
                usually left to AdamW: add `optimizer_bytes("adamw", …)` of those

The trainer itself has adamw and sgd; the others are priced, for plans of runs that use them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...spec import RunSpec, SpecError
from ...spec.errors import did_you_mean

FP32 = 4
BLOCK_8BIT, MIN_SIZE_8BIT = 256, 4096

# Bytes of states of one weight, for a closed form; below they are counted tensor by tensor.
STATES = {"adamw": 8.0, "adamw-bf16": 4.0, "adamw8bit": 2.0 + 8 / 256, "adafactor": 0.01, "sgd": 0.0, "muon": 4.0}

Shape = tuple[int, ...]


def optimizer_of(spec: RunSpec) -> str:
    """Of a run of our own trainer."""
    narrow = spec.optim.optimizer == "adamw" and spec.precision.states == "bf16"
    return "adamw-bf16" if narrow else spec.optim.optimizer


def optimizer_bytes(kind: str, shapes: Iterable[Shape]) -> int:
    """Of tensors with these shapes; one without elements has no state."""
    if kind not in RULES:
        raise SpecError(f"optimizer {kind!r} is not known{did_you_mean(kind, RULES)}")
    return sum(RULES[kind](shape) for shape in shapes if math.prod(shape))


def adamw(shape: Shape) -> int:
    return FP32 * (2 * math.prod(shape) + 1)


def adamw_bf16(shape: Shape) -> int:
    return 2 * 2 * math.prod(shape) + FP32


def steps_bytes(shapes: Iterable[Shape]) -> int:
    """Of a count for each tensor that has elements."""
    return FP32 * sum(math.prod(shape) > 0 for shape in shapes)


def adamw_8bit(shape: Shape) -> int:
    size = math.prod(shape)
    if size < MIN_SIZE_8BIT:
        return adamw(shape)
    return 2 * (size + FP32 * -(-size // BLOCK_8BIT)) + FP32


def adafactor(shape: Shape) -> int:
    size = math.prod(shape)
    if len(shape) < 2:
        return FP32 * (size + 1)
    return FP32 * (size // shape[-1] + size // shape[-2] + 1)


def muon(shape: Shape) -> int:
    return FP32 * math.prod(shape) if len(shape) >= 2 else adamw(shape)


RULES = {
    "adamw": adamw, "adamw-bf16": adamw_bf16, "sgd": lambda _: 0, "adamw8bit": adamw_8bit, "adafactor": adafactor,
    "muon": muon,
}  # fmt: skip
