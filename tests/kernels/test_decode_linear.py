"""Streaming linears, quantized formats and the batch-invariant product, against torch and against plain arithmetic.

Kernels run where there is a GPU, or under Triton's interpreter: TRITON_INTERPRET=1, with triton on the path. The
interpreter multiplies bf16 tiles wrongly and rounds to fp8 and bf16 wrongly, so there they run in fp16.
"""

from __future__ import annotations

import importlib.util
import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.kernels.inference import quantized
from lmworks.kernels.inference.linear import batch_invariant_linear, decode_linear

GPU = torch.cuda.is_available()
DEVICE, HALF = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float16)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
with_triton = pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU, or triton and TRITON_INTERPRET=1")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double().cpu() - wanted.double().cpu()).norm() / wanted.double().norm().cpu())


# --- formats --------------------------------------------------------------------------------------------


def test_int8_rounds_to_nearest_and_matmul_equals_torch() -> None:
    weight, x = draw(48, 64), draw(3, 64, seed=1)
    weight[7] = 0
    q, scale = quantized.int8_quantize(weight)
    assert q.dtype == torch.int8
    assert int(q.abs().max()) == 127
    error = (quantized.int8_dequantize(q, scale) - weight).abs()
    assert bool((error <= 0.5001 * scale.unsqueeze(1)).all())
    half = x.bfloat16()
    theirs = torch._weight_int8pack_mm(half, q, scale.bfloat16())
    assert off(quantized.int8_linear(half, q, scale), theirs) < 0.01  # they round the scale to bf16
    assert off(quantized.int8_linear(x, q, scale), x.double() @ (q.double() * scale.double().unsqueeze(1)).t()) < 1e-6


