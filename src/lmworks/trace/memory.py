"""Memory over time: from the memory events of a trace, and from a snapshot of PyTorch's caching allocator
(`torch.cuda.memory._dump_snapshot`), which also says what holds it and how fragmented it is.

    reserved    what the allocator took from the device: the sum of its segments
    allocated   blocks of these that tensors use, sizes rounded up; `requested` before rounding
    free        blocks that no tensor uses: of `reserved`, and not usable by a larger request than `largest_free`

    fragmentation = 1 − largest_free / free

A snapshot's history has requested bytes. It is read backwards from the final state, so it may begin at any time.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..spec.errors import DataError, NoSuchData
from .model import Ints, Trace

POINTS = 400  # of a curve
HOLDERS = 20
BEFORE = "allocated before the recording"
BACKWARD = "backward pass"
RESERVE = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True)
class Holder:
    """Live memory by the line of code that allocated it."""

    site: str
    bytes: int
    blocks: int


@dataclass(frozen=True)
class DeviceMemory:
    """One device, at the time of a snapshot and over its history."""

    device: int
    reserved_bytes: int
    allocated_bytes: int
    requested_bytes: int
    awaiting_free_bytes: int  # freed, and still used by another stream
    free_bytes: int
    largest_free_bytes: int
    segments: int
    peak_bytes: int  # requested
    peak_reserved_bytes: int
    peak_s: float  # since the first event
    segment_allocs: int  # cudaMalloc and cudaFree during the history: each synchronises the device
    segment_frees: int
    out_of_memory: int  # requests that failed
    holders: list[Holder]  # at the peak
    timeline: list[tuple[float, int, int]]  # seconds, requested, reserved

    @property
    def fragmentation(self) -> float:
        return 1 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fragmentation": self.fragmentation}


# --- the allocator's snapshot -----------------------------------------------------------------------------


class PlainUnpickler(pickle.Unpickler):
    """A snapshot is lists, dicts, numbers and text: anything else would be code, of somebody else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


def read_snapshot(path: str | Path) -> list[DeviceMemory]:
    """Of every device that the snapshot has memory of."""
    try:
        with open(path, "rb") as file:
            snapshot = PlainUnpickler(file).load()
        segments, histories = snapshot["segments"], snapshot.get("device_traces", [])
        devices = sorted({segment.get("device", 0) for segment in segments} | nonempty(histories))
        return [
            device_memory(
                device,
                [segment for segment in segments if segment.get("device", 0) == device],
                histories[device] if device < len(histories) else [],
            )
            for device in devices
        ]
    except FileNotFoundError:
        raise NoSuchData(f"{path}: there is no such file") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(
            f"{path}: no snapshot of PyTorch's allocator (torch.cuda.memory._dump_snapshot): {error!r}"
        ) from None


def snapshot_path(trace: str) -> Path:
    """Where `log.profile` leaves the snapshot of a trace: rank0-steps-10-12.pickle."""
    return Path(trace.removesuffix(".gz").removesuffix(".json") + ".pickle")


def nonempty(histories: Sequence[Sequence[Any]]) -> set[int]:
    return {device for device, history in enumerate(histories) if history}


def device_memory(
    device: int, segments: Sequence[Mapping[str, Any]], history: Sequence[Mapping[str, Any]]
) -> DeviceMemory:
    blocks = [block for segment in segments for block in with_addresses(segment)]
    sizes: Counter[str] = Counter()
    for block in blocks:
        sizes[block["state"]] += block["size"]
    free = [block["size"] for block in blocks if block["state"] == "inactive"]
    live = {block["address"]: block for block in blocks if block["state"] != "inactive"}
    requested = sum(block.get("requested_size", block["size"]) for block in live.values())
    reserved = sum(segment["total_size"] for segment in segments)
    curve = replay(history, requested, reserved)
    peak = int(np.argmax(curve[:, 1]))
    actions = Counter(event["action"] for event in history)
    return DeviceMemory(
        device=device,
        reserved_bytes=reserved,
        allocated_bytes=sizes["active_allocated"],
        requested_bytes=requested,
        awaiting_free_bytes=sum(sizes.values()) - sizes["active_allocated"] - sizes["inactive"],
        free_bytes=sum(free),
        largest_free_bytes=max(free, default=0),
        segments=len(segments),
        peak_bytes=int(curve[peak, 1]),
        peak_reserved_bytes=int(curve[:, 2].max()),
        peak_s=float(curve[peak, 0]),
        segment_allocs=actions["segment_alloc"] + actions["segment_map"],
        segment_frees=actions["segment_free"] + actions["segment_unmap"],
        out_of_memory=actions["oom"],
        holders=holders(live_at(live, history, peak)),
        timeline=[(float(time), int(held), int(taken)) for time, held, taken in thinned(curve)],
    )


