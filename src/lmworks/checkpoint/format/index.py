"""`index.json`: which piece of which tensor lies where in a checkpoint's files.

    {"tensors": {name: {path, dtype, shape, pieces: [[file, first byte, offsets in the whole, sizes], …]}}}

What is read by it goes straight into the memory of tensors. So it is taken only where every piece lies inside its file
and its tensor, no byte of a file is used twice, and the pieces of each tensor give every element of it exactly once:
an element that no piece gives would be whatever was in memory before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from .manifest import INDEX, Manifest, check_file, content_of, read_manifest
from .validation import expect, is_whole, json_object, malformed, shown

# Bytes of an element, by the names of safetensors.
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U8": 1, "BOOL": 1,
}  # fmt: skip
LENGTH_FIELD = 8  # bytes at the head of a safetensors file, before its header
# FSDP1's wrapper was once left in the names of buffers (`blocks.0._fsdp_wrapped_module.mlp.choice_bias`).
WRAPPER = "_fsdp_wrapped_module."


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, as it lies in a file."""

    file: str
    start: int  # its first byte there
    offsets: tuple[int, ...]  # where in the whole tensor it begins
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    def meets(self, other: Piece) -> bool:
        """Whether they have an element in common."""
        spans = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(a < b + m and b < a + n for a, n, b, m in spans)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor, whole, as it was saved."""

    path: tuple[str, ...]  # in the state: section, then keys
    dtype: str  # as safetensors calls it: F32, BF16 …
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Index = dict[str, SavedTensor]  # by name, which is the path joined with dots


def verify(folder: Path) -> Manifest:
    """Read every byte of a checkpoint and return its manifest, or raise with the file that is wrong, and its rank."""
    manifest = read_manifest(folder)
    for name in manifest.files:
        check_file(folder / name, manifest)
    read_index(folder, manifest)
    return manifest


def read_index(folder: Path, manifest: Manifest) -> Index:
    """Verified against the manifest, and found to make sense."""
    return parsed_index(content_of(folder / INDEX, manifest), manifest, folder / INDEX)


def parsed_index(text: bytes, manifest: Manifest, path: Path) -> Index:
    tables = json_object(text, path).get("tensors")
    if not isinstance(tables, dict):
        malformed(path, f"tensors = {shown(tables)} is not an object")
    index: Index = {}
    for name, table in tables.items():
        plain = name.replace(WRAPPER, "")
        expect(plain not in index, path, f"{plain} is there twice")
        index[plain] = tensor_of(name, table, manifest, path)
    check_paths(index, path)
    check_bytes(index, path)
    return index


def tensor_of(name: str, table: Any, manifest: Manifest, path: Path) -> SavedTensor:
    if not isinstance(table, dict):
        malformed(path, f"{name} is {shown(table)} instead of an object")
    values: list[Any] = [table.get(key) for key in ("path", "dtype", "shape", "pieces")]
    keys, dtype, shape, pieces = values
    if not isinstance(keys, list) or len(keys) < 2 or not all(isinstance(key, str) for key in keys):
        malformed(path, f"{name} has path = {shown(keys)} instead of a section and a name")
    expect(".".join(keys) == name, path, f"{name} has the path of another tensor, {shown(keys)}")
    expect(isinstance(dtype, str) and dtype in ITEM_BYTES, path, f"{name} has dtype = {shown(dtype)}, which is no type")
    expect(is_shape(shape), path, f"{name} has shape = {shown(shape)}, which is no shape")
    expect(isinstance(pieces, list), path, f"{name} has pieces = {shown(pieces)} instead of a list")
    found = tuple(piece_of(name, piece, shape, dtype, manifest, path) for piece in pieces)
    check_coverage(name, shape, found, path)
    return SavedTensor(tuple(key.replace(WRAPPER, "") for key in keys), dtype, tuple(shape), found)


def piece_of(name: str, piece: Any, shape: list[int], dtype: str, manifest: Manifest, path: Path) -> Piece:
    if not isinstance(piece, list) or len(piece) != 4:
        malformed(path, f"a piece of {name} is {shown(piece)} instead of [file, first byte, offsets, sizes]")
    file, start, offsets, sizes = piece
    known = isinstance(file, str) and file in manifest.files and file != INDEX
    expect(known, path, f"a piece of {name} is in {shown(file)}, which is no file of this checkpoint")
    fitting = is_shape(offsets) and is_shape(sizes) and len(offsets) == len(sizes) == len(shape)
    fitting = fitting and all(first + size <= whole for first, size, whole in zip(offsets, sizes, shape, strict=True))
    where = f"offsets {shown(offsets)} and sizes {shown(sizes)}"
    expect(fitting, path, f"a piece of {name} has {where}, which is no part of {shown(shape)}")
    found = Piece(file, start, tuple(offsets), tuple(sizes))
    size = manifest.files[file]["bytes"]
    inside = is_whole(start, LENGTH_FIELD) and start + found.elements * ITEM_BYTES[dtype] <= size
    expect(inside, path, f"a piece of {name} at byte {shown(start)} is not inside {file}, which has {size} bytes")
    return found


def is_shape(value: object) -> bool:
    return isinstance(value, list) and all(is_whole(size) for size in value)


def check_coverage(name: str, shape: Sequence[int], pieces: Sequence[Piece], path: Path) -> None:
    """Every element is in exactly one piece: they do not meet, and together they have as many as there are."""
    boxes = [piece for piece in pieces if piece.elements]
    given, wanted = sum(box.elements for box in boxes), math.prod(shape)
    expect(given == wanted, path, f"the pieces of {name} have {given} elements, but {wanted} belong there")
    if len(boxes) < 2:
        return
    # In the order of one dimension only those that are still open there can meet the next one.
    axis = max(range(len(shape)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    still: list[Piece] = []
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        still = [other for other in still if other.offsets[axis] + other.sizes[axis] > box.offsets[axis]]
        expect(not any(box.meets(other) for other in still), path, f"pieces of {name} overlap at {list(box.offsets)}")
        still.append(box)


def check_paths(index: Index, path: Path) -> None:
    """No tensor stands where the table of another one is."""
    every = {tensor.path for tensor in index.values()}
    for keys in every:
        for count in range(2, len(keys)):
            expect(keys[:count] not in every, path, f"{'.'.join(keys)} is inside another tensor")


def check_bytes(index: Index, path: Path) -> None:
    """No byte of a file belongs to two pieces."""
    spans = sorted(
        (piece.file, piece.start, piece.start + piece.elements * ITEM_BYTES[tensor.dtype], name)
        for name, tensor in index.items()
        for piece in tensor.pieces
        if piece.elements
    )
    for (file, _, end, one), (other_file, start, _, other) in pairwise(spans):
        clash = f"{one} and {other} lie over one another in {file} at byte {start}"
        expect(file != other_file or end <= start, path, clash)