@pytest.mark.parametrize("group", [16, 128])
def test_int4_pack_unpack_round_trip(group: int) -> None:
    q = torch.randint(-8, 8, (6, 4 * group), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    words = quantized.int4_pack(q, group)
    assert words.shape == (6, group // 2)
    assert torch.equal(quantized.int4_unpack(words, group), q)
    word = int(words[2, group // 4 + 3]) % 2**32  # pair 1, place 3: of every stretch of group / 4 weights
    for stretch in range(8):
        assert (word >> 4 * stretch & 15) - 8 == int(q[2, 2 * group + stretch * group // 4 + 3])


def test_int4_levels_and_product() -> None:
    weight, x = draw(40, 256), draw(5, 256, seed=1)
    scale = quantized.int4_scale(weight, 64)
    q = quantized.int4_round(weight, scale)
    spread = scale.float().repeat_interleave(64, dim=1)
    # bf16 rounds a scale by up to 2⁻⁹, so the largest weight may lie that much above 7 steps.
    assert bool(((q * spread - weight).abs() <= (0.5 + 7 / 256) * spread).all())
    explicit = x.double() @ (q.double() * spread.double()).t()
    assert off(quantized.int4_linear(x, quantized.int4_pack(q, 64), scale), explicit) < 1e-6
    assert off(explicit, x.double() @ weight.double().t()) < 0.15


def test_int4_group_size() -> None:
    assert quantized.int4_group(4096) == 128
    assert quantized.int4_group(4096, 64) == 64
    assert quantized.int4_group(896) == 64
    assert quantized.int4_group(32) == 16
    assert quantized.int4_group(24) is None


def test_fp8_rounds_weights_and_activations_by_row() -> None:
    weight, x = (
        draw(48, 64) * torch.logspace(-3, 3, 48).unsqueeze(1),
        draw(3, 64, seed=1) * torch.tensor([[1], [99], [0]]),
    )
    q, scale = quantized.fp8_quantize(weight)
    assert float(q.float().abs().amax(dim=1).min()) == quantized.FP8_MAX
    assert bool(
        ((quantized.fp8_dequantize(q, scale) - weight).abs() <= weight.abs() / 16 + scale.unsqueeze(1) / 512).all()
    )
    p, s = quantized.fp8_quantize(x)
    explicit = (p.double() * s.double().unsqueeze(1)) @ (q.double() * scale.double().unsqueeze(1)).t()
    found = quantized.fp8_linear(x, q, scale)
    assert off(found, explicit) < 1e-6
    assert not found[2].any()
    assert torch.equal(quantized.fp8_linear(x.view(1, 3, 64), q, scale), found.view(1, 3, 48))


def test_fp8_matmul_equals_scaled_mm() -> None:
    x, (q, scale) = draw(32, 64, seed=1).to(DEVICE, torch.bfloat16), quantized.fp8_quantize(draw(48, 64).to(DEVICE))
    p, s = quantized.fp8_quantize(x)
    theirs = torch._scaled_mm(p, q.t(), s.unsqueeze(1), scale.unsqueeze(0), out_dtype=torch.bfloat16)
    assert off(quantized.fp8_linear(x, q, scale), theirs) < 3e-3


# --- kernels --------------------------------------------------------------------------------------------


@pytest.fixture(params=["whole", "shared"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`shared`: three programs add up one tile, in steps of 256."""
    from lmworks.kernels.inference import linear_triton, quantized_triton

    tiles = ((linear_triton, "few_rows_tile"), (quantized_triton, "int8_tile"), (quantized_triton, "int4_tile"))
    for module, name in tiles:
        plain = getattr(module, name)
        other = {"split": 3, "inputs": 256} if request.param == "shared" else {"split": 1}
        monkeypatch.setattr(module, name, lambda *shape, plain=plain, other=other: replace(plain(*shape), **other))
    yield
    if GPU or INTERPRETED:
        assert not linear_triton.split_k_counters(torch.device(DEVICE)).any()  # left as the next call expects them


@with_triton
@pytest.mark.parametrize(
    ("cut", "rows"),  # one row and three share a tile
    [
        ("whole", 1),
        ("shared", 70),
        *(pytest.param(cut, rows, marks=pytest.mark.slow) for cut, rows in product(("whole", "shared"), (1, 3, 70))),
    ],
    indirect=["cut"],
)
@pytest.mark.parametrize("kind", ["wide", "int8", "int4", "fp8"])
def test_kernels_equal_references(kind: str, rows: int, cut: None) -> None:
    """90 channels fill no tile, nor do 70 rows two. 1,156 inputs are five steps of 256, the last not full, and 1,024
    are four pairs of groups: of three programs the last has one, or none. What lies behind x is no number."""
    from lmworks.kernels.inference import linear_triton, quantized_triton

    inputs = 1024 if kind == "int4" else 1156
    padded = F.pad(draw(rows, inputs), (0, 0, 0, 1), value=float("nan")).to(DEVICE, HALF)
    x, weight = padded[:rows], draw(90, inputs, seed=1).to(DEVICE)
    if kind == "wide":
        found, wanted = linear_triton.linear(x, weight.to(HALF)), F.linear(x.double(), weight.to(HALF).double())
    elif kind == "int8":
        tensors = quantized.int8_quantize(weight)
        found, wanted = quantized_triton.int8_linear(x, *tensors), quantized.int8_reference(x.double(), *tensors)
    elif kind == "int4":
        tensors = int4(weight, 128)
        found, wanted = quantized_triton.int4_linear(x, *tensors), quantized.int4_reference(x.double(), *tensors)
    else:
        q, scale = quantized.fp8_quantize(weight)
        p, s = (each[:rows] for each in quantized.fp8_quantize(padded))
        found, wanted = (
            linear_triton.fp8_linear(p, s, q, scale, HALF),
            quantized.fp8_reference(x.float(), q, scale),
        )
    assert found.dtype == HALF
    assert off(found, wanted) < (4e-3 if GPU else 1e-3)


@with_triton
@pytest.mark.parametrize(
    ("cut", "kind"),  # fp8 shares its kernel with `wide`
    [
        *(("whole", kind) for kind in ("wide", "int8", "int4")),
        ("shared", "int4"),
        *(pytest.param("shared", kind, marks=pytest.mark.slow) for kind in ("wide", "int8", "fp8")),
        pytest.param("whole", "fp8", marks=pytest.mark.slow),
    ],
    indirect=["cut"],
)
def test_gated_matmul_equals_swiglu_bitwise(kind: str, cut: None) -> None:
    """38 gates and what they are for: the last tile of either is not full."""
    from lmworks.kernels import swiglu_triton
    from lmworks.kernels.inference import linear_triton, quantized_triton

    rows = 3
    x, weight = draw(rows, 768).to(DEVICE, HALF), draw(76, 768, seed=1).to(DEVICE)
    if kind == "wide":
        plain, gated = (linear_triton.linear(x, weight.to(HALF), gate) for gate in (False, True))
    elif kind == "int8":
        plain, gated = (
            quantized_triton.int8_linear(x, *quantized.int8_quantize(weight), gate) for gate in (False, True)
        )
    elif kind == "int4":
        plain, gated = (quantized_triton.int4_linear(x, *int4(weight, 128), gate) for gate in (False, True))
    else:
        pairs = (*quantized.fp8_quantize(x), *quantized.fp8_quantize(weight))
        plain, gated = (linear_triton.fp8_linear(*pairs, HALF, gate) for gate in (False, True))
    assert gated.shape == (rows, 38)
    assert torch.equal(gated, swiglu_triton.forward(*plain.chunk(2, dim=1)))


def int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    scale = quantized.int4_scale(weight, group)
    return quantized.int4_pack(quantized.int4_round(weight, scale), group), scale


@with_triton
def test_int8_dequantize_kernel_equals_reference() -> None:
    from lmworks.kernels.inference import quantized_triton

    q, scale = quantized.int8_quantize(draw(11, 1056))
    found = quantized_triton.int8_dequantize(q.to(DEVICE), scale.to(DEVICE), torch.float32)
    assert torch.equal(found.cpu(), quantized.int8_dequantize(q, scale))


@with_triton
@pytest.mark.parametrize("group", [16, 64])
def test_int4_dequantize_kernel_equals_reference(group: int) -> None:
    from lmworks.kernels.inference import quantized_triton

    words, scale = int4(draw(70, 256), group)
    found = quantized_triton.int4_dequantize(words.to(DEVICE), scale.to(DEVICE), torch.float32)
    assert torch.equal(found.cpu(), quantized.int4_dequantize(words, scale))


@with_triton
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("kind", ["int8", "int8 without words", "int4", "int4 in small groups", "fp8"])
def test_every_shape_has_a_kernel(kind: str, gate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed below DEQUANTIZE_MIN_ROWS rows; else, and where the kernel does not take the inputs, by cuBLAS."""
    from lmworks.kernels.training import float8_triton

    monkeypatch.setattr(quantized, "plain", lambda _x: False)
    monkeypatch.setattr(quantized, "DEQUANTIZE_MIN_ROWS", 4)
    monkeypatch.setattr(quantized, "SCALED_MM_MIN_ROWS", 4)
    monkeypatch.setattr(float8_triton, "quantize_rows", lambda x, _dtype: quantized.fp8_quantize(x))
    name, *small = kind.split(" ", 1)
    weight = draw(48, 130 if name == "int8" and small else 128, seed=1).to(DEVICE)
    if name == "int4":
        tensors = int4(weight, 16 if small else 64)
    else:
        tensors = (quantized.int8_quantize if name == "int8" else quantized.fp8_quantize)(weight)
    apply, formula = getattr(quantized, f"{name}_linear"), getattr(quantized, f"{name}_reference")
    for rows in (3, 4):
        half = torch.bfloat16 if (name, rows) == ("fp8", 4) else HALF
        x = draw(rows, 2, weight.shape[1]).to(DEVICE, half)[:, :1]
        wanted = formula(x.float(), *tensors)
        if gate:
            wanted = F.silu(wanted[..., :24]) * wanted[..., 24:]
        found = apply(x, *tensors, gate=gate)
        assert (found.dtype, found.shape) == (x.dtype, wanted.shape)
        assert off(found, wanted) < 1e-2


def ptx(text: str, words: list[int], results: int) -> list[list[float]]:
    """The two numbers that this PTX leaves in each of its registers, given two words."""
    held = dict(zip((f"${results}", f"${results + 1}"), words, strict=True))

    def numbers(pair: int) -> list[float]:
        return [struct.unpack("<f", struct.pack("<HH", 0, pair >> at & 0xFFFF))[0] for at in (0, 16)]

    for line in text.strip("{}\n").split("\n"):
        op, _, rest = line.rstrip(";").partition(" ")
        to, *names = rest.split(", ")
        if op == ".reg":
            continue
        a, *b = (held[name] if name in held else int(name, 0) for name in names)
        if op == "mov.b32":
            held[to] = a
        elif op == "shr.b32":
            held[to] = a >> b[0]
        elif op == "prmt.b32":
            both = struct.pack("<II", a, b[0])
            held[to] = int.from_bytes(bytes(both[b[1] >> 4 * i & 7] for i in range(4)), "little")
        elif op == "lop3.b32":
            assert b[2] == 0xEA
            held[to] = a & b[0] | b[1]
        else:
            assert op == "fma.rn.bf16x2"
            sums = [x * y + z for x, y, z in zip(*map(numbers, (a, *b)), strict=True)]
            low, high = (struct.unpack("<HH", struct.pack("<f", each)) for each in sums)
            assert low[0] == high[0] == 0, "a bf16 holds it"
            held[to] = low[1] | high[1] << 16
    return [numbers(held[f"${t}"]) for t in range(results)]


def test_packed_words_are_unpacked() -> None:
    """By PTX, which the interpreter does not run: every byte in every place."""
    pytest.importorskip("triton")
    from lmworks.kernels.inference import quantized_triton

    for first in range(256):
        pair = [bytes((first + by * i) % 256 for i in range(4)) for by in (1, 77)]
        words = [int.from_bytes(each, "little") for each in pair]
        signed = [struct.unpack("4b", each) for each in pair]
        assert ptx(quantized_triton.int8_unpack_ptx(), words, 4) == [list(both) for both in zip(*signed, strict=True)]
        assert ptx(quantized_triton.int4_unpack_ptx(), words, 8) == [
            [(word >> 4 * t & 15) - 8 for word in words] for t in range(8)
        ]


def test_small_linear_equals_linear() -> None:
    x, weight, bias = draw(2, 3, 256).to(DEVICE, HALF), draw(90, 256).to(DEVICE, HALF), draw(90).to(DEVICE, HALF)
    assert off(decode_linear(x, weight, bias), F.linear(x.double(), weight.double(), bias.double())) < 4e-3


@pytest.mark.parametrize("rows", [7, 8, 32, 33])
@pytest.mark.parametrize("biased", [False, True])
def test_transposed_cpu_matmul_gives_same_result(rows: int, biased: bool) -> None:
    x, weight, bias = draw(rows, 1, 96), draw(70, 96, seed=1), draw(70, seed=2) if biased else None
    found = decode_linear(x, weight, bias)
    assert found.is_contiguous()
    torch.testing.assert_close(found, F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


# --- rows that do not know of each other ------------------------------------------------------------------


def test_batch_invariance_on_cpu() -> None:
    x, weight, bias = draw(70, 200), draw(90, 200, seed=1), draw(90, seed=2)
    whole = batch_invariant_linear(x.view(7, 10, 200), weight, bias)
    assert off(whole.view(70, 90), F.linear(x.double(), weight.double(), bias.double())) < 1e-6
    for start, end in ((0, 1), (13, 14), (5, 69)):
        assert torch.equal(batch_invariant_linear(x[start:end], weight, bias), whole.view(70, 90)[start:end])
    assert batch_invariant_linear(x[:0], weight).shape == (0, 90)
    half = 100 * x.half(), 100 * weight.half()  # whose products are more than fp16 holds
    assert off(batch_invariant_linear(*half, fp32_out=True), F.linear(*(each.double() for each in half))) < 1e-6


@with_triton
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), HALF])
def test_batch_invariance_of_kernel(dtype: torch.dtype) -> None:
    """1,100 inputs are split along K: over programs up to 64 rows, within one program for 70 rows."""
    from lmworks.kernels.inference.linear_triton import batch_invariant_tile, launch_batch_invariant

    assert batch_invariant_tile(90, 1100, dtype.itemsize).split > 1
    x, weight, bias = (draw(*s, seed=i).to(DEVICE, dtype) for i, s in enumerate(((70, 1100), (90, 1100), (90,))))
    whole = launch_batch_invariant(x, weight, bias)
    assert off(whole, F.linear(x.double(), weight.double(), bias.double())) < (1e-6 if dtype == torch.float32 else 4e-3)
    for start, end in ((0, 1), (13, 14), (40, 70)):
        assert torch.equal(launch_batch_invariant(x[start:end], weight, bias), whole[start:end])
    wide = launch_batch_invariant(x, weight, bias, fp32_out=True)
    assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), whole)
