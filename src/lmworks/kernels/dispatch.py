"""Which implementation of an op runs: the one that was fastest on this device when it was measured.

`lmworks bench kernels --record` times every implementation at the shapes of named models and writes the winners to
`measured.toml`, one table per device:

    ["NVIDIA H200".measured]             # a pattern: "NVIDIA H100*" stands for all of that family
    rms_norm = "2026-11-20, torch 2.11.0, triton 3.6.0"

    ["NVIDIA H200".rms_norm]
    "hidden=4096 tokens=16384" = "triton"

A shape that was not measured uses the winner of the nearest one that was. Devices and ops without measurements use
PyTorch.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from ..spec import LMWorksError, SpecError
from ..spec.errors import did_you_mean

MEASURED = Path(__file__).with_name("measured.toml")
TORCH = "torch"  # every op has this implementation

Shape = tuple[tuple[str, int], ...]  # names and sizes, by name


def fastest(op: str, device: torch.device, **shape: int) -> str:
    """ "torch", "triton" or another implementation of `op`; PyTorch's for empty tensors."""
    if device.type != "cuda" or 0 in shape.values():
        return TORCH
    return nearest(op, device_name(device), tuple(sorted(shape.items())))


# Reads a file and queries the driver: untraceable, and constant. As torch.compiler.assume_constant_result, without
# importing the compiler.
fastest._dynamo_marked_constant = True  # type: ignore[attr-defined]


def pick(op: str, wanted: str | None, known: Collection[str], device: torch.device, **shape: int) -> str:
    """`wanted` if given, else the fastest of the known implementations."""
    if wanted is None:
        found = fastest(op, device, **shape)
        return found if found in known else TORCH
    if wanted not in known:
        raise SpecError(f"{op} has no implementation {wanted!r}{did_you_mean(wanted, known)}")
    return wanted


def pick_unless_compiling(
    op: str, wanted: str | None, known: Collection[str], device: torch.device, **shape: int
) -> str:
    """As `pick`, for an op that a compiler fuses with its neighbours: PyTorch's formula inside torch.compile."""
    if wanted is None and torch.compiler.is_compiling():
        return TORCH
    return pick(op, wanted, known, device, **shape)


@functools.cache
def nearest(op: str, device: str, shape: Shape) -> str:
    """The winner at the nearest measured shape, by the sum of log₂ distances of sizes."""
    points = measured_points(op, device)
    if not points:
        return TORCH
    return min(points, key=lambda point: log2_distance(dict(point[0]), dict(shape)))[1]


def log2_distance(one: Mapping[str, int], other: Mapping[str, int]) -> float:
    return sum(abs(math.log2(one[name] / other[name])) for name in one.keys() & other.keys())


@functools.cache
def measured_points(op: str, device: str) -> tuple[tuple[Shape, str], ...]:
    """(shape, winner) of every measurement of an op on a device of this name."""
    for pattern, ops in table().items():
        if fnmatchcase(device, pattern):
            return tuple((parse_shape(text), winner) for text, winner in ops.get(op, {}).items())
    return ()


@functools.cache
def table() -> dict[str, Any]:
    try:
        return tomllib.loads(MEASURED.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:  # invalid TOML
        raise LMWorksError(f"{MEASURED} is damaged ({error}); write it again: lmworks bench kernels --record") from None


def parse_shape(text: str) -> Shape:
    """ "hidden=4096 tokens=16384" as names and sizes."""
    try:
        pairs = (word.split("=") for word in text.split())
        return tuple(sorted((name, positive(size)) for name, size in pairs))
    except ValueError:
        raise LMWorksError(
            f"{MEASURED}: {text!r} is not a shape such as 'hidden=4096 tokens=16384'; write it again: "
            "lmworks bench kernels --record"
        ) from None


def positive(text: str) -> int:
    if (size := int(text)) < 1:
        raise ValueError(text)
    return size


def shape_text(shape: Mapping[str, int]) -> str:
    """The inverse of `parse_shape`."""
    return " ".join(f"{name}={size}" for name, size in sorted(shape.items()))


@functools.cache
def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
