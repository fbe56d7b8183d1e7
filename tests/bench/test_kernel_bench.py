"""`lmworks bench kernels`: work as PyTorch counts it, rows for what fails, and choices that training then makes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from lmworks.bench import kernel_ops, kernels
from lmworks.bench.kernel_ops import BOTH, FORWARD, OPS, Case, OpConfig, TimedCall
from lmworks.bench.kernel_timing import Clock
from lmworks.bench.kernels import DeviceRoofline, Row, backward_rows, bench_kernels, measure, record, winners
from lmworks.bench.roofline import PeakRates
from lmworks.cli.main import app
from lmworks.kernels import dispatch
from lmworks.kernels.training import cross_entropy, gelu_mlp
from lmworks.kernels.training.flash_attention import reference
from lmworks.spec import ModelSpec, SpecError

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
TINY = OpConfig("tiny", ModelSpec.from_preset("tiny"), 2, 32, CPU, torch.float32)


# --- what an op must do ---------------------------------------------------------------------------------


def counted(function: Any, inputs: list[torch.Tensor]) -> tuple[int, int]:
    """FLOPs of the products of a forward pass, and of both."""
    leaves = [x.requires_grad_() for x in inputs]
    with FlopCounterMode(display=False) as flops:
        result = function(*leaves)
        there = flops.get_total_flops()
        result.sum().backward()
    return there, flops.get_total_flops()


def test_flops_equal_torch_counter() -> None:
    (loss,) = OPS["linear_cross_entropy"](TINY)
    targets = torch.zeros(TINY.tokens, dtype=torch.int64)
    hidden, weight = TINY.randn(TINY.tokens, TINY.model.hidden), TINY.randn(TINY.model.vocab, TINY.model.hidden)
    _, both = counted(lambda h, w: cross_entropy.reference(h, w, targets), [hidden, weight])
    assert loss.flops == both
    cases = {case.part: case for case in OPS["attention"](TINY)}
    model = TINY.model
    qkv = [TINY.randn(2, 32, heads, model.head_dim) for heads in (model.heads, model.kv_heads, model.kv_heads)]
    there, both = counted(reference, qkv)
    seen = (32 + 1) / 2 / 32  # of the scores, which the reference makes all
    assert cases[FORWARD].flops == pytest.approx(there * seen)
    # The reference keeps its scores: four products backward, where flash attention makes them again for a fifth.
    assert cases[BOTH].flops == pytest.approx((both + there / 2) * seen)


def test_bytes_count_inputs_and_results_once() -> None:
    x = 4 * TINY.tokens * TINY.model.hidden
    assert [case.bytes for case in OPS["rms_norm"](TINY)] == [2 * x, 5 * x]
    inner = 4 * TINY.tokens * TINY.model.ffn
    assert [case.bytes for case in OPS["swiglu"](TINY)] == [3 * inner, 8 * inner]
    (both,) = OPS["swiglu_fp8"](TINY)
    assert both.bytes == (2 * 2 + 1 / 4 + 2 * 3 + 5 / 4) * inner  # read twice, written in 8 bits; and again
    weight = TINY.model.ffn * TINY.model.hidden
    assert {case.op: case.bytes / weight for case in OPS["fp8"](TINY)} == {
        "quantize": 9, "quantize, transposed": 9, "quantize_rows": 5, "dequantize": 5,
    }  # fmt: skip


def test_rows_of_all_choices_are_read_and_written_once() -> None:
    moe = replace(TINY, model=ModelSpec.from_preset("tiny", experts=4, top_k=2))
    x = 4 * TINY.tokens * TINY.model.hidden
    cases = list(OPS["unpermute"](moe))
    assert [case.bytes for case in cases] == [3 * x, 8 * x]
    for case in cases:
        (call,) = (call for name, call in case.make().items() if name == "torch")
        call()


def test_model_without_op_has_no_case() -> None:
    gpt2 = replace(TINY, model=ModelSpec.from_preset("cpu-10m"))
    assert [op for op in OPS if not list(OPS[op](gpt2))] == ["rms_norm", "rope", "swiglu", "swiglu_fp8", "unpermute"]


# --- how it is measured ---------------------------------------------------------------------------------


def test_failed_implementation_is_a_row() -> None:
    def fail() -> None:
        raise RuntimeError("no kernel for this\nand more")

    ways: Mapping[str, TimedCall] = {
        "torch": lambda: torch.ones(3),
        "broken": fail,
        "near": lambda: 1.1 * torch.ones(3),
    }
    case = Case("op", FORWARD, {"n": 3}, 12.0, 30.0, lambda: ways, ("torch", "broken"))
    rows = {row.implementation: row for row in measure(Clock(CPU, 1.0), case, "tiny", DeviceRoofline(4.0, 5.0), 2)}
    assert rows["broken"].seconds is None
    assert rows["broken"].error == "RuntimeError: no kernel for this"
    assert rows["torch"].off == 0
    assert rows["near"].off == pytest.approx(0.1, abs=1e-4)
    assert [rows[name].chosen_from for name in ways] == [True, True, False]
    assert {row.floor_s for row in rows.values()} == {6.0}  # 30 FLOPs at 5 a second take longer than 12 bytes at 4
    assert rows["torch"].seconds and rows["torch"].to_dict()["of_floor"] == pytest.approx(
        6 / rows["torch"].seconds, 1e-3
    )


def test_failed_case_is_one_row() -> None:
    def make() -> Mapping[str, TimedCall]:
        raise torch.OutOfMemoryError("too large")

    (row,) = measure(Clock(CPU, 1.0), Case("op", FORWARD, {}, 1.0, 1.0, make), "tiny", DeviceRoofline(1.0, 1.0), 1)
    assert row.error == "OutOfMemoryError: too large"


def test_epilogues_use_formula_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "measured_peak_rates", lambda *_: PeakRates("measured", {"fp32": 1e10}, 1e9))
    facts = bench_kernels(CPU, ["gpt2-small"], ["gelu"], 1, 1, 16)
    found = {row["op"]: (row["implementation"], row["shape"], row["error"]) for row in facts["rows"]}
    assert found == {op: ("torch", {"hidden": 768, "ffn": 3072}, "") for op in gelu_mlp.OPS}
    assert {row["flops"] for row in facts["rows"]} == {2 * 16 * 768 * 3072}
    moved = {row["op"]: row["bytes"] / 4 - 768 * 3072 for row in facts["rows"]}  # beside the weight
    assert moved == {"linear_gelu": 16 * 6912, "linear_dgelu": 16 * 6912, "linear_add": 16 * 4608}


def test_every_op_runs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "measured_peak_rates", lambda *_: PeakRates("measured", {"fp32": 1e10}, 1e9))
    monkeypatch.setattr(kernel_ops, "MAX_UPDATED", 2**10)
    stages: list[str] = []
    kept: list[dict[str, Any]] = []
    facts = bench_kernels(CPU, ["tiny"], (), 1, 1, 16, lambda stage, _done, _all: stages.append(stage), kept.append)
    assert [len({row["op"] for row in one["rows"]}) for one in kept] == [1, 2, 3, 4, 5, 6, 7, 7, 7, 11, 12]
    assert kept[-1] == facts
    assert {row["op"] for row in facts["rows"]} >= {*OPS} - {"attention", "gelu", "fp8", "unpermute"} | {
        "flash_attention",
        "quantize",
    }
    assert not [row for row in facts["rows"] if row["error"]]
    assert all(row["off"] < 1e-5 for row in facts["rows"] if row["off"] is not None)
    assert stages == [f"{op} of tiny" for op in OPS]
    assert facts["winners"] == {}  # a CPU has no choice
    json.dumps(facts, allow_nan=False)


def row(implementation: str, seconds: float | None, part: str = BOTH, off: float | None = 0.0, **more: Any) -> Row:
    shape = more.pop("shape", {"tokens": 8, "hidden": 4})
    return Row("rms_norm", part, "tiny", shape, implementation, more.pop("chosen_from", True), 2.0, 0.0, 1.0, seconds,
               None, off, **more)  # fmt: skip


def test_backward_time_is_difference() -> None:
    both, forward = replace(row("torch", 5.0), bytes=10.0), replace(row("torch", 2.0, FORWARD), bytes=4.0)
    (back,) = backward_rows([forward, both, row("triton", 4.0)], DeviceRoofline(2.0, 1.0))
    assert (back.part, back.seconds, back.bytes, back.floor_s) == ("backward", 3.0, 6.0, 3.0)


# --- what is chosen -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([row("torch", 1.0), row("triton", 0.9)], "triton"),
        ([row("torch", 1.0), row("triton", 0.98)], "torch"),  # not by enough
        ([row("torch", 1.0), row("triton", 0.5, off=0.2)], "torch"),  # wrong
        ([row("torch", 1.0), row("triton", None)], "torch"),  # failed
        ([row("torch", 1.0), row("compile", 0.1, chosen_from=False)], "torch"),
        ([row("torch", 1.0, FORWARD), row("triton", 0.5, FORWARD), row("torch", 2.0), row("triton", 2.5)], "torch"),
    ],
)
def test_winner_needs_margin_and_accuracy(rows: list[Row], chosen: str) -> None:
    assert winners(rows) == {"rms_norm": {"hidden=4 tokens=8": chosen}}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of choices of its own, on a device of some name."""
    cached = (dispatch.table, dispatch.measured_points, dispatch.nearest)
    monkeypatch.setattr(dispatch, "MEASURED", tmp_path / "measured.toml")
    monkeypatch.setattr(dispatch, "device_name", lambda _device: "NVIDIA H200")
    for one in cached:
        one.cache_clear()
    yield tmp_path / "measured.toml"
    for one in cached:
        one.cache_clear()


