"""Reading Kineto's JSON: whole or in chunks, plain or gzipped, and what is refused in one line."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from lmworks.spec.errors import DataError, LMWorksError
from lmworks.trace import Kind, Trace, kineto, read_trace, read_traces
from lmworks.trace.summary import summarise
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


def test_damaged_gzip_is_refused_in_one_line(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(a_trace(tmp_path / "t.json").read_bytes()))
    whole[10] = 0xFF  # the type of the first block
    (tmp_path / "t.json.gz").write_bytes(whole)
    with pytest.raises(DataError, match="gzip file is cut off or damaged"):
        read_trace(tmp_path / "t.json.gz")


MESSAGE = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 8, "Group size": 2}


@pytest.mark.parametrize("value", ["abc", 99999999999999999999999, "1e3"])
@pytest.mark.parametrize(
    "field", ["correlation", "bytes", "In msg nelems", "Group size", "Device Id", "Total Reserved"]
)
def test_a_number_that_is_none_is_named(tmp_path: Path, field: str, value: object) -> None:
    events = [kernel("gemm", 0, 1), kernel("gemm", 2, 1)]
    if field in ("Device Id", "Total Reserved"):
        events.append({"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 5, "args": {"Bytes": 1, field: value}})
    else:
        events[1]["args"] = {**MESSAGE, field: value}
    with pytest.raises(DataError, match=f"t.json: '{field}' of an event is no integer of 64 bits: '{value}'"):
        read_trace(write_trace(tmp_path / "t.json", events))


@pytest.mark.parametrize("chunk", [300, 2**20])
def test_events_without_a_duration_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(kineto, "CHUNK", chunk)
    events = [kernel("gemm", 10 * i, 5) for i in range(50)]
    events[7]["dur"] = events[8]["ts"] = None
    trace = read_trace(write_trace(tmp_path / "t.json", events))
    assert len(trace.events) == 48 and trace.skipped == 2
    assert "2 events without a time or a duration are left out" in summarise([trace])["ranks"][0]["missing"]


def test_an_event_of_other_types_is_refused_in_the_chunk_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after every end of every chunk was tried: that takes the square of the file's length."""
    events = [kernel("gemm", 10 * i, 5) for i in range(200)]
    events[3]["dur"] = "long"
    path = write_trace(tmp_path / "t.json", events)
    monkeypatch.setattr(kineto, "CHUNK", 2000)
    with open(path, "rb") as stream:
        with pytest.raises(DataError, match=r"Expected `float \| null`, got `str` - at `\$\[3\].dur`"):
            list(kineto.documents(stream, str(path)))
        assert stream.tell() <= 2 * 2000


def test_a_rank_is_given_once(tmp_path: Path) -> None:
    events = [kernel("gemm", 0, 1)]
    one, two = (write_trace(tmp_path / f"rank0-steps-{steps}.json", events) for steps in ("1-2", "5-6"))
    for pair in ((one, one), (one, two)):
        with pytest.raises(DataError, match=f"{pair[0].name} and .*{pair[1].name} are both of rank 0"):
            read_traces(pair)
    assert [trace.rank for trace in read_traces([one, write_trace(tmp_path / "rank1.json", events)])] == [0, 1]
