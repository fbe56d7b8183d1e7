"""`index.json`: the location of each piece of each tensor in the files of a checkpoint.

    {"tensors": {name: {path, dtype, shape, pieces: [[file, first byte, offsets in the whole, sizes], …]}}}

Data are read directly into the memory of tensors. So the index is valid only if every piece is inside its file and its
tensor, no byte of a file is used twice, and the pieces of each tensor cover every element exactly once: an uncovered
element would keep what was in memory before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from .manifest import (
    INDEX,
    Manifest,
    check_file,
    expect,
    is_int,
    json_object,
    malformed,
    read_manifest,
    read_verified,
    short_repr,
)

# Bytes of an element, by the names of safetensors.
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U8": 1, "BOOL": 1,
}  # fmt: skip
LENGTH_FIELD = 8  # bytes at the head of a safetensors file, before its header
# Old checkpoints have FSDP1's wrapper in the names of buffers (`blocks.0._fsdp_wrapped_module.mlp.choice_bias`).
WRAPPER = "_fsdp_wrapped_module."


@dataclass(frozen=True)
class Piece:
    """A slice of a tensor in a file."""

    file: str
    start: int  # first byte in the file
    offsets: tuple[int, ...]  # in the whole tensor
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    def overlaps(self, other: Piece) -> bool:
        """Whether they share an element."""
        spans = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(a < b + m and b < a + n for a, n, b, m in spans)


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor as it was saved."""

    path: tuple[str, ...]  # in the state: section, then keys
    dtype: str  # as safetensors calls it: F32, BF16 …
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Index = dict[str, SavedTensor]  # by name, which is the path joined with dots


def verify(folder: Path) -> Manifest:
    """Read every byte of a checkpoint and return its manifest; an error names the damaged file and its rank."""
    manifest = read_manifest(folder)
    for name in manifest.files:
        check_file(folder / name, manifest)
    read_index(folder, manifest)
    return manifest


def read_index(folder: Path, manifest: Manifest) -> Index:
    """Verified against the manifest, and validated."""
    return parse_index(read_verified(folder / INDEX, manifest), manifest, folder / INDEX)


def parse_index(text: bytes, manifest: Manifest, path: Path) -> Index:
    tables = json_object(text, path).get("tensors")
    if not isinstance(tables, dict):
        malformed(path, f"tensors = {short_repr(tables)} is not an object")
    index: Index = {}
    for name, table in tables.items():
        plain = name.replace(WRAPPER, "")
        expect(plain not in index, path, f"{plain} is there twice")
        index[plain] = parse_tensor(name, table, manifest, path)
    check_paths(index, path)
    check_bytes(index, path)
    return index


def parse_tensor(name: str, table: Any, manifest: Manifest, path: Path) -> SavedTensor:
    if not isinstance(table, dict):
        malformed(path, f"{name} is {short_repr(table)} instead of an object")
    values: list[Any] = [table.get(key) for key in ("path", "dtype", "shape", "pieces")]
    keys, dtype, shape, pieces = values
    if not isinstance(keys, list) or len(keys) < 2 or not all(isinstance(key, str) for key in keys):
        malformed(path, f"{name} has path = {short_repr(keys)} instead of a section and a name")
    expect(".".join(keys) == name, path, f"{name} has the path of another tensor, {short_repr(keys)}")
    expect(
        isinstance(dtype, str) and dtype in ITEM_BYTES,
        path,
        f"{name} has dtype = {short_repr(dtype)}, which is no type",
    )
    expect(is_shape(shape), path, f"{name} has shape = {short_repr(shape)}, which is no shape")
    expect(isinstance(pieces, list), path, f"{name} has pieces = {short_repr(pieces)} instead of a list")
    found = tuple(parse_piece(name, piece, shape, dtype, manifest, path) for piece in pieces)
    check_coverage(name, shape, found, path)
    return SavedTensor(tuple(key.replace(WRAPPER, "") for key in keys), dtype, tuple(shape), found)


def parse_piece(name: str, piece: Any, shape: list[int], dtype: str, manifest: Manifest, path: Path) -> Piece:
    if not isinstance(piece, list) or len(piece) != 4:
        malformed(path, f"a piece of {name} is {short_repr(piece)} instead of [file, first byte, offsets, sizes]")
    file, start, offsets, sizes = piece
    known = isinstance(file, str) and file in manifest.files and file != INDEX
    expect(known, path, f"a piece of {name} is in {short_repr(file)}, which is no file of this checkpoint")
    fitting = is_shape(offsets) and is_shape(sizes) and len(offsets) == len(sizes) == len(shape)
    fitting = fitting and all(first + size <= whole for first, size, whole in zip(offsets, sizes, shape, strict=True))
    where = f"offsets {short_repr(offsets)} and sizes {short_repr(sizes)}"
    expect(fitting, path, f"a piece of {name} has {where}, which is no part of {short_repr(shape)}")
    found = Piece(file, start, tuple(offsets), tuple(sizes))
    size = manifest.files[file]["bytes"]
    inside = is_int(start, LENGTH_FIELD) and start + found.elements * ITEM_BYTES[dtype] <= size
    expect(inside, path, f"a piece of {name} at byte {short_repr(start)} is not inside {file}, which has {size} bytes")
    return found


def is_shape(value: object) -> bool:
    return isinstance(value, list) and all(is_int(size) for size in value)


def check_coverage(name: str, shape: Sequence[int], pieces: Sequence[Piece], path: Path) -> None:
    """Every element is in exactly one piece: no overlaps, and the right total."""
    boxes = [piece for piece in pieces if piece.elements]
    given, wanted = sum(box.elements for box in boxes), math.prod(shape)
    expect(given == wanted, path, f"the pieces of {name} have {given} elements, but {wanted} belong there")
    if len(boxes) < 2:
        return
    # Sweep along one dimension: only pieces that reach the next one can overlap it.
    axis = max(range(len(shape)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    open_pieces: list[Piece] = []
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        open_pieces = [other for other in open_pieces if other.offsets[axis] + other.sizes[axis] > box.offsets[axis]]
        expect(
            not any(box.overlaps(other) for other in open_pieces),
            path,
            f"pieces of {name} overlap at {list(box.offsets)}",
        )
        open_pieces.append(box)


def check_paths(index: Index, path: Path) -> None:
    """No path of a tensor is a prefix of another's."""
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
        clash = f"{one} and {other} overlap in {file} at byte {start}"
        expect(file != other_file or end <= start, path, clash)
