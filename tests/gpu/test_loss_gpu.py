"""The loss in place and numbers of 8 bits, as a GPU computes them: against fp64, torch's own ops and the formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.bench.kernels import bench_kernels
from lmworks.kernels.training import cross_entropy, float8
from lmworks.kernels.training.cross_entropy import IGNORE, WeightGradient, linear_cross_entropy, reference
from lmworks.kernels.training.float8 import E4M3, E5M2, dequantize, quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def results(loss_of: object, hidden: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    loss = loss_of(*leaves, targets)  # type: ignore[operator]
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("vocab", [50_257, 128_256, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_in_place_loss_error(vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks. Errors of loss and gradients against fp64 are at most twice those of torch's own."""
    tokens, width = 900, 128
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES_IN_PLACE", 320 * 128_256 * dtype.itemsize * vocab // 128_256)
    hidden, weight = drawn(tokens, width).to(dtype), drawn(vocab, width, seed=1).to(dtype) * 0.3
    targets = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(2)).cuda()
    targets[::7] = IGNORE
    exact = results(reference, hidden.double(), weight.double(), targets)
    plain = results(reference, hidden, weight, targets)
    ours = results(lambda *given: linear_cross_entropy(*given, implementation="triton"), hidden, weight, targets)
    assert [one.dtype for one in ours] == [torch.float32, dtype, dtype]
    for found, theirs, wanted in zip(ours, plain, exact, strict=True):
        assert off(found, wanted) < max(2 * off(theirs, wanted), 1e-5 if dtype == torch.float32 else 1e-4)
    with torch.no_grad():
        alone = linear_cross_entropy(hidden, weight, targets, implementation="triton")
    assert float(alone) == float(ours[0])


def test_fp32_weights_under_autocast_get_fp32_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of bf16 numbers that go on in fp32: nearer to fp64 than any sum of bf16 products."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES_IN_PLACE", 2 * 100 * 8192)
    hidden, weight = drawn(1000, 256), drawn(8192, 256, seed=1) * 0.1
    targets = torch.randint(0, 8192, (1000,)).cuda()
    exact = results(reference, hidden.bfloat16().double(), weight.bfloat16().double(), targets)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours = results(lambda *given: linear_cross_entropy(*given, implementation="triton"), hidden, weight, targets)
    assert ours[2].dtype == torch.float32
    assert off(ours[2], exact[2]) < 5e-3


def test_matmul_accumulates_into_buffer() -> None:
    total = WeightGradient(torch.full((512, 256), torch.nan, device="cuda"), fused=True)
    grads, states = drawn(6, 300, 512).bfloat16(), drawn(6, 300, 256, seed=1).bfloat16()
    for grad, hidden in zip(grads, states, strict=True):
        total.add(grad, hidden)
    exact = grads.flatten(0, 1).double().t() @ states.flatten(0, 1).double()
    assert off(total.rows(512), exact) < 1e-6


def test_in_place_loss_memory() -> None:
    """8,192 tokens of a vocabulary of 128k, as an unfused loss holds them: logits, their fp32, gradients."""
    hidden, weight = drawn(8192, 512).bfloat16(), drawn(128_256, 512, seed=1).bfloat16()
    targets = torch.randint(0, 128_256, (8192,)).cuda()
    peaks = {}
    for name in ("unfused", "triton"):
        loss_of = (
            reference if name == "unfused" else lambda *given: linear_cross_entropy(*given, implementation="triton")
        )
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results(loss_of, hidden, weight, targets)
        peaks[name] = torch.cuda.max_memory_allocated() - before
    assert peaks["triton"] < peaks["unfused"] / 4, peaks
    # One chunk, and both gradients as the weights are kept.
    assert peaks["triton"] < cross_entropy.CHUNK_BYTES_IN_PLACE + weight.nbytes + 2 * hidden.nbytes + 2**20, peaks


# --- 8 bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("options", [{"by_row": True}, {}, {"transposed": True}], ids=["rows", "tensor", "turned"])
@pytest.mark.parametrize("power", [False, True])
def test_kernels_round_like_torch(dtype: torch.dtype, options: dict[str, bool], power: bool) -> None:
    x = drawn(1000, 3001).bfloat16() * torch.logspace(-3, 3, 1000, device="cuda").bfloat16().unsqueeze(1)
    found = quantize(x, dtype, power_of_two=power, implementation="triton", **options)
    wanted = float8.reference(x, dtype, power_of_two=power, **options)
    assert torch.equal(found.scale, wanted.scale)
    assert torch.equal(found.values.view(torch.uint8), wanted.values.view(torch.uint8))
    if not options.get("transposed"):
        back = dequantize(found, torch.bfloat16, implementation="triton")
        assert torch.equal(back, dequantize(wanted, torch.bfloat16, implementation="torch"))


def test_kernels_keep_a_nan() -> None:
    x = torch.ones(2, 40, device="cuda")
    x[1, 7] = torch.nan
    for by_row in (False, True):
        assert bool(quantize(x, by_row=by_row, implementation="triton").values.float()[1, 7].isnan())


def test_fp8_matmul_equals_matmul_of_rounded_values() -> None:
    x, weight = drawn(512, 1024).bfloat16(), drawn(2048, 1024, seed=1).bfloat16()
    a, b = quantize(x), quantize(weight)
    exact = dequantize(a).double() @ dequantize(b).double().t()
    assert off(float8.fp8_linear(weight)(x), exact) < 5e-3


def test_fp8_head_loss_is_close() -> None:
    hidden, weight = drawn(2048, 512).bfloat16(), drawn(50_257, 512, seed=1).bfloat16() * 0.05
    targets = torch.randint(0, 50_257, (2048,)).cuda()
    plain, small = (
        results(
            lambda *given, fp8=fp8: linear_cross_entropy(*given, fp8=fp8, implementation="triton"),
            hidden,
            weight,
            targets,
        )
        for fp8 in (False, True)
    )
    assert off(small[0], plain[0]) < 1e-3
    for ours, theirs in zip(small[1:], plain[1:], strict=True):
        assert F.cosine_similarity(ours.flatten().double(), theirs.flatten().double(), dim=0) > 0.98


# --- the bench ------------------------------------------------------------------------------------------


def test_every_implementation_is_measured() -> None:
    """Failures are rows; only attention of PyTorch's that does not take this pattern may fail."""
    few = ("linear_cross_entropy", "attention", "fp8", "adamw")  # of which little has to be compiled
    facts = bench_kernels(torch.device("cuda"), ["tiny"], few, 2, 2, 128)
    failed = {(row["op"], row["implementation"]): row["error"] for row in facts["rows"] if row["error"]}
    assert {op for op, _ in failed} <= {"flash_attention"}, failed
    assert {name for _, name in failed} <= {"efficient", "flash", "cudnn"}, failed
    assert facts["winners"].keys() >= {"flash_attention", "linear_cross_entropy", "quantize", "dequantize"}
