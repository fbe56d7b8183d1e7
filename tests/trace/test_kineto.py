"""Reading Kineto's JSON: whole or in chunks, plain or gzipped, and what is refused in one line."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from lmworks.spec.errors import DataError, LMWorksError
from lmworks.trace import Kind, Trace, kineto, read_trace
from traces import kernel, launch, span, write_trace


def a_trace(path: Path) -> Path:
    """100 kernels with their launches; names hold what looks like the end of an event."""
    events = [{"ph": "M", "name": "thread_name", "pid": 100, "tid": 1, "args": {"name": "main }, { thread"}}]
    for i in range(100):
        events.append(span("cpu_op", f'aten::"quoted" }}, {{ {i % 7}', 10 * i, 8, **{"Input Dims": [[i % 3, 4], []]}))
        events.append(launch(10 * i + 1, i))
        events.append(kernel("gemm", 10 * i + 3.5, 5.25, correlation=i, nested=[{"a": 1}, {"b": 2}]))
    events.append(
        {"ph": "i", "name": "[memory]", "pid": 100, "tid": 1, "ts": 5, "args": {"Bytes": -64, "Device Id": 0}}
    )
    info = {"rank": 3, "world_size": 8, "backend": "nccl"}
    return write_trace(
        path, events, distributedInfo=info, deviceProperties=[{"name": "H200"}], baseTimeNanoseconds=7000
    )


def assert_equal(one: Trace, other: Trace) -> None:
    for field in fields(one.events):
        np.testing.assert_array_equal(getattr(one.events, field.name), getattr(other.events, field.name))
    assert (one.names, one.lanes, one.shapes, one.rank) == (other.names, other.lanes, other.shapes, other.rank)
    assert one.origin_ns == other.origin_ns and one.memory.bytes.tolist() == other.memory.bytes.tolist() == [-64]


def test_columns(tmp_path: Path) -> None:
    trace = read_trace(a_trace(tmp_path / "t.json"))
    assert (trace.rank, trace.world, trace.device, trace.backend, trace.origin_ns) == (3, 8, "H200", "nccl", 7000)
    kernels = trace.events.take(trace.events.of(Kind.KERNEL))
    assert len(kernels) == 100 and set(kernels.duration) == {5250} and kernels.start[1] == 13_500
    call = trace.launch[trace.events.of(Kind.KERNEL)]
    assert (trace.events.start[call] == kernels.start - 2500).all()
    assert [lane.device for lane in trace.lanes] == [False, True] and trace.lanes[0].label == "main }, { thread"
    assert json.loads(trace.shapes[1]) == [[1, 4], []]


@pytest.mark.parametrize("chunk", [200, 777, 5000])
@pytest.mark.parametrize("zipped", [False, True])
def test_chunks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, zipped: bool) -> None:
    path = a_trace(tmp_path / "t.json")
    whole = read_trace(path)
    if zipped:
        path = tmp_path / "t.json.gz"
        path.write_bytes(gzip.compress((tmp_path / "t.json").read_bytes()))
    monkeypatch.setattr(kineto, "CHUNK", chunk)
    assert_equal(read_trace(path), whole)


def test_a_bare_list_of_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([kernel("gemm", i, 1) for i in range(50)]))
    for chunk in (2**20, 300):
        monkeypatch.setattr(kineto, "CHUNK", chunk)
        assert len(read_trace(path).events) == 50


GARBAGE = {
    "is empty": b"",
    "no JSON": b"PK\x03\x04 not a trace",
    "cut off": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm", "ts"',
    "damaged JSON": b'{"traceEvents": [{"ph": oops}]}',
    "no events of PyTorch's profiler": b'{"hello": [1, 2, 3]}',
    "2 events, none of PyTorch's profiler": b'{"traceEvents": [{"ph": "X", "cat": "v8", "name": "a"}, {"ph": "B"}]}',
    "no trace of PyTorch's profiler": b'{"traceEvents": 3}',
    "gzip file is cut off": gzip.compress(b'{"traceEvents": []}' * 99)[:-9],
}


@pytest.mark.parametrize("says", GARBAGE)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, says: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(GARBAGE[says])
    with pytest.raises(DataError, match=says) as refusal:
        read_trace(path)
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_long_file_that_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = a_trace(tmp_path / "t.json").read_bytes()
    (tmp_path / "cut.json").write_bytes(whole[: len(whole) * 2 // 3])
    monkeypatch.setattr(kineto, "CHUNK", 1000)
    with pytest.raises(DataError, match="cut off"):
        read_trace(tmp_path / "cut.json")


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "no.json", "no such file"), (tmp_path, "is a folder")):
        with pytest.raises(LMWorksError, match=says) as refusal:
            read_trace(path)
        assert refusal.value.exit_code == 2


def test_the_rank_is_in_the_file_or_in_its_name(tmp_path: Path) -> None:
    events = [kernel("gemm", 0, 1)]
    assert read_trace(write_trace(tmp_path / "rank-5.json", events), 9).rank == 5
    assert read_trace(write_trace(tmp_path / "worker.json", events), 9).rank == 9
    assert read_trace(write_trace(tmp_path / "rank-6.json", events, distributedInfo={"rank": 2}), 9).rank == 2
