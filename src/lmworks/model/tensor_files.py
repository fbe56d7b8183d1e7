"""The safetensors format, where the library does not do it: written a tensor at a time, and where tensors lie.

A file is the length of its header in 8 bytes, the header in JSON, and the tensors' bytes in the header's order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def header(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """Of tensors (name, type, shape) that lie one after the other."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        table[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def write_tensors(path: Path, shapes: Mapping[str, Tensor], values: Iterator[Tensor]) -> None:
    """The next of `values` for each of `shapes`, which tell its type and shape beforehand and may lie on `meta`."""
    with path.open("wb") as file:
        file.write(header((name, shape.dtype, shape.shape) for name, shape in shapes.items()))
        for _ in shapes:
            file.write(raw(next(values)))
        file.flush()
        os.fsync(file.fileno())


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    write_tensors(path, tensors, iter(tensors.values()))


def raw(tensor: Tensor) -> memoryview:
    """Its bytes, where they lie."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Span:
    """Where a tensor lies in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    bytes: int


def spans(path: Path) -> dict[str, Span]:
    """Of a file that `safe_open` has found to be whole; less those of types that no network here has."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        table: dict[str, Any] = json.loads(file.read(size))
    table.pop("__metadata__", None)
    return {
        name: Span(TORCH_DTYPES[one["dtype"]], tuple(one["shape"]), 8 + size + start, end - start)
        for name, one in table.items()
        if one["dtype"] in TORCH_DTYPES
        for start, end in [one["data_offsets"]]
    }
