"""Prices of ops beside their traced times: what is joined, and that nothing is lost on either side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layouts import SPARSE, layout
from lmworks.diagnose.predicted_ops import missing_price, op_table, predicted_ops
from lmworks.plan.devices.machine import Machine, Rate
from lmworks.plan.predict import time_of
from lmworks.record import RunFolder
from lmworks.report.run_report import write_report
from lmworks.spec import catalogue
from lmworks.trace import read_traces
from lmworks.train import Trainer
from lmworks.train.trainer import create_run_folder
from traces import Event, kernel, launch, span, write_trace

RATES = ("gemm.fp32", "attention.fp32", "attention_backward.fp32", "stream", "strided", "exp", "tanh", "optimizer")
MACHINE = Machine(
    "test", "cpu", "measured", {kind: (Rate((1.0,), 1e10),) for kind in RATES}, launch_s=1e-5, launch_backward_s=1e-5
)


@pytest.mark.parametrize("experts", [(), SPARSE], ids=["dense", "experts"])
def test_a_run_with_a_prediction(dataset: Path, tmp_path: Path, experts: tuple[str, ...]) -> None:
    spec = layout(dataset, "log.profile=[2,3]", "optim.steps=4", "checkpoint.every=0", "cluster.device=cpu", *experts)
    Trainer(spec, tmp_path / "run", machine=MACHINE, quiet=True).run()
    traces = read_traces(list((tmp_path / "run" / "traces").iterdir()))
    found = predicted_ops(traces)
    assert found is not None and not missing_price(found)
    prediction = json.loads((tmp_path / "run" / "prediction.json").read_text())
    assert found["step_predicted_s"] == pytest.approx(prediction["step_s"])
    mean = sum(step.seconds for step in traces[0].steps) / 2
    assert found["step_measured_s"] == pytest.approx(mean, rel=0.01)
    rows = found["rows"]
    for side in ("predicted", "measured"):
        whole = sum(row[f"{side}_s"] or 0.0 for row in rows) + found[f"unassigned_{side}_s"]
        assert whole == pytest.approx(found[f"step_{side}_s"])
    assert found["unassigned_predicted_s"] == 0
    wrong = [abs(row["wrong_s"]) for row in rows]
    assert wrong == sorted(wrong, reverse=True)
    # Every op that was priced was traced. What is traced and has no price is no op of the network.
    assert not [row["op"] for row in rows if row["measured_s"] is None and row["predicted_s"]]
    unpriced = {row["op"] for row in rows if row["predicted_s"] is None}
    assert unpriced <= {"accumulate gradients", "input"}
    by_op = {(row["op"], row["pass"]): row for row in rows}
    names = ("experts", "router", "shared experts") if experts else ("ffn up", "ffn down", "activation")
    for op in (*names, "qkv", "attention", "out-projection", "attention norm", "mlp norm", "rotary", "residual"):
        assert by_op[op, "forward"]["predicted_s"] and by_op[op, "backward"]["predicted_s"], op
    qkv, tokens = by_op["qkv", "forward"], 4 * 16  # 4 sequences: hidden 32, of 4 heads 2 are for keys and values
    flops = 2 * 2 * tokens * 32 * (32 + 16 + 16)
    assert qkv["flops_per_s"] == pytest.approx(flops / qkv["measured_s"])
    assert qkv["floor_s"] == pytest.approx(flops / 1e10)  # of its products at the machine's rate
    page = write_report(RunFolder(tmp_path / "run")).read_text(encoding="utf-8")
    assert "Predicted beside measured, op by op" in page and "out-projection" in page


def test_a_known_gpu_prices_a_run_whose_spec_names_none(dataset: Path, tmp_path: Path) -> None:
    """As `profile train` prices its own; ranks of a layout too."""
    gpu = catalogue()["H200-SXM-141GB"]
    spec = layout(dataset, "parallel.dp=2", "precision.dtype=bf16")
    create_run_folder(tmp_path / "run", spec, Machine.of(gpu))
    prediction = json.loads((tmp_path / "run" / "prediction.json").read_text())
    named = spec.replace(cluster=spec.cluster.replace(gpu=gpu.name, device="cuda"))
    time = time_of(named, Machine.of(gpu))
    assert time is not None and prediction["step_s"] == time.total
    assert sum(one["seconds"] for one in prediction["step_ops"]) == pytest.approx(time.total)
    assert RunFolder(tmp_path / "run").spec().cluster.gpu == "auto"  # the run's spec stays as it is


def price(op: str, part: str, way: str, seconds: float, **more: float) -> dict[str, Any]:
    return {"op": op, "part": part, "way": way, "seconds": seconds, "host_s": 0.0, "flops": 0.0, "bytes": 0.0, **more}


def compiled_step() -> list[Event]:
    """A compiled block has no modules inside; the loss follows the last norm. 1,000 µs."""
    return [
        span("user_annotation", "ProfilerStep#1", 0, 1000),
        span("user_annotation", "phase/forward", 0, 500),
        span("user_annotation", "layer/0", 10, 100),
        span("cpu_op", "CompiledFunction", 12, 50),
        launch(20, 1),
        kernel("triton_fused", 100, 300, correlation=1),
        span("user_annotation", "module/norm", 120, 10),
        launch(122, 2),
        kernel("norm", 400, 10, correlation=2),
        launch(140, 3),
        kernel("ncclDevKernel_AllGather", 500, 100, stream=20, correlation=3, **{"Collective name": "allgather"}),
        launch(160, 4),
        kernel("ncclDevKernel_SendRecv", 600, 50, stream=20, correlation=4, **{"Collective name": "send"}),
        launch(600, 5),
        kernel("of nobody", 700, 5, correlation=5),
    ]


def facts_of(tmp_path: Path, *prices: dict[str, Any]) -> dict[str, Any]:
    about = {"step_ops": list(prices)} if prices else {}
    found = predicted_ops(read_traces([write_trace(tmp_path / "t.json", compiled_step(), lmworks=about)]))
    assert found is not None
    return found


def rows_of(found: dict[str, Any]) -> dict[tuple[str, str], tuple[float | None, float | None]]:
    def us(seconds: float | None) -> float | None:
        return None if seconds is None else round(1e6 * seconds, 3)

    return {(row["op"], row["pass"]): (us(row["predicted_s"]), us(row["measured_s"])) for row in found["rows"]}


def test_a_compiled_block_is_one_row_and_axes_have_theirs(tmp_path: Path) -> None:
    found = facts_of(
        tmp_path,
        price("query, key, value", "matmul", "forward", 100e-6, flops=1e6),
        price("attention", "attention", "forward", 50e-6, flops=1e6),
        price("final norm", "norms", "forward", 9e-6, bytes=1e3),
        price("dp", "dp", "", 30e-6),
        price("tp", "tp", "", 40e-6),
        price("pp", "pp", "", 5e-6),
        price("bubble", "bubble", "", 60e-6),
        price("ep", "ep", "", 0.0),
        price("host", "host", "", 70e-6),
        price("stragglers", "stragglers", "", 3e-6),
    )
    assert rows_of(found) == {
        ("block", "forward"): (150.0, 300.0),
        ("final norm", "forward"): (9.0, 10.0),
        ("communication: dp, tp", ""): (70.0, 100.0),
        ("communication: pp", ""): (65.0, 50.0),
        ("waiting for the host", ""): (70.0, 535.0),
    }
    assert found["unassigned_predicted_s"] == pytest.approx(3e-6)
    assert found["unassigned_measured_s"] == pytest.approx(5e-6)
    _, rows = op_table(found, most=2)
    assert [row[0] for row in rows] == ["waiting for the host", "block", "3 more", "unassigned", "total"]
    assert rows[-1][2:5] == ["0.37", "1.00", "-0.63"] and rows[2][2:5] == ["0.14", "0.16", "-0.02"]


def test_collectives_by_kind_of_ranks_on_cpus(tmp_path: Path) -> None:
    """gloo runs a reduce-scatter as an all-reduce."""
    found = rows_of(facts_of(tmp_path, price("reduce-scatter", "communication", "", 30e-6)))
    assert found["communication: all_reduce", ""] == (30.0, None)
    assert found["communication: allgather", ""] == (None, 100.0)


def test_prices_with_other_keys_are_no_prices(tmp_path: Path) -> None:
    about = {"step_ops": [{"op": "attention"}], "spec": {"precision": 7}}
    found = predicted_ops(read_traces([write_trace(tmp_path / "t.json", compiled_step(), lmworks=about)]))
    assert found is not None and found["step_predicted_s"] is None and found["step_measured_s"] > 0


def test_without_prices_the_times_are_shown(tmp_path: Path) -> None:
    found = facts_of(tmp_path)
    assert found["step_predicted_s"] is None and "plan hardware --probe" in missing_price(found)
    assert rows_of(found)["block", "forward"] == (None, 300.0)
    _, rows = op_table(found)
    assert rows[-1][:5] == ["total", "", "-", "1.00", "-"]
