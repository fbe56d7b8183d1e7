"""Seconds of kernels on GPUs of the catalogue: attention and passes against published figures, what rests on what."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from lmworks.plan.devices.machine import Machine, Rate
from lmworks.plan.devices.rates import best_matmul, gemm_seconds
from lmworks.plan.ops import Kernel, gemm
from lmworks.spec import SpecError, catalogue

H100 = catalogue()["H100-SXM-80GB"]


def attention_tflops(machine: Machine, seq: int, head_dim: int = 128, backward: bool = False) -> float:
    """As the papers measure it: 16k tokens, a width of 2048, causal."""
    flops = 2.0 * 16384 * 2048 * seq * (2.5 if backward else 1)
    kind = "attention_backward" if backward else "attention"
    return flops / float(machine.seconds(Kernel(kind, flops=flops, shape=(seq, head_dim)), "bf16")) / 1e12


@pytest.mark.parametrize(
    ("kernel", "head_dim", "published"),
    [  # FlashAttention-3, figure 5: causal, forward, H100
        ("fa2", 128, {512: 191, 1024: 260, 2048: 298, 4096: 319, 8192: 333, 16384: 335}),
        ("fa2", 64, {512: 180, 1024: 229, 2048: 262, 4096: 284, 8192: 295, 16384: 299}),
        ("fa3", 128, {512: 292, 1024: 423, 2048: 521, 4096: 579, 8192: 602, 16384: 616}),
        ("fa3", 64, {512: 197, 1024: 265, 2048: 371, 4096: 420, 8192: 460, 16384: 473}),
        ("cudnn", 128, {512: 315, 1024: 410, 2048: 484, 4096: 518, 8192: 529, 16384: 539}),
        ("cudnn", 64, {512: 225, 1024: 288, 2048: 334, 4096: 363, 8192: 379, 16384: 388}),
    ],
)
def test_attention_against_published_figures(kernel: str, head_dim: int, published: dict[int, float]) -> None:
    machine = Machine.of(H100, attention=kernel)
    off = [attention_tflops(machine, seq, head_dim) / tflops - 1 for seq, tflops in published.items()]
    assert np.mean(np.abs(off)) < 0.11
    assert np.max(np.abs(off)) < 0.26


def test_attention_backward_is_slower_and_long_sequences_are_faster() -> None:
    for name in ("A100-SXM-80GB", "H100-SXM-80GB", "B200-SXM", "MI300X"):
        machine = Machine.of(catalogue()[name])
        assert attention_tflops(machine, 4096, backward=True) < attention_tflops(machine, 4096)
        assert attention_tflops(machine, 512) < attention_tflops(machine, 2048) < attention_tflops(machine, 16384)
        assert attention_tflops(machine, 32768) < catalogue()[name].bf16_tflops


def test_a_single_short_sequence_leaves_the_gpu_idle() -> None:
    machine = Machine.of(H100)
    one = Kernel("attention", flops=2.0 * 1024 * 1024 * 128, shape=(1024, 128))  # one head: 8 blocks for 132 SMs
    many = dataclasses.replace(one, flops=one.flops * 64)
    assert machine.seconds(many, "bf16") < 8 * machine.seconds(one, "bf16")


def test_an_unknown_attention_kernel_is_refused() -> None:
    with pytest.raises(SpecError, match=r"attention = 'fa22' is not known.*fa2"):
        Machine.of(H100, attention="fa22")


def test_passes_cost_their_bytes_and_small_ones_a_start() -> None:
    machine = Machine.of(catalogue()["H200-SXM-141GB"])
    assert machine.seconds(Kernel("stream", bytes=4.8e9), "bf16") == pytest.approx(1e-3 / 0.87, rel=0.01)
    assert machine.seconds(Kernel("stream", bytes=1e3), "bf16") == pytest.approx(2e-6, rel=0.01)
    assert machine.seconds(Kernel("stream", bytes=0.0), "bf16") == 0
    assert machine.seconds(Kernel("stream", bytes=1e9, count=0), "bf16") == 0
    assert machine.launch_s > machine.launch_backward_s > 0


def test_what_each_kind_rests_on() -> None:
    assert Machine.of(H100).tags["gemm.bf16"] == Machine.of(H100).tag == "fitted"
    assert Machine.of(H100).tags["gemm.fp8"] == Machine.of(H100).tags["attention"] == "modelled"
    assert Machine.of(catalogue()["MI300X"]).tag == "modelled"
    assert Machine.of(H100).covers("fp16") and Machine.of(H100).covers("fp8") and not Machine.of(H100).covers("int4")
    old = Machine.of(catalogue()["V100-SXM2-32GB"])
    assert old.covers("fp16") and not old.covers("bf16")


def test_formats_differ_as_their_best_products_do() -> None:
    kernel, machine = gemm(16384, 8192, 8192), Machine.of(H100)
    seconds = {dtype: float(machine.seconds(kernel, dtype)) for dtype in ("bf16", "fp16", "fp8")}
    assert seconds["fp16"] == seconds["bf16"]
    assert seconds["bf16"] / seconds["fp8"] == pytest.approx(1402.6 / 794.5, rel=0.05)
    assert best_matmul(("NVIDIA H200 SXM", "NVIDIA H100 SXM"), "bf16") == 794.5e12  # the first that has the format


def test_a_sister_of_a_measured_gpu_is_priced_like_it_and_a_stranger_by_all() -> None:
    kernel, cards = gemm(8192, 8192, 8192), catalogue()
    sister = cards["A100-SXM-80GB"].replace(name="A100-SXM-40GB", bandwidth_gbs=1555.0)
    assert Machine.of(sister).seconds(kernel, "bf16") == pytest.approx(
        Machine.of(cards["A100-SXM-80GB"]).seconds(kernel, "bf16"), rel=0.01
    )
    mine = H100.replace(name="mine", bf16_tflops=500.0)
    share = 2 * 8192**3 / float(Machine.of(mine).seconds(kernel, "bf16")) / 500e12
    assert 0.65 < share < 0.85


def test_every_gpu_with_a_bandwidth_has_a_time() -> None:
    for gpu in catalogue().values():
        if gpu.bandwidth_gbs:
            machine = Machine.of(gpu)
            for dtype in machine.laws.gemm if machine.laws else ():
                rate = 2 * 4096**3 / float(machine.seconds(gemm(4096, 4096, 4096), dtype))
                assert 0.3 < rate / (gpu.peak_flops(dtype) or 0) < 1, (gpu.name, dtype)


def test_equal_products_are_one_batch_and_none_cost_nothing() -> None:
    machine = Machine.of(H100)
    assert machine.laws
    heads = machine.seconds(gemm(2048, 128, 2048, count=96), "bf16")
    assert heads == gemm_seconds(2048, 128, 2048, machine.laws.gemm["bf16"], 96)
    assert machine.seconds(gemm(2048, 128, 2048, count=0), "bf16") == 0


def test_a_kernel_may_be_many_candidates() -> None:
    tp = np.array([1, 2, 4, 8])
    kernels = [
        gemm(8192, 8192, 28672 // tp),
        Kernel("attention", flops=1e12 / tp, shape=(8192, 128)),
        Kernel("stream", bytes=1e8 / tp),
    ]
    measured = Machine(
        "mine", "cuda", "measured", {"gemm.bf16": (Rate((64, 64, 64), 1e12), Rate((8192, 8192, 8192), 5e14))}
    )
    for machine, kernel in [*((Machine.of(H100), kernel) for kernel in kernels), (measured, kernels[0])]:
        together = machine.seconds(kernel, "bf16")
        for index in range(len(tp)):
            one = Kernel(
                kernel.kind,
                *(float(np.broadcast_to(x, 4)[index]) for x in (kernel.bytes, kernel.flops)),
                tuple(float(np.broadcast_to(x, 4)[index]) for x in kernel.shape),
            )
            assert np.broadcast_to(together, 4)[index] == pytest.approx(float(machine.seconds(one, "bf16")))


def test_measured_points_win_over_laws() -> None:
    machine = dataclasses.replace(Machine.of(H100), rates={"stream": (Rate((1.0,), 1e12),)})
    assert machine.seconds(Kernel("stream", bytes=1e12), "bf16") == 1.0
    assert machine.tags["stream"] == "measured" and machine.tags["exp"] == "modelled"
    assert "laws" not in json.loads(json.dumps(machine.to_dict()))


def test_a_precision_without_a_peak_is_refused() -> None:
    machine = Machine.of(catalogue()["B200-SXM"])
    with pytest.raises(SpecError, match=r"precision fp32: .* peak is not in the catalogue"):
        machine.seconds(Kernel("gemm", flops=2e9, shape=(1000, 1000, 1000)), "fp32")
