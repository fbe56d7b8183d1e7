"""Two recordings whose difference is known."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lmworks.cli.profile_compare import trace_files
from lmworks.spec.errors import NoSuchData
from lmworks.trace import read_traces
from lmworks.trace.compare import compare
from traces import Event, kernel, launch, span, write_trace
from typed import lmworks

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def steps(*lengths: int, gemm: int, comm: int) -> list[Event]:
    """Steps of so many µs; in each a product, then an all-reduce that nothing hides."""
    events, start = [], 0
    for number, length in enumerate(lengths):
        events += [
            span("user_annotation", f"ProfilerStep#{number}", start, length),
            span("cpu_op", "aten::mm", start + 1, 5),
            launch(start + 2, 10 * number + 1),
            kernel("gemm", start + 10, gemm, correlation=10 * number + 1),
            launch(start + 8, 10 * number + 2),
            kernel(NCCL, start + 10 + gemm, comm, stream=20, correlation=10 * number + 2),
        ]
        start += length
    return events


@pytest.fixture
def recordings(tmp_path: Path) -> tuple[Path, Path]:
    """Two steps of 1,000 and 1,100 µs become three of 800: the product takes 200 less, the all-reduce 50 less."""
    for name in ("a", "b"):
        (tmp_path / name / "traces").mkdir(parents=True)
    write_trace(tmp_path / "a" / "traces" / "rank0-steps-1-2.json", steps(1000, 1100, gemm=500, comm=300))
    write_trace(tmp_path / "b" / "traces" / "rank0-steps-4-6.json", steps(800, 800, 800, gemm=300, comm=250))
    return tmp_path / "a", tmp_path / "b"


def test_changes_are_per_step(recordings: tuple[Path, Path]) -> None:
    facts = compare(*(read_traces(trace_files(place)) for place in recordings))

    def micro(rows: list[dict[str, float]]) -> dict[str, tuple[int, int]]:
        return {str(row["name"]): (round(1e6 * row["before_s"]), round(1e6 * row["after_s"])) for row in rows}

    assert micro([facts["step"]]) == {"step": (1050, 800)}
    assert facts["speedup"] == pytest.approx(1050 / 800) and facts["apart"]
    parts = micro(facts["parts"])
    assert parts["compute"] == (500, 300) and parts["exposed_comm"] == (300, 250) and parts["idle"] == (250, 250)
    assert next(iter(micro(facts["ops"]).items())) == ("aten::mm", (500, 300))  # the largest change first
    assert sum(after for _, after in micro(facts["collectives"]).values()) == 250
    assert sum(after for _, after in micro(facts["idle_by_cause"]).values()) == 250
    assert facts["launches"] == [2, 2]


def test_overlapping_steps_are_said_to_be_chance(
    recordings: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = lmworks(capsys, "profile", "compare", *map(str, recordings))
    assert code == 0 and "chance" not in out and "1.31× as fast" in out
    other = write_trace(tmp_path / "c.json", steps(1050, 1060, gemm=500, comm=300))
    code, out, _ = lmworks(capsys, "profile", "compare", str(recordings[0]), str(other))
    assert code == 0 and "it may be chance" in out
    code, out, _ = lmworks(capsys, "profile", "compare", *map(str, recordings), "--json")
    assert json.loads(out)["step"]["change_s"] == pytest.approx(-250e-6)


def test_newest_recording_of_a_run_is_read(recordings: tuple[Path, Path], tmp_path: Path) -> None:
    folder = recordings[0] / "traces"
    later = write_trace(folder / "rank0-steps-7-8.json", steps(1000, gemm=500, comm=300))
    os.utime(later, (4e9, 4e9))
    assert trace_files(recordings[0]) == [later]
    exported = folder / "nsys.sqlite"
    exported.touch()
    os.utime(exported, (5e9, 5e9))
    assert trace_files(recordings[0]) == [exported]
    with pytest.raises(NoSuchData, match=r"empty has no traces"):
        (tmp_path / "empty").mkdir()
        trace_files(tmp_path / "empty")
