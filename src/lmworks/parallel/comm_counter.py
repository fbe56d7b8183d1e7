"""Counts the collectives that are called, by kind and mesh axis.

    with CommCounter(mesh) as counter:
        loss.backward()
    for row in counter.table():
        print(row.kind, row.group, row.ranks, row.count, row.bytes)

All of PyTorch's own communication passes the dispatcher under two namespaces, `c10d` (DDP, FSDP, pipelines, plain
calls) and `_c10d_functional` (traceable calls), in the forward and in the backward pass: autograd passes the mode on to
its threads. Threads that a program starts itself are not counted, nor are kernels that communicate inside a matrix
product (asynchronous tensor parallelism).

`bytes` is the message size in the convention of NCCL's benchmarks, the same on every rank:

    all-reduce, broadcast, reduce, send, recv    the tensor
    all-gather, gather                           the whole that is gathered
    reduce-scatter, scatter                      the whole that is scattered
    all-to-all                                   what one rank sends

What a rank's link carries follows from it: of n ranks in a ring 2·(n − 1)/n · bytes for an all-reduce, and half of that
for an all-gather, a reduce-scatter and an all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..spec.grid import shorten
from .mesh import Mesh

# Operator → (kind, the argument that holds the message, whether that argument is only one rank's part of it).
OPERATORS = {
    "allreduce_": ("all-reduce", "tensors", False),
    "allreduce_coalesced_": ("all-reduce", "tensors", False),
    "all_reduce": ("all-reduce", "input", False),
    "all_reduce_": ("all-reduce", "input", False),
    "all_reduce_coalesced": ("all-reduce", "inputs", False),
    "all_reduce_coalesced_": ("all-reduce", "inputs", False),
    "reduce_": ("reduce", "tensors", False),
    "broadcast_": ("broadcast", "tensors", False),
    "broadcast": ("broadcast", "input", False),
    "allgather_": ("all-gather", "output_tensors", False),
    "_allgather_base_": ("all-gather", "output_tensor", False),
    "allgather_coalesced_": ("all-gather", "output_lists", False),
    "allgather_into_tensor_coalesced_": ("all-gather", "outputs", False),
    "all_gather_into_tensor": ("all-gather", "input", True),
    "all_gather_into_tensor_out": ("all-gather", "input", True),
    "all_gather_into_tensor_coalesced": ("all-gather", "inputs", True),
    "reduce_scatter_": ("reduce-scatter", "input_tensors", False),
    "_reduce_scatter_base_": ("reduce-scatter", "input_tensor", False),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", "inputs", False),
    "reduce_scatter_tensor": ("reduce-scatter", "input", False),
    "reduce_scatter_tensor_out": ("reduce-scatter", "input", False),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", "inputs", False),
    "alltoall_": ("all-to-all", "input_tensors", False),
    "alltoall_base_": ("all-to-all", "input", False),
    "all_to_all_single": ("all-to-all", "input", False),
    "gather_": ("gather", "input_tensors", True),
    "scatter_": ("scatter", "output_tensors", True),
    "send": ("send", "tensors", False),
    "isend": ("send", "tensor", False),
    "recv_": ("recv", "tensors", False),
    "recv_any_source_": ("recv", "tensors", False),
    "irecv": ("recv", "tensor", False),
    "barrier": ("barrier", "", False),
    "monitored_barrier_": ("barrier", "", False),
}


@dataclass(frozen=True)
class Call:
    kind: str
    group: str  # mesh axis, "world", or the ranks themselves
    ranks: int  # in the group
    bytes: int


@dataclass(frozen=True)
class Row:
    """All calls of one kind over one group."""

    kind: str
    group: str
    ranks: int
    count: int
    bytes: int


class CommCounter(TorchDispatchMode):
    """Counts while it is entered, a step that FakeTensorMode only simulates too."""

    def __init__(self, mesh: Mesh | None = None) -> None:
        super().__init__()
        self.mesh = mesh
        self.calls: list[Call] = []
        self.names = mesh_names(mesh) if mesh else {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            named = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
            self.calls += self.read(func._schema.name.partition("::")[2], named)
        return func(*args, **kwargs)

    def read(self, operator: str, named: dict[str, Any]) -> Iterator[Call]:
        given = named.get("process_group", named.get("group_name"))
        if given is None:  # waiting for a result and the like: no communication
            return
        group = process_group(given)
        name, ranks = self.name(group), group.size()
        if operator == "batch_p2p_ops":
            for kind, tensor in zip(named["op_list"], named["tensors"], strict=True):
                yield Call(kind.removeprefix("i"), name, ranks, size(tensor))
            return
        if operator not in OPERATORS:  # which argument is the message is unknown: all tensors are counted
            yield Call(operator, name, ranks, size(list(named.values())))
            return
        kind, argument, part = OPERATORS[operator]
        yield Call(kind, name, ranks, size(named.get(argument)) * (ranks if part else 1))

    def name(self, group: ProcessGroup) -> str:
        if group.group_name not in self.names:
            members = dist.get_process_group_ranks(group)
            self.names[group.group_name] = axis_of(members, self.mesh) or shorten(members)
        return self.names[group.group_name]

    def table(self) -> list[Row]:
        """One row for each kind and group, the heaviest first."""
        rows: dict[tuple[str, str, int], list[int]] = {}
        for call in self.calls:
            rows.setdefault((call.kind, call.group, call.ranks), []).append(call.bytes)
        found = [Row(*key, len(sizes), sum(sizes)) for key, sizes in rows.items()]
        return sorted(found, key=lambda row: (-row.bytes, row.kind, row.group))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: {"collectives": [{kind, group, ranks, count, bytes}]}."""
        return {"collectives": [asdict(row) for row in self.table()]}


def size(tensors: Any) -> int:
    """Bytes of a tensor, or of all in nested lists."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(tensors) if isinstance(t, Tensor))


def process_group(given: Any) -> ProcessGroup:
    """Operators carry their group as an object, wrapped for TorchScript or not, or by its name."""
    if isinstance(given, str):
        return _resolve_process_group(cast(Any, given))
    return ProcessGroup.unbox(given) if isinstance(given, torch.ScriptObject) else given


def mesh_names(mesh: Mesh) -> dict[str, str]:
    """Process group → axis, for groups made for one axis alone; a group of all ranks may serve several."""
    axes: dict[str, set[str]] = {}
    for cut in mesh.device_meshes.values():
        for axis in cut.mesh_dim_names or ():
            axes.setdefault(cut.get_group(axis).group_name, set()).add(axis)
    return {group: next(iter(names)) for group, names in axes.items() if len(names) == 1}


def axis_of(members: list[int], mesh: Mesh | None) -> str | None:
    """The simplest axis with exactly these ranks."""
    if mesh is not None:
        return mesh.grid.axis_of(members, dist.get_rank())
    return "world" if len(members) == dist.get_world_size() else None
