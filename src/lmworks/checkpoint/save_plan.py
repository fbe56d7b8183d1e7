"""Which rank writes which piece of which tensor, and where in its file: decided once, by DCP's planner.

Torch Distributed Checkpoint (DCP) knows which part of a DTensor a rank holds, and lets one rank write what several hold
alike. Our files are safetensors: each rank's pieces as raw bytes behind a header that names them, so a whole file is
one sequential write, every offset is known before the first byte, and anyone can read it. `index.json` says, for all
ranks, where each piece of each tensor lies.
"""

from __future__ import annotations

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
    """A part of a tensor as it lies in a rank's file."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # where in it the part begins
    sizes: tuple[int, ...]
    dtype: torch.dtype
    start: int  # its first byte, after the header

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def label(self) -> str:
        """In the file's header: the name, and for a part the slice of the whole that it is."""
        if self.sizes == self.shape:
            return self.name
        spans = (f"{start}:{start + size}" for start, size in zip(self.offsets, self.sizes, strict=True))
        return f"{self.name}[{', '.join(spans)}]"


@dataclass(frozen=True)
class Plan:
    """What this rank writes."""

    pieces: list[Piece]
    header: bytes
    index: bytes  # index.json, on the lead

    @property
    def bytes(self) -> int:
        """Of the pieces; the header comes on top."""
        return self.pieces[-1].start + self.pieces[-1].bytes if self.pieces else 0


def make(state: dict[str, Any]) -> Plan:
    """Every rank calls this together, with what it holds."""
    planner = planner_of(state)
    local = run_on_all_ranks(planner.create_local_plan)
    if not dist.is_initialized():
        plans, _ = planner.create_global_plan([local])
        mine, index = plans[0], index_of(plans)
    else:
        mine, index = spread(planner, local)
    pieces = run_on_all_ranks(lambda: pieces_of(mine.items))
    return Plan(pieces, header_of(pieces), index)


def planner_of(state: dict[str, Any]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, is_rank_zero())
    return planner


def spread(planner: DefaultSavePlanner, local: SavePlan) -> tuple[SavePlan, bytes]:
    """The lead sees every rank's plan, and gives each back what it is to write."""
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
    """In the order of the file: wide elements first, which aligns all, and small tensors before large ones.

    Whoever needs the many small ones (step counts, norms) then finds them side by side.
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


def finder(state: dict[str, Any]) -> Callable[[Piece], Tensor]:
    """Gives the live part of a state that a piece stands for."""
    planner = planner_of(state)

    def find(piece: Piece) -> Tensor:
        found = planner.lookup_object(MetadataIndex(piece.name, piece.offsets))
        if not isinstance(found, Tensor) or tuple(found.shape) != piece.sizes or found.dtype != piece.dtype:
            raise CheckpointError(f"{piece.name} is not what it was when its place in the checkpoint was chosen")
        return found.detach()

    return find


def contents(plan: Plan, state: dict[str, Any]) -> Iterator[memoryview]:
    """The bytes of this rank's file. What is on a device comes to the host a chunk at a time."""
    yield memoryview(plan.header)
    find = finder(state)
    for piece in plan.pieces:
        flat = find(piece).contiguous().view(-1).view(torch.uint8)
        for part in [flat] if flat.device.type == "cpu" else flat.split(CHUNK):
            yield as_bytes(part.cpu())


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, to be read or written."""
    return tensor.view(-1).view(torch.uint8).numpy().data
