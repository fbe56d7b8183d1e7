"""Small linears on a GPU: real shapes against fp64, the same bits every time, in graphs, and whole networks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks import GPT, ModelSpec
from lmworks.engine.quantization.drift import DriftMonitor, Inputs
from lmworks.engine.quantization.quantize import Calibration, quantize
from lmworks.engine.quantization.quantized_model import (
    SCHEMES,
    apply_quantization,
    round_to_nearest,
    set_batch_invariant,
)
from lmworks.kernels.inference import quantized
from lmworks.kernels.inference.linear import DECODE_MAX_ROWS, batch_invariant_linear, decode_linear
from lmworks.kernels.rms_norm import add_rms_norm
from lmworks.kernels.swiglu import swiglu_packed
from lmworks.model.gpt import Linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [(1000, 1024), (1024, 3072), (6144, 4096), (16_400, 512), (65_600, 512)]  # (channels, inputs)
MANY = quantized.DEQUANTIZE_MIN_ROWS
ROWS = [1, 2, 8, 9, 16, 17, 64, 65, quantized.SCALED_MM_MIN_ROWS, MANY - 1, MANY, 300]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def layer(channels: int, inputs: int, dtype: torch.dtype) -> Linear:
    one = Linear(inputs, channels, bias=False, device="cuda", dtype=dtype)
    one.weight = torch.nn.Parameter(draw(channels, inputs).mul_(0.05).to(dtype), requires_grad=False)
    return one


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_layers_equal_reference(scheme: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    from lmworks.kernels.training import float8_triton

    new = round_to_nearest(SCHEMES[scheme], layer(*shape, dtype))
    weight = new.dequantized().double()
    for rows in ROWS:
        x = draw(rows, shape[1], seed=rows).to(dtype)
        known = x.double()
        if scheme == "fp8":
            p, s = quantized.fp8_quantize(x)
            known = p.double() * s.double().unsqueeze(1)
            assert torch.equal(float8_triton.quantize_rows(x, quantized.FP8)[0].float(), p.float())
        found = new(x)
        assert found.dtype == dtype
        # Rounding the result; in int4 with many rows of the widened weights too; fp8's tensor cores add in few bits.
        assert off(found, F.linear(known, weight)) < 5e-3, (rows, scheme)
        assert torch.equal(found, new(x)), "split-K must add in one order"
        assert torch.equal(new(x, gate=True), swiglu_packed(found))
        assert torch.equal(found[0], new(x.clone())[0])


@pytest.mark.parametrize("rows", [1, 5, DECODE_MAX_ROWS, DECODE_MAX_ROWS + 1])
def test_small_linears_in_half_precision(rows: int) -> None:
    for channels, inputs in SHAPES:
        x, weight, bias = draw(rows, inputs).bfloat16(), draw(channels, inputs).bfloat16(), draw(channels).bfloat16()
        wanted = F.linear(x.double(), weight.double(), bias.double())
        assert off(decode_linear(x, weight, bias), wanted) < 4e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_batch_invariance(dtype: torch.dtype) -> None:
    for channels, inputs in SHAPES:
        x, weight = draw(200, inputs).to(dtype), draw(channels, inputs, seed=1).to(dtype)
        whole = batch_invariant_linear(x, weight)
        assert off(whole, F.linear(x.double(), weight.double())) < (5e-6 if dtype == torch.float32 else 4e-3)
        for start, end in ((0, 1), (77, 78), (3, 20), (100, 164), (50, 115)):
            assert torch.equal(batch_invariant_linear(x[start:end], weight), whole[start:end])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_batch_invariant_layers(scheme: str) -> None:
    new = round_to_nearest(SCHEMES[scheme], layer(1024, 3072, torch.bfloat16))
    x = draw(300, 3072).bfloat16()
    set_batch_invariant(new)
    whole = new(x)
    for start, end in ((0, 1), (77, 78), (3, 20), (100, 164)):
        assert torch.equal(new(x[start:end]), whole[start:end])
    new.batch_invariant = False
    assert off(whole, new(x)) < 0.01


@pytest.mark.parametrize("scheme", SCHEMES)
def test_model_equals_cpu(scheme: str) -> None:
    spec = ModelSpec.from_preset("tiny", layers=2, hidden=256, heads=4, kv_heads=2)
    model = apply_quantization(GPT(spec).requires_grad_(False), scheme)
    there = copy.deepcopy(model).cuda().bfloat16()
    tokens = torch.randint(0, spec.vocab, (3, 40), generator=torch.Generator().manual_seed(0))
    # In fp8 numbers between two values fall to either side: bf16 on a CPU is 0.06 away from fp32, too.
    limit = 0.08 if scheme == "fp8" else 0.05
    assert off(there(tokens.cuda()).cpu(), model(tokens)) < limit
    assert off(there(tokens[:1, :1].cuda()).cpu(), model(tokens[:1, :1])) < limit


@pytest.mark.parametrize("scheme", SCHEMES)
def test_graphs_capture_matmuls_and_drift_monitor(scheme: str) -> None:
    """Replays give the same bits: tickets of split-K are back at zero after each. A monitor counts every replay."""
    new = round_to_nearest(SCHEMES[scheme], layer(1024, 3072, torch.bfloat16))
    new.label = "down"
    x = draw(5, 3072).bfloat16()
    wanted = new(x)
    monitor = DriftMonitor(new, {"down": Inputs(float(x.abs().max()), 1.0)})
    with monitor:
        new(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = new(x)
    monitor.reset()
    for _ in range(3):
        found.zero_()
        graph.replay()
        assert torch.equal(found, wanted)
    report = monitor.report()
    assert report.rows == 15
    assert report.layers[0].amax_ratio == pytest.approx(1)
    assert report.layers[0].rms_ratio == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantize_pipeline_runs(scheme: str) -> None:
    spec = ModelSpec.from_preset("tiny", layers=2, hidden=256, heads=4, kv_heads=2)
    model = GPT(spec).cuda().bfloat16()
    ids = torch.randint(0, spec.vocab, (4000,), generator=torch.Generator().manual_seed(0))
    report = quantize(model, scheme, Calibration.of(ids, 64, spec.vocab, "noise"))
    assert report.passed
    assert all(layer.error < {"int8": 0.02, "int4": 0.2, "fp8": 0.1}[scheme] for layer in report.layers)


@pytest.mark.parametrize("scheme", ["", *SCHEMES])
def test_early_launch_is_bitwise_equal(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads what the one before has just written, in a graph whose replays follow one another."""
    from lmworks.kernels import triton_support

    layers: list[torch.nn.Module] = [layer(4096, 4096, torch.bfloat16) for _ in range(6)]
    if scheme:
        layers = [round_to_nearest(SCHEMES[scheme], one) for one in layers if isinstance(one, Linear)]
    start, norm = draw(1, 4096).bfloat16(), torch.ones(4096, device="cuda", dtype=torch.bfloat16)

    def work() -> Tensor:
        x, delta = start, start
        for one in layers:
            x, normed = add_rms_norm(x, delta, norm, 1e-5, "triton")
            delta = decode_linear(normed, one.weight) if isinstance(one, Linear) else one(normed)
        return delta

    with monkeypatch.context() as patched:
        patched.setattr(triton_support, "supports_pdl", lambda _device: False)
        wanted = []
        for seed in range(8):
            start.copy_(draw(1, 4096, seed=seed))
            wanted.append(work())
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    for seed in range(8):
        start.copy_(draw(1, 4096, seed=seed))
        for _ in range(3):
            graph.replay()
        assert torch.equal(found, wanted[seed])
