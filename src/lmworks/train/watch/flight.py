"""PyTorch's flight recorder: the last collectives of this process, in the order in which it entered them.

Its ring is in C++ and costs about a microsecond a collective. NCCL has one and gloo has one; gloo's leaves out messages
between two ranks. They are read from a thread of ours while the main thread waits in one of them.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ...parallel.comm_counter import axis_of, mesh_names
from ...parallel.mesh import Mesh
from ...record.hang import Call, Group
from ...spec.grid import shorten

Dump = Callable[..., bytes | str]
MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")  # as NCCL's names it: of two ranks of the group
WORDS = ("enqueued", "started", "completed")


class Status(NamedTuple):
    """Numbers of a group's last collectives."""

    entered: int
    started: int  # on the GPU, if NCCL times its work; otherwise it stays below `done`
    done: int

    @property
    def runs(self) -> bool:
        return self.started > self.done


class FlightRecorder:
    """What this process has on record, of all its groups."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        # A newer PyTorch may move them; a hang is then diagnosed from the stacks alone.
        names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
        self.dumps: list[Dump] = [getattr(c10d, name) for name in names if hasattr(c10d, name)]

    def status(self) -> dict[str, Status]:
        """How far every group has come. Takes a few microseconds."""
        return {
            f"{index}/{group}": Status(*(int(status[f"last_{word}_collective"]) for word in WORDS))
            for index, dump in enumerate(self.dumps)
            for group, status in read(dump, includeCollectives=False).get("pg_status", {}).items()
        }

    def calls(self) -> tuple[Call, ...]:
        now = time.time_ns()
        groups = self.groups()
        return tuple(call for dump in self.dumps for call in parse(read(dump, includeCollectives=True), groups, now))

    def groups(self) -> dict[str, Group]:
        """By backend and name, as the recorder knows them."""
        known = dist.distributed_c10d._world
        names = mesh_names(self.mesh)
        found = {}
        for group in list(known.pg_map):
            ranks = tuple(sorted(known.pg_group_ranks[group]))
            name = known.pg_names[group]
            label = "world" if len(ranks) == self.mesh.size("world") else names.get(name)
            label = label or axis_of(list(ranks), self.mesh) or shorten(list(ranks))
            for backend in ("gloo", "nccl"):
                found[f"{backend}:{name}"] = Group(label, ranks)
        return found


def read(dump: Dump, **what: bool) -> dict[str, Any]:
    text = dump(**what)
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def parse(trace: dict[str, Any], groups: dict[str, Group], now: int) -> Iterator[Call]:
    for entry in trace.get("entries", ()):
        backend, _, op = entry["profiling_name"].partition(":")
        group = f"{backend}:{entry['process_group'][0]}"
        yield Call(
            group=group,
            op=op,
            number=int(entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]),
            elements=sum(count(shape) for shape in entry["input_sizes"]),
            dtype=", ".join(sorted(set(entry["input_dtypes"]))).lower(),
            done=bool(entry["retired"]),
            age_s=round((now - int(entry["time_created_ns"])) / 1e9, 3),
            peer=peer_of(op, groups.get(group)) if entry["is_p2p"] else None,
        )


def count(shape: list[int]) -> int:
    elements = 1
    for extent in shape:
        elements *= extent
    return elements


def peer_of(op: str, group: Group | None) -> int | None:
    """The rank at the other end of a message."""
    found = MESSAGE.match(op)
    if found is None or group is None:
        return None
    return group.ranks[int(found[3])]
