"""Loads a checkpoint into a state of any layout: each byte is read once, and hashed as it is read.

DCP's planner says which slices of which saved pieces a rank needs. Files are read chunk by chunk, directly into the
memory of the tensors if possible, and every chunk is compared with its digest in the manifest. Chunks that no rank
needs are read too, divided among the ranks: a checkpoint is valid as a whole, or refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from ..model.tensor_files import TORCH_DTYPES
from ..parallel.world import all_gather_object, collective_error, is_rank_zero, run_on_all_ranks
from ..spec import CheckpointError
from .format.digest import MAX_PENDING, digest_of, hash_pool, new_hash, read_all
from .format.index import Index, SavedTensor
from .format.manifest import INDEX, DamagedError, Manifest, damaged, unreadable
from .save_plan import as_bytes


def first_failure(work: Callable[[], str | None]) -> tuple[str, int] | None:
    """Run `work` on all ranks, which returns why it failed or None; returns the first reason, and its rank.

    All ranks know of a failure before any raises, so that none hangs in a collective.
    """
    reasons = all_gather_object(run_on_all_ranks(work))  # an exception is raised by all
    return next(((found, rank) for rank, found in enumerate(reasons) if found is not None), None)


Chunks = set[tuple[str, int]]  # (file, number of the chunk in it)


def read(folder: Path, manifest: Manifest, index: Index, state: dict[str, Any]) -> None:
    """Fill `state` in place. A section that is None is created as it was saved; a missing one is not read."""
    for section, content in state.items():
        if content is None:
            state[section] = empty_section(index, section)
    planner = StrictPlanner(folder)
    planner.set_up_planner(state, metadata_of(index), is_rank_zero())
    # Of all ranks: a pipeline rank has only the weights of its stages.
    here = {name for names in all_gather_object(list(planner.state_dict)) for name in names}
    ranges = read_ranges(plan_load(planner, here), planner, index)
    chunks = needed_chunks(ranges, manifest.chunk)
    chunks |= unclaimed_share(chunks, manifest)

    def try_to() -> str | None:
        try:
            fill(folder, manifest, ranges, chunks)
        except DamagedError as error:
            return str(error)
        return None

    if found := first_failure(try_to):
        reason, rank = found
        raise DamagedError(f"{reason}, as rank {rank} found" if dist.is_initialized() else reason)


def plan_load(planner: StrictPlanner, here: set[str]) -> LoadPlan:
    """What this rank needs; a mismatch on one rank is raised by all."""
    plans: list[LoadPlan] = []

    def try_to() -> str | None:
        try:
            plans.append(planner.plan_load(here))
        except MismatchError as error:
            return str(error)
        return None

    if found := first_failure(try_to):
        raise collective_error(MismatchError(found[0]))
    return plans[0]


# --- what is needed -----------------------------------------------------------------------------------


@dataclass
class ReadRange:
    """A byte range of a file that a rank needs of one saved piece, and its destination."""

    file: str
    start: int
    stop: int
    memory: memoryview  # destination
    finish: Callable[[], None] | None = None  # copies them to their tensors, if `memory` is a buffer
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.stop - self.start


def read_ranges(plan: LoadPlan, planner: DefaultLoadPlanner, tensors: Index) -> list[ReadRange]:
    by_piece: dict[MetadataIndex, list[ReadItem]] = defaultdict(list)
    for item in plan.items:
        by_piece[item.storage_index].append(item)
    ranges = [read_range(items, planner, tensors[index.fqn]) for index, items in by_piece.items()]
    return sorted(ranges, key=lambda part: (part.file, part.start))


def read_range(items: list[ReadItem], planner: DefaultLoadPlanner, tensor: SavedTensor) -> ReadRange:
    """From the first byte that any of `items` needs of their piece to the last."""
    offsets = tuple(items[0].storage_index.offset or ())
    piece = next(piece for piece in tensor.pieces if piece.offsets == offsets)
    dtype = TORCH_DTYPES[tensor.dtype]
    strides = torch.empty(piece.sizes, device="meta").stride()

    def position(point: Iterable[int]) -> int:
        return sum(index * stride for index, stride in zip(point, strides, strict=True))

    first = min(position(item.storage_offsets) for item in items)
    last = max(position(a + n - 1 for a, n in zip(item.storage_offsets, item.lengths, strict=True)) for item in items)
    start, stop = piece.start + first * dtype.itemsize, piece.start + (last + 1) * dtype.itemsize
    target = planner.resolve_tensor(items[0]).detach()
    exact = len(items) == 1 and target.numel() == last + 1 - first and target.is_contiguous()
    if exact and target.device.type == "cpu" and target.dtype == dtype:
        return ReadRange(piece.file, start, stop, as_bytes(target))
    buffer = torch.empty(last + 1 - first, dtype=dtype)

    def finish() -> None:
        for item in items:
            part = buffer.as_strided(item.lengths, strides, position(item.storage_offsets) - first)
            planner.resolve_tensor(item).detach().copy_(part)

    return ReadRange(piece.file, start, stop, as_bytes(buffer), finish)


def needed_chunks(ranges: list[ReadRange], size: int) -> Chunks:
    return {(part.file, number) for part in ranges for number in range(part.start // size, -(-part.stop // size))}


def unclaimed_share(mine: Chunks, manifest: Manifest) -> Chunks:
    """This rank's part of the chunks that no rank needs, so that every chunk is verified."""
    claimed = all_gather_object(mine)
    rank = dist.get_rank() if dist.is_initialized() else 0
    files = {name: len(entry["digests"]) for name, entry in manifest.files.items() if name != INDEX}  # that was read
    every = [(name, number) for name, count in files.items() for number in range(count)]
    taken = set().union(*claimed)
    return set([chunk for chunk in every if chunk not in taken][rank :: len(claimed)])


