"""Reads the Chrome JSON that PyTorch's profiler (Kineto) writes, plain or gzipped, one file a rank.

The file is decoded in chunks of whole events, into structs that have the fields of the model only, so a trace of
gigabytes takes the memory of its columns. A chunk ends between two events; a candidate inside a string or a nested
object leaves the chunk unbalanced, fails to decode, and the one before it is tried.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from ..spec.errors import DataError, NoSuchData
from .model import Events, Kind, Lane, MemoryEvents, Message, Trace

CHUNK = 32 * 2**20  # bytes decoded at once: a few hundred thousand events
EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
BETWEEN = re.compile(rb"\}\s*,\s*\{")
TRIES = 64  # ends of a chunk that are tried before more is read

KINDS = {
    **dict.fromkeys(("cpu_op", "Operator"), Kind.OP),
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "Runtime", "mtia_runtime", "xpu_runtime"), Kind.RUNTIME),
    **dict.fromkeys(("privateuse1_runtime", "privateuse1_driver", "hip_runtime"), Kind.RUNTIME),
    **dict.fromkeys(("kernel", "Kernel", "mtia_ccp_events"), Kind.KERNEL),
    **dict.fromkeys(("gpu_memcpy", "Memcpy"), Kind.COPY),
    **dict.fromkeys(("gpu_memset", "Memset"), Kind.MEMSET),
    "user_annotation": Kind.ANNOTATION,
    "gpu_user_annotation": Kind.DEVICE_ANNOTATION,
    **dict.fromkeys(("python_function", "python_func"), Kind.PYTHON),
}
COMMUNICATION = re.compile(r"^(?:void )?(?:nccl|rccl|mscclpp|nvshmem|deep_ep)|^gloo:|^mpi:", re.IGNORECASE)
ON_DEVICE = (Kind.KERNEL, Kind.COPY, Kind.MEMSET, Kind.DEVICE_ANNOTATION)
Number = int | float | str | None


class Args(msgspec.Struct, gc=False):
    """The arguments of an event that the model keeps."""

    correlation: Number = None
    bytes: Number = None
    Bytes: Number = None
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    sequence: Number = msgspec.field(default=None, name="Sequence number")
    forward_thread: Number = msgspec.field(default=None, name="Fwd thread id")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    nelems: Number = msgspec.field(default=None, name="In msg nelems")
    dtype: Any = None
    group_size: Number = msgspec.field(default=None, name="Group size")
    group: Number = msgspec.field(default=None, name="Process Group Name")
    group_about: Number = msgspec.field(default=None, name="Process Group Description")
    device: Number = msgspec.field(default=None, name="Device Id")
    allocated: Number = msgspec.field(default=None, name="Total Allocated")
    reserved: Number = msgspec.field(default=None, name="Total Reserved")
    name: Any = None  # of a thread


class Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: Number = None
    tid: Number = None
    ts: float | None = 0.0  # µs
    dur: float | None = 0.0  # null: the event had not ended
    args: Args | None = None


class Head(msgspec.Struct):
    """Keys of the file beside its events."""

    baseTimeNanoseconds: int = 0
    distributedInfo: dict[str, Any] = {}
    deviceProperties: list[dict[str, Any]] = []
    host_name: str = ""
    lmworks: Any = None  # of our own traces: rank, steps, spec


class Document(Head):
    traceEvents: list[Event] | None = None


NO_ARGS = Args()
EVENT_LIST = msgspec.json.Decoder(list[Event])
DOCUMENT = msgspec.json.Decoder(Document)


def read_trace(path: str | Path, rank: int | None = None) -> Trace:
    """The trace of one rank. `rank`: where the file does not say, neither inside nor by its name (rank3, rank-3)."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if zipped else open(path, "rb") as stream:
            columns = Columns(str(path))
            for part in documents(stream, str(path)):
                columns.add(part)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: the gzip file is cut off or damaged ({error})") from None
    except FileNotFoundError:
        raise NoSuchData(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise NoSuchData(f"{path} is a folder; a trace is a file, one a rank ({path}/*.json)") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    return columns.trace(rank)


# --- chunks of whole events ------------------------------------------------------------------------------


def documents(stream: IO[bytes] | gzip.GzipFile, path: str) -> Iterator[Document]:
    """The file as documents with some of its events each; the first and the last have the keys beside them."""
    buffer = stream.read(CHUNK)
    if not buffer.strip():
        raise DataError(f"{path} is empty")
    opening = EVENTS.search(buffer)
    bare = buffer.lstrip()[:1] == b"["  # a list of events, as Chrome also accepts it
    if opening is None and not bare:
        buffer += stream.read()
        yield decode(buffer, path)
        return
    before = b'{"traceEvents":['
    if opening is not None:
        before, buffer = buffer[: opening.end()], buffer[opening.end() :]
    else:
        buffer = buffer.lstrip()[1:]
    while more := stream.read(CHUNK):
        if (end := whole_events(buffer, path)) is None:
            buffer += more
            continue
        events, rest = end
        yield decode(before + b"]}", path)
        yield Document(traceEvents=events)
        before, buffer = b'{"traceEvents":[', rest + more
    yield decode(before + buffer + (b"}" if bare else b""), path)


def whole_events(buffer: bytes, path: str) -> tuple[list[Event], bytes] | None:
    """The events that are whole in the buffer, and the bytes after them."""
    ends = [match.start() for match in BETWEEN.finditer(buffer, max(0, len(buffer) - 2**16))]
    for end in reversed(ends[-TRIES:]):
        try:
            events = EVENT_LIST.decode(b"[" + buffer[: end + 1] + b"]")
        except msgspec.ValidationError as error:  # of an event before the end: no other end would mend it
            raise DataError(f"{path}: {why_not(buffer, error)}") from None
        except msgspec.DecodeError:
            continue
        return events, buffer[buffer.index(b",", end) + 1 :]
    return None


def decode(text: bytes, path: str) -> Document:
    try:
        return DOCUMENT.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {why_not(text, error)}") from None


def why_not(text: bytes, error: Exception) -> str:
    """What is wrong with a file that could not be decoded."""
    if isinstance(error, msgspec.ValidationError):
        return f"JSON, but no trace of PyTorch's profiler: {error}"
    start = text.lstrip()[:1]
    if start not in (b"{", b"["):
        return "no JSON; a trace is what torch.profiler's export_chrome_trace writes, plain or gzipped"
    if "truncated" in str(error):
        return "the JSON ends within an event: the file is cut off (was the run killed while it was written?)"
    return f"damaged JSON: {error}"


# --- events to columns -----------------------------------------------------------------------------------


def interner() -> defaultdict[Any, int]:
    """Gives every new key the next number."""
    numbers: defaultdict[Any, int] = defaultdict()
    numbers.default_factory = numbers.__len__
    return numbers


class Columns:
    """Gathers the columns of a trace, chunk by chunk."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.head = Head()
        self.names, self.lanes, self.shapes, self.messages = interner(), interner(), interner(), interner()
        self.labels: dict[tuple[str, str], str] = {}
        self.parts: list[list[np.ndarray]] = []
        self.memory: list[tuple[float, ...]] = []  # time, device, bytes, allocated, reserved
        self.events = 0
        self.skipped = 0  # without a time or a duration

    def add(self, document: Document) -> None:
        for key in Head.__struct_fields__:
            if value := getattr(document, key):
                setattr(self.head, key, value)
        spans = []
        for event in document.traceEvents or ():
            self.events += 1
            if event.ph == "X":
                if event.cat not in KINDS:
                    continue
                if event.ts is None or event.dur is None:
                    self.skipped += 1
                    continue
                spans.append(event)
            elif event.name == "[memory]":
                self.add_memory(event)
            elif event.name == "thread_name" and event.args is not None:
                self.labels[str(event.pid), str(event.tid)] = str(event.args.name)
        if spans:
            self.add_spans(spans)

    def add_memory(self, event: Event) -> None:
        args = event.args or NO_ARGS
        row = {"Device Id": args.device, "Bytes": args.Bytes}
        row |= {"Total Allocated": args.allocated, "Total Reserved": args.reserved}
        if event.ts is None:
            self.skipped += 1
        else:
            self.memory.append((event.ts, *(self.integer(field, value) for field, value in row.items())))

    def add_spans(self, spans: Sequence[Event]) -> None:
        kinds = np.array([KINDS[event.cat] for event in spans], np.uint8)  # type: ignore[index]
        names, lanes = self.names, self.lanes
        args = [event.args or NO_ARGS for event in spans]
        shapes = [self.shape(one) if len(one.dims) else -1 for one in args]
        messages = [-1 if one.collective is None else self.message(one) for one in args]
        self.parts.append(
            [
                kinds,
                np.array([names[event.name] for event in spans], np.int32),
                np.array([lanes[event.pid, event.tid] for event in spans], np.int32),
                np.array([event.ts for event in spans]),
                np.array([event.dur for event in spans]),
                self.integers("correlation", [one.correlation for one in args]),
                self.integers("bytes", [one.bytes for one in args]),
                np.array(shapes, np.int32),
                np.array(messages, np.int32),
                self.integers("Sequence number", [one.sequence for one in args]),
                self.integers("Fwd thread id", [one.forward_thread for one in args]),
            ]
        )

    def integer(self, field: str, value: Number) -> int:
        """Of an argument; −1 where there is none."""
        try:
            number = -1 if value is None else int(value)
            if -(2**63) <= number < 2**63:
                return number
        except (ValueError, OverflowError):
            pass
        raise DataError(f"{self.path}: {field!r} of an event is no integer of 64 bits: {str(value)[:40]!r}")

    def integers(self, field: str, values: Sequence[Number]) -> np.ndarray:
        try:
            return np.array([-1 if value is None else int(value) for value in values], np.int64)
        except (ValueError, OverflowError):
            return np.array([self.integer(field, value) for value in values], np.int64)

    def shape(self, args: Args) -> int:
        return self.shapes[bytes(args.dims), bytes(args.types)]

    def message(self, args: Args) -> int:
        group = args.group_about or args.group
        size = item_size(str(args.dtype))
        count = None if args.nelems is None else self.integer("In msg nelems", args.nelems)
        return self.messages[
            Message(
                str(args.collective),
                "" if group is None else str(group),
                None if args.group_size is None else self.integer("Group size", args.group_size),
                None if size is None or count is None else count * size,
                str(args.dtype or ""),
            )
        ]

    def trace(self, rank: int | None) -> Trace:
        if not self.parts:
            found = f"{self.events:,} events, none" if self.events else "no events"
            raise DataError(f"{self.path}: {found} of PyTorch's profiler (ops, kernels, runtime calls)")
        kind, name, lane, ts, dur, correlation, sizes, shapes, messages, sequence, forward_thread = (
            np.concatenate(column) for column in zip(*self.parts, strict=True)
        )
        self.parts.clear()
        kind = self.mark_collectives(kind, name)
        origin = float(np.floor(ts.min()))
        start = np.rint((ts - origin) * 1e3).astype(np.int64)
        end = start + np.rint(np.maximum(dur, 0) * 1e3).astype(np.int64)
        order = np.lexsort((-end, start))  # of two that start together, the one around the other is first
        columns: tuple[Any, ...] = (
            *(kind, name, lane, start, end, correlation, sizes, shapes, messages),
            *(sequence, forward_thread),
        )
        info = self.head.distributedInfo
        own = info.get("rank")
        devices = self.head.deviceProperties
        return Trace(
            source=self.path,
            rank=own if isinstance(own, int) else rank_of_name(self.path, rank),
            world=info.get("world_size") if isinstance(info.get("world_size"), int) else None,
            origin_ns=self.head.baseTimeNanoseconds + int(origin) * 1000,
            names=list(self.names),
            lanes=self.lane_table(kind, lane),
            shapes=[f"{dims.decode()} {types.decode()}".strip() for dims, types in self.shapes],
            messages=list(self.messages),
            events=Events(*(column[order] for column in columns)),
            memory=self.memory_table(origin),
            device=str(devices[0].get("name", "")) if devices else "",
            backend=str(info.get("backend", "")),
            skipped=self.skipped,
            host=self.head.host_name,
            about=self.head.lmworks if isinstance(self.head.lmworks, dict) else {},
        )

    def mark_collectives(self, kind: np.ndarray, name: np.ndarray) -> np.ndarray:
        """Kernels of NCCL, and what gloo's threads do. NCCL's annotations on the host are launches, not messages."""
        sends = np.array([bool(COMMUNICATION.search(text)) for text in self.names])
        on_host = np.array([text.startswith(("gloo:", "mpi:")) for text in self.names])
        is_message = sends[name] & (kind == Kind.KERNEL) | on_host[name] & (kind == Kind.ANNOTATION)
        return np.where(is_message, np.uint8(Kind.COLLECTIVE), kind)

    def lane_table(self, kind: np.ndarray, lane: np.ndarray) -> list[Lane]:
        device = np.zeros(len(self.lanes), np.bool_)
        device[lane[np.isin(kind, ON_DEVICE)]] = True
        keys = [(str(process), str(thread)) for process, thread in self.lanes]
        return [Lane(*key, bool(flag), self.labels.get(key, "")) for key, flag in zip(keys, device, strict=True)]

    def memory_table(self, origin: float) -> MemoryEvents:
        table = np.array(self.memory, np.float64).reshape(-1, 5)
        table = table[np.argsort(table[:, 0], kind="stable")]
        time = np.rint((table[:, 0] - origin) * 1e3)
        return MemoryEvents(time.astype(np.int64), *(table[:, column].astype(np.int64) for column in range(1, 5)))


ITEM_SIZES = {
    "float": 4, "float32": 4, "int": 4, "int32": 4, "half": 2, "float16": 2, "bfloat16": 2, "short": 2, "int16": 2,
    "double": 8, "float64": 8, "long": 8, "int64": 8, "long int": 8, "byte": 1, "uint8": 1, "char": 1, "int8": 1,
    "unsigned char": 1, "bool": 1, "c10::half": 2, "c10::bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


def item_size(dtype: str) -> int | None:
    """Bytes of an element, by the names that the profiler uses (Float, c10::BFloat16, long int)."""
    return ITEM_SIZES.get(dtype.lower().removeprefix("torch."))


def rank_of_name(path: str, rank: int | None) -> int:
    match = re.search(r"rank[-_]?(\d+)", Path(path).name)
    return int(match[1]) if match else rank or 0
