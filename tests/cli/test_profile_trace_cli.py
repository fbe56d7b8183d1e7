"""`lmworks profile trace`: a table and JSON of the same figures, one line for what is no trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from traces import kernel, span, write_trace
from typed import lmworks

DATA = Path(__file__).parents[1] / "trace" / "data"
KEYS = {"steps", "compute_s", "exposed_comm_s", "hidden_comm_s", "copy_s", "idle_s", "idle_by_cause", "overlap", "ops"}


def test_json_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(DATA / f"fsdp2_gloo_rank{rank}.json.gz") for rank in (0, 1)]
    code, out, _ = lmworks(capsys, "profile", "trace", *files, "--json")
    facts = json.loads(out)
    assert code == 0 and facts.keys() >= KEYS
    code, out, _ = lmworks(capsys, "profile", "trace", *files)
    assert code == 0 and f"{1e3 * facts['steps'][1]['compute_s']:,.2f}" in out
    assert "no device events" in out and "all_gather" in out and "aten::mm" in out


def test_a_trace_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = lmworks(capsys, "profile", "trace", str(DATA / "ddp_nccl.json.gz"))
    assert code == 0 and "critical path" in out and "launches a step" in out and "default_pg" in out


def test_words_of_a_trace_without_a_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    events = [span("user_annotation", "ProfilerStep#1", 0, 1000)]
    events += [span("cpu_op", "aten::add", start, 5) for start in range(0, 1000, 20)]
    code, out, _ = lmworks(capsys, "profile", "trace", str(write_trace(tmp_path / "t.json", events)))
    assert code == 0 and "rank 0: 50 ops a step, 100% under 10 µs" in out and "verdict: host_bound" in out
    assert "ops a step 50, ops under 10 µs 100.0%" in out


def test_a_collective_of_no_length(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    events = [kernel("gemm", 0, 10), kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL()", 5, 0, stream=20)]
    code, out, _ = lmworks(capsys, "profile", "trace", str(write_trace(tmp_path / "t.json", events)))
    (row,) = (line.split() for line in out.splitlines() if line.strip().startswith("allreduce"))
    assert code == 0 and row == ["allreduce", "-", "1", "-", "0.00", "-"]


def test_what_is_no_trace_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"traceEvents": [{"ph": "X", "cat": "kernel"')
    code, out, err = lmworks(capsys, "profile", "trace", str(tmp_path / "t.json"))
    assert code == 1 and not out and err.count("\n") == 1 and "cut off" in err
    assert lmworks(capsys, "profile", "trace", str(tmp_path / "none.json"))[0] == 2


def test_a_page_and_a_place_where_it_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, page = str(DATA / "event_sync.json.gz"), tmp_path / "new" / "page.html"
    code, out, _ = lmworks(capsys, "profile", "trace", trace, "--html", str(page))
    assert code == 0 and out.endswith(f"page: {page}\n") and "<h2>One step</h2>" in page.read_text()
    code, out, err = lmworks(capsys, "profile", "trace", trace, "--html", str(page / "below"))
    assert code == 2 and "verdict:" in out and err.count("\n") == 1 and f"--html {page / 'below'}" in err