def with_addresses(segment: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Old snapshots give the address of the segment only; blocks lie in it one after the other."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield {"address": address, **block}
        address += block["size"]


def replay(history: Sequence[Mapping[str, Any]], requested: int, reserved: int) -> np.ndarray:
    """Rows (seconds, requested, reserved): before the first event, and after each. The last row is the snapshot's."""
    changes = np.array([(held(event), taken(event)) for event in history], np.int64).reshape(-1, 2)
    after = np.vstack([np.zeros((1, 2), np.int64), np.cumsum(changes, axis=0)])
    levels = after - after[-1] + np.array([requested, reserved])
    times = np.array([event.get("time_us", 0) for event in history], np.float64)
    seconds = np.concatenate([[0.0], (times - times[0]) / 1e6]) if len(times) else np.zeros(1)
    return np.column_stack([seconds, levels])


def held(event: Mapping[str, Any]) -> int:
    return int({"alloc": 1, "free_completed": -1}.get(event["action"], 0) * event.get("size", 0))


def taken(event: Mapping[str, Any]) -> int:
    return int(RESERVE.get(event["action"], 0) * event.get("size", 0))


def live_at(
    live: Mapping[int, Mapping[str, Any]], history: Sequence[Mapping[str, Any]], count: int
) -> list[tuple[int, Any]]:
    """(requested bytes, frames) of what is live after the first `count` events, from what is live after all."""
    found = {
        address: (block.get("requested_size", block["size"]), block.get("frames")) for address, block in live.items()
    }
    for event in reversed(history):  # to the state before the first event
        if event["action"] == "alloc":
            found.pop(event["addr"], None)
        elif event["action"] == "free_completed":
            found[event["addr"]] = event["size"], None  # its frames are those of the call that freed it
    for event in history[:count]:
        if event["action"] == "alloc":
            found[event["addr"]] = event["size"], event.get("frames")
        elif event["action"] == "free_completed":
            found.pop(event["addr"], None)
    return list(found.values())


def holders(live: Iterable[tuple[int, Any]]) -> list[Holder]:
    total: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    for size, frames in live:
        site = site_of(frames)
        total[site] += size
        blocks[site] += 1
    return [Holder(site, size, blocks[site]) for site, size in total.most_common(HOLDERS)]


def site_of(frames: Sequence[Mapping[str, Any]] | None) -> str:
    """The innermost line outside of PyTorch: 'train/step.py:201 optimize'. Frames come innermost first."""
    if not frames:
        return BEFORE
    for frame in frames:
        file = str(frame.get("filename", ""))
        if file.endswith(".py") and "/torch/" not in file and "/importlib/" not in file:
            return f"{'/'.join(Path(file).parts[-2:])}:{frame.get('line', 0)} {frame.get('name', '')}"
    if any("autograd::" in str(frame.get("name", "")) for frame in frames):
        return BACKWARD
    return str(frames[0].get("name") or "unknown")


def thinned(curve: np.ndarray) -> np.ndarray:
    """At most POINTS rows, each the highest of its neighbours."""
    if len(curve) <= POINTS:
        return curve
    groups = np.array_split(np.arange(len(curve)), POINTS)
    return curve[[int(group[np.argmax(curve[group, 1])]) for group in groups]]


# --- memory events of a trace -----------------------------------------------------------------------------


def trace_memory(trace: Trace) -> list[dict[str, Any]]:
    """Of every device (−1: the host) whose allocations the trace has."""
    return [memory_of(trace, int(device)) for device in np.unique(trace.memory.device)]


def memory_of(trace: Trace, device: int) -> dict[str, Any]:
    rows = trace.memory.device == device
    time, changes = trace.memory.time[rows], trace.memory.bytes[rows]
    allocated, reserved = trace.memory.allocated[rows], trace.memory.reserved[rows]
    known = bool(np.all(allocated >= 0))  # else relative to the beginning of the trace
    levels: Ints = allocated if known else np.cumsum(changes)
    peak = int(np.argmax(levels))
    curve = np.column_stack([time / 1e9, levels, reserved])
    return {
        "device": device,
        "absolute": known,
        "peak_bytes": int(levels[peak]),
        "peak_s": float(time[peak] / 1e9),
        "peak_reserved_bytes": int(reserved.max()) if np.any(reserved > 0) else None,
        "growth_bytes": int(levels[-1] - (levels[0] - changes[0])),  # from the beginning to the end
        "allocated_bytes": int(changes[changes > 0].sum()),  # in all
        "allocations": int(np.sum(changes > 0)),
        "timeline": [(float(t), int(held), int(taken)) for t, held, taken in thinned(curve)],
    }
