"""A nested dictionary of tensors and plain values to files and back, by Torch Distributed Checkpoint (DCP).

With a process group every rank calls these together and writes a file of its own; alone, DCP is kept to one process.
Around it: errors that name their cause, and a comparison of names and shapes before the first byte is read.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ...spec import CheckpointError


def write(folder: Path, state: dict[str, Any]) -> None:
    with plain_errors():
        save(state, storage_writer=FileSystemWriter(folder), no_dist=not dist.is_initialized())


def read(folder: Path, state: dict[str, Any]) -> None:
    """Fill `state` in place. A section that is None gets whatever was saved; one that is not there is not read."""
    reader = FileSystemReader(folder)
    try:
        metadata = reader.read_metadata()
        for section, content in state.items():
            if content is None:
                state[section] = blank(metadata, section)
        with plain_errors():
            load(state, storage_reader=reader, planner=StrictPlanner(folder), no_dist=not dist.is_initialized())
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot load {folder}: {error}") from error


class StrictPlanner(DefaultLoadPlanner):
    """Refuses a state of other names or shapes before anything is read, so that no model is half overwritten."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def create_local_plan(self) -> LoadPlan:
        saved = self.metadata.state_dict_metadata if self.metadata else {}
        sections = {path[0] for path in self.mappings.values()}
        lacking = [name for name in self.state_dict if name not in saved]
        here = names_everywhere(self.state_dict)
        surplus = [name for name in saved if name.split(".")[0] in sections and name not in here]
        if lacking:
            raise CheckpointError(f"{self.folder} does not have {some(lacking)}, which this run has")
        if surplus:
            raise CheckpointError(f"{self.folder} has {some(surplus)}, which this run does not have")
        for name, value in self.state_dict.items():
            there, ours = shape(saved[name]), shape(value)
            if there != ours:
                raise CheckpointError(f"{self.folder}: {name} is {there} there, but {ours} in this run")
        return super().create_local_plan()


def names_everywhere(state: Iterable[str]) -> set[str]:
    """Of all ranks: a pipeline rank knows only its own stages' weights."""
    if not dist.is_initialized():
        return set(state)
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(state))
    return {name for some in names for name in some}


def shape(value: Any) -> str:
    size = getattr(value, "size", None)  # of a tensor, or of what the metadata says of one
    if size is None:
        return "a plain value"
    return str(tuple(size() if callable(size) else size))


def some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def blank(metadata: Metadata, section: str) -> dict[str, Any]:
    """An empty copy of a section as it was saved, for DCP to fill."""
    tree: dict[str, Any] = {}
    for name, (top, *path, last) in (metadata.planner_data or {}).items():
        if top == section:
            table = tree
            for part in path:
                table = table.setdefault(part, {})
            saved = metadata.state_dict_metadata[name]
            table[last] = None
            if isinstance(saved, TensorStorageMetadata):
                table[last] = torch.empty(saved.size, dtype=saved.properties.dtype)
    return tree


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise what went wrong, not DCP's wrapping of it, and leave out its warning that one process is one."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as wrapped:
        rank, (error, _) = next(iter(wrapped.failures.items()))
        cause = disk_error(error)
        if cause is not None and rank:  # every rank raises it: say whose disk it is
            cause = OSError(cause.errno, f"{cause.strerror} on rank {rank}", cause.filename)
        raise cause or error from None


def disk_error(error: BaseException | None) -> OSError | None:
    """The OSError under an error: torch.save turns a full disk into a RuntimeError about positions in a file."""
    while isinstance(error, Exception):  # not KeyboardInterrupt, which DCP wraps too
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None
