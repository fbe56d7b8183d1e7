"""Reads what NVIDIA Nsight Systems exports as SQLite (`nsys export --type=sqlite`): one trace for each process in it.

Tables are those of its "SQLite schema reference". They are created only where something was recorded, and columns came
with time: what is missing is left out. Ranges of NVTX are annotations, as record_function's are in Kineto's traces.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..spec.errors import DataError
from .kineto import COMMUNICATION, interner, rank_of_name
from .model import Events, Kind, Lane, MemoryEvents, Trace

MAGIC = b"SQLite format 3\x00"
PROCESS = ~0xFFFFFF  # a global thread id is vm, process and thread; the last 24 bits are the thread
RANGES = (59, 60)  # NVTX_EVENTS.eventType: pushed and popped; started and ended
MARK = 34
RANK_MARK = re.compile(r"^rank (\d+) of (\d+)$")  # what our own ranks say
VERSION = re.compile(r"_v\d+$")  # cudaLaunchKernel_v7000
COPIES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static", 6: "Managed Static"}


@dataclass(frozen=True)
class Row:
    kind: Kind
    name: str
    lane: tuple[str, str]
    start: int
    end: int
    correlation: int = -1
    bytes: int = -1


def is_nsys(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_nsys(path: str | Path, rank: int | None = None) -> list[Trace]:
    """One trace a process that used a device, by rank where the processes say it, else by device.

    `rank`: of a file with one process, where neither it nor the file's name says it.
    """
    try:
        with closing(sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return Export(str(path), connection).traces(rank)
    except sqlite3.DatabaseError as error:
        raise DataError(f"{path}: cannot be read as an export of Nsight Systems ({error})") from None


class Export:
    def __init__(self, path: str, connection: sqlite3.Connection) -> None:
        self.path, self.connection = path, connection
        found = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self.tables = {name for (name,) in found}
        self.strings = dict(self.select("StringIds", "id", "value"))
        self.processes: dict[int, list[Row]] = {}
        self.devices: dict[int, int] = {}  # process → its first device
        self.ranks: dict[int, tuple[int, int]] = {}  # process → rank, world

    def select(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """Rows of a table; a column that this version does not have is None."""
        if table not in self.tables:
            return []
        there = {row[1] for row in self.connection.execute(f"PRAGMA table_info({table})")}
        wanted = ", ".join(f'"{column}"' if column in there else "NULL" for column in columns)
        return self.connection.execute(f"SELECT {wanted} FROM {table}").fetchall()

    def traces(self, rank: int | None) -> list[Trace]:
        self.read_device()
        if not self.processes:
            raise DataError(f"{self.path}: an SQLite file without kernels or copies of Nsight Systems (--trace=cuda)")
        self.read_host()
        order = sorted(self.processes, key=lambda process: (*self.ranks.get(process, (0, 0)), self.devices[process]))
        if len(order) == 1:
            own = self.ranks.get(order[0], (rank_of_name(self.path, rank), None))
            return [self.trace(order[0], *own)]
        return [
            self.trace(process, *self.ranks.get(process, (number, len(order)))) for number, process in enumerate(order)
        ]

    def read_device(self) -> None:
        common = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
        for *row, demangled, short in self.select("CUPTI_ACTIVITY_KIND_KERNEL", *common, "demangledName", "shortName"):
            name = self.strings.get(demangled) or self.strings.get(short) or "kernel"
            self.add_device(Kind.COLLECTIVE if COMMUNICATION.search(name) else Kind.KERNEL, name, row)
        copies = self.select("CUPTI_ACTIVITY_KIND_MEMCPY", *common, "bytes", "copyKind", "srcKind", "dstKind")
        for *row, size, kind, source, target in copies:
            ends = f" ({MEMORIES[source]} -> {MEMORIES[target]})" if source in MEMORIES and target in MEMORIES else ""
            self.add_device(Kind.COPY, f"Memcpy {COPIES.get(kind, 'Unknown')}{ends}", row, size)
        for *row, size in self.select("CUPTI_ACTIVITY_KIND_MEMSET", *common, "bytes"):
            self.add_device(Kind.MEMSET, "Memset (Device)", row, size)

    def add_device(self, kind: Kind, name: str, row: Sequence[Any], size: int | None = None) -> None:
        start, end, device, stream, correlation, process = row
        process = 0 if process is None else process & PROCESS
        lane = (str(device or 0), str(stream or 0))
        sized = -1 if size is None else size
        found = Row(kind, name, lane, start, end, -1 if correlation is None else correlation, sized)
        self.processes.setdefault(process, []).append(found)
        self.devices.setdefault(process, device or 0)

    def read_host(self) -> None:
        """Runtime calls and ranges, of processes that used a device."""
        for start, end, thread, correlation, name in self.select(
            "CUPTI_ACTIVITY_KIND_RUNTIME", "start", "end", "globalTid", "correlationId", "nameId"
        ):
            called = VERSION.sub("", self.strings.get(name, "runtime call"))
            self.add_host(Kind.RUNTIME, called, thread, start, end, -1 if correlation is None else correlation)
        for start, end, kind, text, text_id, thread in self.select(
            "NVTX_EVENTS", "start", "end", "eventType", "text", "textId", "globalTid"
        ):
            name = text or self.strings.get(text_id)
            if name and kind in RANGES and end is not None:
                self.add_host(Kind.ANNOTATION, name, thread, start, end)
            elif name and kind == MARK and (match := RANK_MARK.match(name)):
                self.ranks[self.process_of(thread)] = int(match[1]), int(match[2])

    def add_host(self, kind: Kind, name: str, thread: int | None, start: int, end: int, correlation: int = -1) -> None:
        process = self.process_of(thread)
        if process in self.processes:
            lane = (f"process {process >> 24 & 0xFFFFFF}", str((thread or 0) & ~PROCESS))
            self.processes[process].append(Row(kind, name, lane, start, end, correlation))

    def process_of(self, thread: int | None) -> int:
        """Old exports have no process in their device tables: then all belongs to one."""
        return 0 if thread is None or 0 in self.processes else thread & PROCESS

    def trace(self, process: int, rank: int, world: int | None) -> Trace:
        rows = sorted(self.processes[process], key=lambda row: (row.start, -row.end))
        names, lanes = interner(), interner()
        origin = rows[0].start
        columns: dict[str, Any] = {
            "kind": np.array([row.kind for row in rows], np.uint8),
            "name": np.array([names[row.name] for row in rows], np.int32),
            "lane": np.array([lanes[row.lane] for row in rows], np.int32),
            "start": np.array([row.start - origin for row in rows], np.int64),
            "end": np.array([row.end - origin for row in rows], np.int64),
            "correlation": np.array([row.correlation for row in rows], np.int64),
            "bytes": np.array([row.bytes for row in rows], np.int64),
            "shapes": np.full(len(rows), -1, np.int32),
            "message": np.full(len(rows), -1, np.int32),
            "sequence": np.full(len(rows), -1, np.int64),
            "forward_thread": np.full(len(rows), -1, np.int64),
        }
        epoch = self.select("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
        gpus = self.select("TARGET_INFO_GPU", "name")
        nothing = np.zeros(0, np.int64)
        return Trace(
            source=self.path,
            rank=rank,
            world=world,
            origin_ns=origin + (epoch[0][0] or 0 if epoch else 0),
            names=list(names),
            lanes=[Lane(process, thread, process.isdigit()) for process, thread in lanes],
            shapes=[],
            messages=[],
            events=Events(**columns),
            memory=MemoryEvents(nothing, nothing, nothing, nothing, nothing),
            device=str(gpus[0][0]) if gpus else "",
            backend="nccl" if Kind.COLLECTIVE in columns["kind"] else "",
        )
