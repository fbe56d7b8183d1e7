"""What one checkpoint holds, from its manifest and its index: nothing of the tensors themselves is read."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .manifest import INDEX, Files, Manifest, content_of, read_manifest


@dataclass(frozen=True)
class Shape:
    """A tensor, whole, as it was saved."""

    name: str
    dtype: str  # as safetensors calls it: F32, BF16 …
    shape: list[int]
    bytes: int
    pieces: int  # in so many parts, of as many ranks or fewer

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
    cursor: int | None  # where the data stood
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
    """Of a checkpoint that was saved to the end and has all its files; the index is verified, the tensors are not."""
    manifest = read_manifest(folder)
    tensors = [shape_of(name, entry) for name, entry in saved_tensors(folder, manifest).items()]
    tensors.sort(key=by_name)
    sections: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        total = sections.setdefault(tensor.section, {"tensors": 0, "bytes": 0})
        total["tensors"] += 1
        total["bytes"] += tensor.bytes
    parallel = manifest.meta.get("spec", {}).get("parallel", {})
    about = (folder, manifest.step, manifest.time, manifest.torch, manifest.format)
    return Contents(*about, manifest.meta.get("cursor"), parallel, manifest.files, sections, tensors)


def saved_tensors(folder: Path, manifest: Manifest) -> dict[str, dict[str, Any]]:
    """{name: {path, dtype, shape, pieces: [[file, first byte, offsets, sizes], …]}}, verified."""
    tensors: dict[str, dict[str, Any]] = json.loads(content_of(folder / INDEX, manifest))["tensors"]
    return tensors


def by_name(tensor: Shape) -> list[str]:
    """The tenth block after the ninth."""
    return [part.zfill(9) if part.isdigit() else part for part in tensor.name.split(".")]


def shape_of(name: str, entry: dict[str, Any]) -> Shape:
    bits = re.search(r"\d+", entry["dtype"])  # F8_E4M3: 8; BOOL has none, and takes a byte
    count = math.prod(entry["shape"]) * (int(bits[0]) if bits else 8) // 8
    return Shape(name, entry["dtype"], entry["shape"], count, len(entry["pieces"]))
