"""The save plan: which rank writes which piece of which tensor, and where in its file, by DCP's planner.

Torch Distributed Checkpoint (DCP) knows which part of a DTensor a rank holds, and deduplicates replicas. Files are
safetensors: the pieces of a rank as raw bytes behind a header, so a file is one sequential write, and every offset is
known before the first byte. `index.json` has the location of each piece of each tensor, for all ranks.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ..model.tensor_files import DTYPES, header
from ..parallel.world import is_rank_zero, run_on_all_ranks, run_on_rank_zero
from ..spec import CheckpointError
from .format.digest import CHUNK
from .format.manifest import shard_name


@dataclass(frozen=True)
class Piece:
    """A part of a tensor in a rank's file."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the part in the whole tensor
    sizes: tuple[int, ...]
    dtype: torch.dtype
    start: int  # its first byte, after the header

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def label(self) -> str:
        """In the header: the name, with its slice for a part."""
        if self.sizes == self.shape:
            return self.name
        spans = (f"{start}:{start + size}" for start, size in zip(self.offsets, self.sizes, strict=True))
        return f"{self.name}[{', '.join(spans)}]"


@dataclass(frozen=True)
class RankPlan:
    """What this rank writes."""

    pieces: list[Piece]
    header: bytes
    index: bytes  # index.json, on rank 0

    @property
    def bytes(self) -> int:
        """Of the pieces, without the header."""
        return self.pieces[-1].start + self.pieces[-1].bytes if self.pieces else 0


def make_plan(state: dict[str, Any]) -> RankPlan:
    """A collective call, with the local state."""
    planner = planner_of(state)
    local = run_on_all_ranks(planner.create_local_plan)
    if not dist.is_initialized():
        plans, _ = planner.create_global_plan([local])
        mine, index = plans[0], index_of(plans)
    else:
        mine, index = plan_across_ranks(planner, local)
    pieces = run_on_all_ranks(lambda: pieces_of(mine.items))
    return RankPlan(pieces, header_of(pieces), index)


def planner_of(state: dict[str, Any]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, is_rank_zero())
    return planner


def plan_across_ranks(planner: DefaultSavePlanner, local: SavePlan) -> tuple[SavePlan, bytes]:
    """Rank 0 gathers the plans of all ranks, and scatters what each has to write."""
    gathered: list[Any] | None = [None] * dist.get_world_size() if is_rank_zero() else None
    dist.gather_object(local, gathered)
    plans: list[Any] = []

    def decide() -> None:
        plans.extend(planner.create_global_plan(gathered or [])[0])

    run_on_rank_zero(decide)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, plans if is_rank_zero() else None)
    return mine[0], index_of(plans) if is_rank_zero() else b""


def pieces_of(items: list[WriteItem]) -> list[Piece]:
    """In file order: wide elements first, which aligns all, and small tensors before large ones.

    The many small ones (step counts, norms) are then contiguous.
    """
    found = []
    for item in items:
        data = item.tensor_data
        if data is None:
            raise CheckpointError(f"{item.index.fqn} is not a tensor: a checkpoint's plain values go into its meta")
        if data.properties.dtype not in DTYPES:
            raise CheckpointError(f"{item.index.fqn} is {data.properties.dtype}, which a checkpoint cannot hold")
        chunk = data.chunk
        sizes = (tuple(data.size), tuple(chunk.offsets), tuple(chunk.sizes))
        found.append(Piece(item.index.fqn, *sizes, data.properties.dtype, 0))
    found.sort(key=lambda piece: (-piece.dtype.itemsize, piece.bytes, piece.name, piece.offsets))
    placed, start = [], 0
    for piece in found:
        placed.append(Piece(piece.name, piece.shape, piece.offsets, piece.sizes, piece.dtype, start))
        start += piece.bytes
    return placed


def header_of(pieces: list[Piece]) -> bytes:
    return header((piece.label, piece.dtype, piece.sizes) for piece in pieces)


def index_of(plans: list[SavePlan]) -> bytes:
    """{"tensors": {name: {path, dtype, shape, pieces: [[file, first byte, offsets, sizes], …]}}}."""
    tensors: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        pieces = pieces_of(plan.items)
        data = len(header_of(pieces))
        for piece in pieces:
            tensor = tensors.setdefault(
                piece.name,
                {
                    "path": plan.planner_data[piece.name],
                    "dtype": DTYPES[piece.dtype],
                    "shape": piece.shape,
                    "pieces": [],
                },
            )
            tensor["pieces"].append([shard_name(rank), data + piece.start, piece.offsets, piece.sizes])
    return json.dumps({"tensors": tensors}, separators=(",", ":")).encode()


def tensor_lookup(state: dict[str, Any]) -> Callable[[Piece], Tensor]:
    """A function from a piece to its live tensor in `state`."""
    planner = planner_of(state)

    def find(piece: Piece) -> Tensor:
        found = planner.lookup_object(MetadataIndex(piece.name, piece.offsets))
        if not isinstance(found, Tensor) or tuple(found.shape) != piece.sizes or found.dtype != piece.dtype:
            raise CheckpointError(f"{piece.name} has changed its shape or type since the save plan was made")
        return found.detach()

    return find


def file_contents(plan: RankPlan, state: dict[str, Any]) -> Iterator[memoryview]:
    """The bytes of this rank's file. Device tensors are copied to the host chunk by chunk."""
    yield memoryview(plan.header)
    find = tensor_lookup(state)
    for piece in plan.pieces:
        flat = find(piece).contiguous().view(-1).view(torch.uint8)
        for part in [flat] if flat.device.type == "cpu" else flat.split(CHUNK):
            yield as_bytes(part.cpu())


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor. NumPy's view would fix the size of its storage for good."""
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]  # lives as long as its memory is used
    return memoryview(array).cast("B")
