"""The contents of a checkpoint from its manifest and index, without reading tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .index import SavedTensor, read_index
from .manifest import Files, read_manifest


@dataclass(frozen=True)
class Shape:
    """A whole tensor as it was saved."""

    name: str
    dtype: str  # as safetensors calls it: F32, BF16 …
    shape: list[int]
    bytes: int
    pieces: int  # number of them

    @property
    def section(self) -> str:
        """model, optim, rng."""
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Contents:
    folder: Path
    step: int
    time: str
    torch: str
    format: int
    cursor: int | None  # data cursor
    parallel: dict[str, Any]  # the layout that it was saved under
    files: Files
    sections: dict[str, dict[str, int]]  # name → tensors, bytes
    tensors: list[Shape]

    @property
    def ranks(self) -> int:
        return len({entry["rank"] for entry in self.files.values()})

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.files.values())


def contents(folder: Path) -> Contents:
    """Of a committed checkpoint with all its files; the index is verified, the tensors are not."""
    manifest = read_manifest(folder)
    tensors = [shape_of(name, entry) for name, entry in read_index(folder, manifest).items()]
    tensors.sort(key=by_name)
    sections: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        total = sections.setdefault(tensor.section, {"tensors": 0, "bytes": 0})
        total["tensors"] += 1
        total["bytes"] += tensor.bytes
    parallel = manifest.meta.get("spec", {}).get("parallel", {})
    about = (folder, manifest.step, manifest.time, manifest.torch, manifest.format)
    return Contents(*about, manifest.meta.get("cursor"), parallel, manifest.files, sections, tensors)


def by_name(tensor: Shape) -> list[str]:
    """Sort key: block 10 after block 9."""
    return [part.zfill(9) if part.isdigit() else part for part in tensor.name.split(".")]


def shape_of(name: str, saved: SavedTensor) -> Shape:
    return Shape(name, saved.dtype, list(saved.shape), saved.bytes, len(saved.pieces))