# --- reading ------------------------------------------------------------------------------------------


def fill(folder: Path, manifest: Manifest, ranges: list[ReadRange], chunks: Chunks) -> None:
    """Read `chunks`, and with them all ranges, in file order."""
    numbers: dict[str, list[int]] = defaultdict(list)
    wanted: dict[str, list[ReadRange]] = defaultdict(list)
    for name, number in sorted(chunks):
        numbers[name].append(number)
    for part in ranges:
        wanted[part.file].append(part)
    new = new_hash(manifest.hash)
    with hash_pool() as pool:
        checks: list[tuple[Path, int, Future[str]]] = []
        for name in numbers:
            path = folder / name
            try:
                with path.open("rb", buffering=0) as file:
                    for number in numbers[name]:
                        parts = read_chunk(file.fileno(), number, manifest, name, wanted[name])
                        checks.append((path, number, pool.submit(digest_of, parts, new)))
                        if len(checks) > MAX_PENDING:
                            check_digest(*checks[-MAX_PENDING - 1], manifest)
            except (OSError, EOFError) as error:
                raise unreadable(path, manifest, error) from None
        for check in checks[-MAX_PENDING:]:
            check_digest(*check, manifest)


def read_chunk(
    descriptor: int, number: int, manifest: Manifest, name: str, ranges: list[ReadRange]
) -> list[memoryview]:
    """One chunk, into the memory of its ranges, and scratch memory for the rest; returns all parts in order."""
    begin = position = number * manifest.chunk
    end = min(begin + manifest.chunk, manifest.files[name]["bytes"])
    parts: list[memoryview] = []
    touched: list[tuple[ReadRange, int]] = []
    while ranges and ranges[0].start < end:
        part = ranges[0]
        start, stop = max(begin, part.start), min(end, part.stop)
        parts += [memoryview(bytearray(start - position)), part.memory[start - part.start : stop - part.start]]
        touched.append((part, stop - start))
        position = stop
        if part.stop > end:
            break
        ranges.pop(0)
    parts.append(memoryview(bytearray(end - position)))
    read_all(descriptor, parts, begin)
    for part, count in touched:
        part.left -= count
        if not part.left and part.finish is not None:
            part.finish()
            part.finish = None  # frees its buffer
    return parts


def check_digest(path: Path, number: int, check: Future[str], manifest: Manifest) -> None:
    if check.result() != manifest.files[path.name]["digests"][number]:
        raise damaged(path, manifest, number)


# --- names and shapes ---------------------------------------------------------------------------------


class MismatchError(CheckpointError):
    """A checkpoint of another model or optimizer than the state to fill."""


class StrictPlanner(DefaultLoadPlanner):
    """Refuses other names or shapes before anything is read, so that no model is half overwritten."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def plan_load(self, here: set[str]) -> LoadPlan:
        """`here`: the names of all ranks."""
        saved: dict[str, Any] = dict(self.metadata.state_dict_metadata) if self.metadata else {}
        sections = {path[0] for path in self.mappings.values()}
        lacking = [name for name in self.state_dict if name not in saved]
        surplus = [name for name in saved if name.split(".")[0] in sections and name not in here]
        if lacking:
            raise MismatchError(f"{self.folder} does not have {name_list(lacking)}, which this run has")
        if surplus:
            raise MismatchError(f"{self.folder} has {name_list(surplus)}, which this run does not have")
        for name, value in self.state_dict.items():
            there, ours = shape(saved[name]), shape(value)
            if there != ours:
                raise MismatchError(f"{self.folder}: {name} is {there} there, but {ours} in this run")
            kinds = saved[name].properties.dtype, value.dtype
            if kinds[0] != kinds[1] and not all(kind.is_floating_point for kind in kinds):  # floats may be converted
                raise MismatchError(f"{self.folder}: {name} is {kinds[0]} there, but {kinds[1]} in this run")
        return self.create_local_plan()


def shape(value: Any) -> str:
    size = getattr(value, "size", None)  # of a tensor, or of what the metadata says of one
    if size is None:
        return "a plain value"
    return str(tuple(size() if callable(size) else size))


def name_list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def metadata_of(index: Index) -> Metadata:
    """The index as DCP metadata."""
    found: dict[str, Any] = {}
    for name, tensor in index.items():
        chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in tensor.pieces]
        properties = TensorProperties(TORCH_DTYPES[tensor.dtype])
        found[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    return Metadata(found)


def empty_section(index: Index, section: str) -> dict[str, Any]:
    """Empty tensors of a section as it was saved."""
    tree: dict[str, Any] = {}
    for tensor in index.values():
        top, *path, last = tensor.path
        if top == section:
            table = tree
            for part in path:
                table = table.setdefault(part, {})
            table[last] = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
    return tree