def test_record_is_read_by_dispatch(measured: Path) -> None:
    measured.write_text(
        '["NVIDIA A100".rope]\n"tokens=8" = "triton"\n["NVIDIA H200".measured]\nrope = "2025"\nrms_norm = "2025"\n'
        '["NVIDIA H200".rope]\n"tokens=8" = "triton"\n'
        '["NVIDIA H200".rms_norm]\n"hidden=4 tokens=8" = "torch"\n"hidden=4096 tokens=8" = "triton"\n'
    )
    found = {"rms_norm": {"hidden=4 tokens=8": "triton", "hidden=64 tokens=8": "torch"}}
    made = {"date": "2026-11-20", "torch": "2.11.0", "triton": "3.6.0"}
    assert record({"device": "NVIDIA H200", "made": made, "winners": found}) == measured
    for cached in (dispatch.table, dispatch.measured_points, dispatch.nearest):
        cached.cache_clear()
    assert dispatch.fastest("rms_norm", GPU, tokens=8, hidden=8) == "triton"
    assert dispatch.fastest("rms_norm", GPU, tokens=8, hidden=64) == "torch"
    assert dispatch.fastest("rms_norm", GPU, tokens=8, hidden=4096) == "triton"  # of a model that was measured before
    assert dispatch.fastest("rope", GPU, tokens=8) == "triton"  # was not measured this time, and stays
    assert dispatch.table()["NVIDIA A100"]["rope"] == {"tokens=8": "triton"}
    dates = dispatch.table()["NVIDIA H200"]["measured"]
    assert dates == {"rope": "2025", "rms_norm": "2026-11-20, torch 2.11.0, triton 3.6.0"}


# --- the command ----------------------------------------------------------------------------------------


def test_bench_kernels_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "measured_peak_rates", lambda *_: PeakRates("measured", {"fp32": 1e10}, 1e9))
    words = ["bench", "kernels", "--device", "cpu", "--model", "tiny", "--seq", "16", "--rounds", "1"]
    out = tmp_path / "kernels.json"
    done = CliRunner().invoke(app, [*words, "--only", "rms_norm", "--json", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads(out.read_text())
    assert {row["op"] for row in json.loads(out.read_text())["rows"]} == {"rms_norm"}
    table = CliRunner().invoke(app, [*words, "--only", "swiglu"]).stdout
    assert "tiny tokens=32 ffn=192, forward + backward" in table
    none = CliRunner().invoke(app, [*words[:4], "--model", "cpu-10m", "--rounds", "1", "--only", "rope"]).stdout
    assert "nothing to time: none of the models has such an op" in none
    for more, said in ((["--only", "rmsnorm"], "did you mean 'rms_norm'"), (["--record"], "run it on a GPU")):
        refused = CliRunner().invoke(app, [*words, *more])
        assert isinstance(refused.exception, SpecError)
        assert said in str(refused.exception)
