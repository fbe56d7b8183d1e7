"""Memory of a snapshot that is small enough to be worked out by hand, and of a trace."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from lmworks.spec.errors import DataError
from lmworks.trace import read_trace
from lmworks.trace.memory import BACKWARD, BEFORE, Holder, read_snapshot, trace_memory
from typed import lmworks

KIB = 1024


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


LINEAR = [
    frame("/usr/lib/python3/site-packages/torch/nn/functional.py", 9, "linear"),
    frame("/home/me/lmworks/model/gpt.py", 200, "forward"),
    frame("/home/me/lmworks/train/step.py", 90, "train_step"),
]
ENGINE = [frame("??", 0, "at::empty"), frame("??", 0, "torch::autograd::Engine::thread_main")]


def block(address: int, size: int, state: str, requested: int = 0, frames: Any = ()) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": list(frames)}


def event(action: str, address: int, size: int, time_us: int, frames: Any = ()) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "time_us": time_us, "stream": 0, "frames": list(frames)}


def snapshot() -> dict[str, Any]:
    """GPU 1 alone. Segment A, 20 KiB: weights 8 (asked for 7), free 4, a linear layer's output 4, free 4. Segment B,
    10 KiB: awaiting free 2, free 8. Over time (requested KiB): 7 held before it began; a temporary of 6 is there at
    first and freed at the end; +4 linear, +5 backward, then −5, +2, −6.

        13 → 17 → 22 → 17 → 19 → 13, reserved 20 → 30 with the fourth event
    """
    a, b = 0x1000, 0x9000
    segments = [
        {
            "device": 1, "address": a, "total_size": 20 * KIB,
            "blocks": [
                block(a, 8 * KIB, "active_allocated", 7 * KIB), block(a + 8 * KIB, 4 * KIB, "inactive"),
                block(a + 12 * KIB, 4 * KIB, "active_allocated", 4 * KIB, LINEAR),
                block(a + 16 * KIB, 4 * KIB, "inactive"),
            ],
        },
        {
            "device": 1, "address": b, "total_size": 10 * KIB,
            "blocks": [
                block(b, 2 * KIB, "active_awaiting_free", 2 * KIB, LINEAR), block(b + 2 * KIB, 8 * KIB, "inactive"),
            ],
        },
    ]  # fmt: skip
    history = [
        event("alloc", a + 12 * KIB, 4 * KIB, 1_000_000, LINEAR),
        event("alloc", a + 8 * KIB, 5 * KIB, 2_000_000, ENGINE),
        event("free_requested", a + 8 * KIB, 5 * KIB, 2_500_000),
        event("segment_alloc", b, 10 * KIB, 3_000_000),
        event("free_completed", a + 8 * KIB, 5 * KIB, 3_000_000),
        event("alloc", b, 2 * KIB, 4_000_000, LINEAR),
        event("free_requested", b, 2 * KIB, 4_500_000),
        event("free_completed", a + 16 * KIB, 6 * KIB, 5_000_000),
        {"action": "oom", "size": 64 * KIB, "device_free": 0, "time_us": 6_000_000, "frames": []},
    ]
    return {"segments": segments, "device_traces": [[], history]}


def test_snapshot_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot()))
    (found,) = read_snapshot(path)
    assert found.device == 1 and found.segments == 2
    assert (found.reserved_bytes, found.allocated_bytes, found.requested_bytes) == (30 * KIB, 12 * KIB, 13 * KIB)
    assert found.awaiting_free_bytes == 2 * KIB
    assert (found.free_bytes, found.largest_free_bytes) == (16 * KIB, 8 * KIB)
    assert found.fragmentation == 0.5
    assert [held // KIB for _, held, _ in found.timeline] == [13, 17, 22, 22, 22, 17, 19, 19, 13, 13]
    assert [taken // KIB for *_, taken in found.timeline] == [20] * 4 + [30] * 6
    assert (found.peak_bytes, found.peak_reserved_bytes, found.peak_s) == (22 * KIB, 30 * KIB, 1.0)
    assert (found.segment_allocs, found.segment_frees, found.out_of_memory) == (1, 0, 1)
    assert found.holders == [
        Holder(BEFORE, 13 * KIB, 2), Holder(BACKWARD, 5 * KIB, 1), Holder("model/gpt.py:200 forward", 4 * KIB, 1),
    ]  # fmt: skip


def test_snapshot_without_history_or_addresses(tmp_path: Path) -> None:
    """As PyTorch wrote them before 2.1, and without _record_memory_history."""
    old = snapshot()
    old["device_traces"] = []
    for segment in old["segments"]:
        for one in segment["blocks"]:
            del one["address"], one["frames"]
    (tmp_path / "old.pickle").write_bytes(pickle.dumps(old))
    (found,) = read_snapshot(tmp_path / "old.pickle")
    assert found.peak_bytes == found.requested_bytes == 13 * KIB
    assert found.holders == [Holder(BEFORE, 13 * KIB, 3)]


def test_memory_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot()))
    code, out, _ = lmworks(capsys, "profile", "memory", str(path))
    assert code == 0
    assert "GPU 1: 12 KiB allocated of 30 KiB reserved; free in it 16 KiB, the largest block 8 KiB" in out
    assert "fragmentation 50%" in out and "1 requests failed" in out and "model/gpt.py:200 forward" in out
    code, out, _ = lmworks(capsys, "profile", "memory", str(path), "--json")
    (device,) = json.loads(out)["snapshots"][0]["devices"]
    assert (device["fragmentation"], device["largest_free_bytes"]) == (0.5, 8 * KIB)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code of somebody else",)


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps([1]), pickle.dumps({"segments": [Evil()]})])
def test_other_pickles_are_refused(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.pickle").write_bytes(content)
    with pytest.raises(DataError, match=r"x.pickle: no snapshot of PyTorch's allocator"):
        read_snapshot(tmp_path / "x.pickle")
    assert capsys.readouterr().out == ""


def test_memory_events_of_a_trace(tmp_path: Path) -> None:
    """Host and GPU apart; the trace begins with 100 bytes on the GPU and ends with 40 more."""

    def instant(us: float, device: int, change: int, total: int, reserved: int) -> dict[str, Any]:
        args = {"Device Id": device, "Bytes": change, "Total Allocated": total, "Total Reserved": reserved}
        return {"ph": "i", "name": "[memory]", "ts": us, "pid": 1, "tid": 1, "args": args}

    op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 10.0, "dur": 90.0, "pid": 1, "tid": 1}
    changes = [(20, 60, 160, 512), (30, 40, 200, 512), (40, -60, 140, 1024)]
    events = [op, instant(15, -1, 8, 8, 0), *(instant(us, 0, *rest) for us, *rest in changes)]
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": events}))
    host, gpu = trace_memory(read_trace(tmp_path / "rank0.json"))
    assert (host["device"], host["peak_bytes"], host["peak_reserved_bytes"]) == (-1, 8, None)
    expected = {"device": 0, "absolute": True, "peak_bytes": 200, "peak_reserved_bytes": 1024, "growth_bytes": 40,
                "allocated_bytes": 100, "allocations": 2}  # fmt: skip
    assert {key: gpu[key] for key in expected} == expected
    assert gpu["peak_s"] == pytest.approx(20e-6)
    assert [point[1:] for point in gpu["timeline"]] == [(160, 512), (200, 512), (140, 1024)]
