"""FLOPs, bytes and floors of operators, against torch's counter and by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.spec import catalogue
from lmworks.trace import read_trace
from lmworks.trace.op_work import Peaks, op_bytes, op_floor, op_flops, peaks_of
from lmworks.trace.summary import summarise
from traces import Event, kernel, launch, span, write_trace

SDPA = "aten::_scaled_dot_product_flash_attention"
H100 = "NVIDIA H100 80GB HBM3"


def test_flops_are_those_of_torchs_counter() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils import flop_counter

    a, b, c = torch.ones(3, 5), torch.ones(5, 7), torch.ones(7)
    batched = torch.ones(2, 3, 5), torch.ones(2, 5, 7)
    calls = {
        "mm": (torch.mm, (a, b)),
        "addmm": (torch.addmm, (c, a, b)),
        "bmm": (torch.bmm, batched),
        "baddbmm": (torch.baddbmm, (torch.ones(2, 3, 7), *batched)),
    }
    for name, (call, inputs) in calls.items():
        with flop_counter.FlopCounterMode(display=False) as counter:
            call(*inputs)
        assert op_flops(f"aten::{name}", [list(one.shape) for one in inputs]) == counter.get_total_flops()
    q, k, v, out = [2, 4, 16, 8], [2, 4, 32, 8], [2, 4, 32, 6], [2, 4, 16, 6]
    assert op_flops(SDPA, [q, k, v, []]) == flop_counter.sdpa_flop_count(q, k, v)
    backward = flop_counter.sdpa_backward_flop_count(out, q, k, v)
    assert op_flops(f"{SDPA}_for_cpu_backward", [out, q, k, v, out, q[:3]]) == backward
    assert op_flops(SDPA, [[]]) is None and op_flops("aten::mul", [[3], [3]]) is None


FLOATS = ["float"] * 3


@pytest.mark.parametrize(
    "name, dims, expected",
    [
        ("mm", [[8, 4], [4, 2]], 8 * 4 + 4 * 2 + 8 * 2),
        ("addmm", [[2], [8, 4], [4, 2]], 2 + 8 * 4 + 4 * 2 + 8 * 2),
        ("mul", [[8, 4], [4]], 8 * 4 + 4 + 8 * 4),
        ("add_", [[8, 4], [8, 4]], 3 * 8 * 4),
        ("sum", [[8, 4]], 8 * 4),
        ("fill_", [[8, 4]], 8 * 4),
        ("copy_", [[8, 4], [8, 4]], 2 * 8 * 4),
        ("silu_backward", [[8, 4], [8, 4]], 3 * 8 * 4),
        ("_scaled_dot_product_flash_attention", [[2, 4, 8, 4]] * 3, 4 * 2 * 4 * 8 * 4),
    ],
)
def test_bytes_that_are_read_and_written(name: str, dims: list[list[int]], expected: int) -> None:
    assert op_bytes(f"aten::{name}", dims, FLOATS) == 4 * expected


COMPOSITE = ["aten::square", "aten::clone", "aten::zero_", "aten::log_softmax"]  # their time is that of ops they call


@pytest.mark.parametrize(
    "name", ["aten::view", "aten::t", "aten::embedding", "aten::empty_like", "MmBackward0", *COMPOSITE]
)
def test_views_and_gathers_have_no_traffic_that_shapes_tell(name: str) -> None:
    assert op_bytes(name, [[8, 4], [8, 4]], FLOATS) is None
    assert op_bytes("aten::cat", [[[8], [4]], [12]], ["TensorList", "float"]) is None  # of a list, types are not told


def test_a_floor_is_the_longer_of_two() -> None:
    peaks = Peaks({"fp32": 1e9}, 1e8)
    assert op_floor("aten::mm", [[100, 100], [100, 100]], FLOATS, peaks) == pytest.approx(2e6 / 1e9)
    assert op_floor("aten::mm", [[100, 1], [1, 100]], FLOATS, peaks) == pytest.approx(4 * 10_200 / 1e8)
    assert op_floor("aten::mm", [[100, 100], [100, 100]], ["double"] * 2, peaks) == pytest.approx(8 * 30_000 / 1e8)
    # Half of the scores: a causal kernel skips the others, and the floor must hold for it.
    heads = [[1, 1, 1000, 100]] * 3
    assert op_floor(SDPA, heads, FLOATS, peaks) == pytest.approx(2 * 1000 * 1000 * 100 * 2 / 2 / 1e9)
    assert op_floor("aten::view", [[8]], FLOATS, peaks) is None


def product() -> list[Event]:
    shapes = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["c10::BFloat16"] * 2}
    return [
        span("user_annotation", "ProfilerStep#1", 0, 1000),
        span("cpu_op", "aten::mm", 10, 20, **shapes),
        launch(12, 1),
        kernel("nvjet_tst_128x256", 100, 300, correlation=1),
    ]


def test_floors_of_a_gpu_are_of_its_datasheet(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "t.json", product(), deviceProperties=[{"name": H100}]))
    gpu, peaks = catalogue()["H100-SXM-80GB"], peaks_of(trace)
    assert peaks is not None and peaks.flops["bf16"] == gpu.peak_flops("bf16")
    assert peaks.flops["fp32"] == peaks.flops["bf16"] / 2  # TF32
    (op,) = summarise([trace])["ops"]
    assert op["floor_s"] == pytest.approx(2 * 4096**3 / (gpu.bf16_tflops * 1e12))
    assert op["flops_per_s"] == pytest.approx(2 * 4096**3 / 300e-6)
    assert op["bytes_per_s"] == pytest.approx(3 * 2 * 4096**2 / 300e-6)
    unknown = read_trace(write_trace(tmp_path / "u.json", product(), deviceProperties=[{"name": "NVIDIA X1"}]))
    assert peaks_of(unknown) is None and summarise([unknown])["ops"][0]["floor_s"] is None


def test_floors_of_our_own_runs_on_a_cpu_are_of_the_measured_machine(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[1000, 1000], [1000, 1000]], "Input type": ["float", "float"]}
    events = [span("user_annotation", "ProfilerStep#1", 0, 1000), span("cpu_op", "aten::mm", 10, 500, **shapes)]
    rates = {"machine_rates": {"flops_per_s": {"fp32": 1e13}, "bytes_per_s": 1e12}}
    (op,) = summarise([read_trace(write_trace(tmp_path / "t.json", events, lmworks=rates))])["ops"]
    assert op["floor_s"] == pytest.approx(2e9 / 1e13)
    (op,) = summarise([read_trace(write_trace(tmp_path / "t.json", events))])["ops"]
    assert op["floor_s"] is None
