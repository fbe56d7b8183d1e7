"""Exports of Nsight Systems: one that it recorded, and some made here with the tables of its documented schema."""

from __future__ import annotations

import gzip
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from lmworks.spec.errors import DataError
from lmworks.trace import Kind, read_traces
from lmworks.trace.op_times import op_times
from lmworks.trace.summary import summarise

DATA = Path(__file__).parent / "data"
SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE TARGET_INFO_GPU (id INTEGER NOT NULL, name TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER,
    shortName INTEGER, gridX INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
    copyKind INTEGER NOT NULL, srcKind INTEGER, dstKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    text TEXT, globalTid INTEGER, textId INTEGER, domainId INTEGER);
"""
VM = 0x0100000000000000
STRINGS = {1: "sm90_xmma_gemm", 2: "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
           3: "cudaLaunchKernel_v7000", 4: "ProfilerStep#7", 5: "cudaMemcpyAsync_v3020"}  # fmt: skip


def thread(process: int, number: int = 1) -> int:
    return VM | process << 24 | number


def export(path: Path, ranks: dict[int, int]) -> Path:
    """`ranks`: process → rank. Each takes step 7 of 100 µs: GEMM 10 to 50, all-reduce 40 to 70, copy 80 to 90."""
    with sqlite3.connect(path) as made:
        made.executescript(SCHEMA)
        made.executemany("INSERT INTO StringIds VALUES (?, ?)", STRINGS.items())
        made.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1700000000000000000, '', '')")
        made.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H200')")
        for process, rank in ranks.items():
            us, own = 1000, (thread(process, 0),)
            calls = [(2, 5, 31, 3), (6, 9, 32, 3), (72, 75, 33, 5)]  # start, end, correlation, name
            made.executemany(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, ?, 0)",
                [(a * us, b * us, thread(process), same, name) for a, b, same, name in calls],
            )
            kernels = [(10, 50, 7, 31, 1), (40, 70, 20, 32, 2)]
            made.executemany(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, 1, ?, ?, ?, ?, 0, 1)",
                [(a * us, b * us, rank, stream, same, *own, name) for a, b, stream, same, name in kernels],
            )
            made.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (80000, 90000, ?, 1, 7, 33, ?, 4096, 1, 0, 2)",
                (rank, *own),
            )
            ranges = [
                (0, 100_000, 59, None, 4), (2000, 60_000, 59, "phase/forward", None),
                (1000, None, 34, f"rank {rank} of 2", None), (5000, None, 59, "never ended", None),
            ]  # fmt: skip
            made.executemany(
                "INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, 0, ?, ?, ?, 0)",
                [(a, b, kind, text, thread(process), key) for a, b, kind, text, key in ranges],
            )
    made.close()
    return path


def test_processes_become_ranks_with_launches_joined_to_kernels(tmp_path: Path) -> None:
    second, first = read_traces([export(tmp_path / "nsys.sqlite", {301: 1, 300: 0})])[::-1]
    assert [(trace.rank, trace.world, trace.device) for trace in (first, second)] == [
        (0, 2, "NVIDIA H200"), (1, 2, "NVIDIA H200"),
    ]  # fmt: skip
    names = [first.names[name] for name in first.events.name]
    gemm, reduce, copy = (names.index(name) for name in (STRINGS[1], STRINGS[2], "Memcpy HtoD (Pageable -> Device)"))
    assert first.events.kind[[gemm, reduce, copy]].tolist() == [Kind.KERNEL, Kind.COLLECTIVE, Kind.COPY]
    assert first.events.bytes[copy] == 4096
    assert [names[first.launch[event]] for event in (gemm, copy)] == ["cudaLaunchKernel", "cudaMemcpyAsync"]
    assert "never ended" not in names and "phase/forward" in names
    assert first.origin_ns == 1_700_000_000_000_000_000
    assert np.all(first.events.start[1:] >= first.events.start[:-1])
    assert [step.number for step in first.steps] == [7]


def test_breakdown_of_an_export(tmp_path: Path) -> None:
    """Of 100 µs: the GEMM 40, the all-reduce 30 of which 10 are hidden, the copy 10, nothing 30."""
    facts = summarise(read_traces([export(tmp_path / "nsys.sqlite", {300: 0})]))
    parts = {
        key: round(1e6 * facts[key]) for key in ("compute_s", "exposed_comm_s", "hidden_comm_s", "copy_s", "idle_s")
    }
    assert parts == {"compute_s": 40, "exposed_comm_s": 20, "hidden_comm_s": 10, "copy_s": 10, "idle_s": 30}


def test_a_step_recorded_on_an_h200(tmp_path: Path) -> None:
    """By Nsight Systems itself; sums by SQL. Steps, phases, micro-batches and layers are ranges of `log.nvtx`."""
    file = tmp_path / "nsys.sqlite"
    file.write_bytes(gzip.decompress((DATA / "nsys_h200.sqlite.gz").read_bytes()))
    (trace,) = read_traces([file])
    named = [trace.names[name] for name in trace.events.name[trace.events.of(Kind.ANNOTATION)]]
    layers = [f"layer/{number}" for number in range(16)]
    backward = [f"{layer} backward" for layer in reversed(layers)]
    phases = ["phase/input", "micro_batch/0", "phase/forward", *layers, "phase/backward", *backward]
    last = ["phase/communication", "phase/optimizer", "phase/input"]
    assert [name for name in named if not name.startswith("cub::")] == ["ProfilerStep#4", *phases, *last]
    with closing(sqlite3.connect(file)) as export:
        # Kernels run one after the other in one stream; their launches lie in a layer's range, of the same thread. The
        # time of a layer also has its copies within the device, 0.2 %.
        ranges = {
            way: f"""SELECT sum(k.end - k.start) / 1e9 FROM CUPTI_ACTIVITY_KIND_KERNEL k
                JOIN CUPTI_ACTIVITY_KIND_RUNTIME r USING (correlationId)
                WHERE EXISTS (SELECT 1 FROM NVTX_EVENTS n LEFT JOIN StringIds s ON s.id = n.textId
                    WHERE coalesce(n.text, s.value) LIKE 'layer/%' AND coalesce(n.text, s.value) {like} '% backward'
                    AND n.globalTid = r.globalTid AND n.start <= r.start AND n.end >= r.end)"""
            for way, like in (("forward", "NOT LIKE"), ("backward", "LIKE"))
        }
        sums = {way: export.execute(query).fetchone()[0] for way, query in ranges.items()}
        (kernels,) = export.execute("SELECT sum(end - start) / 1e9 FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
    times = op_times([trace])
    assert times is not None
    for way, expected in sums.items():
        assert expected > 0.01 and times["block", way] == pytest.approx(expected, rel=5e-3)
    assert times["around blocks", "backward"] > 0.001 and times.get(("unassigned", ""), 0.0) < 1e-4
    (step,) = trace.steps
    assert sum(times.values()) == pytest.approx(step.seconds) and step.seconds > kernels


def test_any_file_name(tmp_path: Path) -> None:
    (trace,) = read_traces([export(tmp_path / "100%25 of #1?mode=rw.sqlite", {300: 0})])
    assert len(trace.events) > 3


def test_exports_of_one_process_each_are_ranks_by_their_names_or_order(tmp_path: Path) -> None:
    for names, ranks in ((("rank5.sqlite", "rank2.sqlite"), [5, 2]), (("a.sqlite", "b.sqlite"), [0, 1])):
        files = [export(tmp_path / name, {300: 0}) for name in names]
        for file in files:
            with closing(sqlite3.connect(file)) as made, made:
                made.execute("DELETE FROM NVTX_EVENTS WHERE eventType = 34")
        assert [(trace.rank, trace.world) for trace in read_traces(files)] == [(rank, None) for rank in ranks]


def test_other_sqlite_files_are_refused(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "other.sqlite").executescript("CREATE TABLE t (x);")
    with pytest.raises(DataError, match=r"other.sqlite: an SQLite file without kernels or copies of Nsight Systems"):
        read_traces([tmp_path / "other.sqlite"])
    whole = export(tmp_path / "whole.sqlite", {300: 0}).read_bytes()
    (tmp_path / "cut.sqlite").write_bytes(whole[:6000])
    with pytest.raises(DataError, match=r"cut.sqlite: cannot be read as an export of Nsight Systems"):
        read_traces([tmp_path / "cut.sqlite"])
