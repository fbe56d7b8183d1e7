"""Norms, rotations and SwiGLU with their backward passes on a GPU, against PyTorch's formulas in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.kernels import dispatch
from lmworks.kernels.rms_norm import add_rms_norm, rms_norm
from lmworks.kernels.rope import rotate, rotate_qk
from lmworks.kernels.swiglu import swiglu, swiglu_packed
from lmworks.model import GPT, rope
from lmworks.spec import ModelSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EPS = 1e-5
BF16, FP32 = torch.bfloat16, torch.float32
FUSED = ("rms_norm", "rope", "swiglu")
# Rows and their width: heads, no power of two, not a multiple of 16 bytes, wide, and more rows than programs
SHAPES = [(700, 64), (5, 768), (37, 1300), (3, 2, 4097), (9, 8192), (20_000, 128), (1, 16384)]


def random(*shape: int, seed: int, dtype: torch.dtype = FP32) -> Tensor:
    rng = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=rng, device="cuda").to(dtype)


def results(function: Callable[..., Tensor | tuple[Tensor, ...]], *given: Tensor) -> list[Tensor]:
    """What the function gives, then the gradients of what it was given, for random gradients of results."""
    given = tuple(x.detach().clone().requires_grad_() for x in given)
    out = function(*given)
    out = out if isinstance(out, tuple) else (out,)
    rng = torch.Generator("cuda").manual_seed(9)
    grads = [torch.randn(x.shape, generator=rng, device="cuda").to(BF16).to(x.dtype) for x in out]
    torch.autograd.backward(out, grads)
    return [x.detach() for x in (*out, *(x.grad for x in given))]


def close(mine: list[Tensor], theirs: list[Tensor], dtypes: list[torch.dtype], roundings: int = 1) -> None:
    """Against fp64: computed in fp32 and rounded so many times."""
    assert [x.dtype for x in mine] == dtypes
    for one, other in zip(mine, theirs, strict=True):
        step = roundings * {FP32: 4e-6, BF16: 2**-8}[one.dtype]
        largest = other.abs().max().item()
        torch.testing.assert_close(one.double(), other.double(), rtol=step, atol=max(4e-6, step / 8) * largest)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, seed=0, dtype=dtype), random(shape[-1], seed=1)
    mine = results(lambda x, w: rms_norm(x, w, EPS, "triton"), x, weight)
    theirs = results(lambda x, w: F.rms_norm(x, w.shape, w, EPS), x.double(), weight.double())
    close(mine, theirs, [dtype, dtype, FP32])
    again = results(lambda x, w: rms_norm(x, w, EPS, "triton"), x, weight)
    assert all(torch.equal(one, other) for one, other in zip(mine, again, strict=True))


@pytest.mark.parametrize("shape", SHAPES[1:5])
@pytest.mark.parametrize(("stream", "added"), [(FP32, FP32), (BF16, BF16), (FP32, BF16)])
def test_add_rms_norm(stream: torch.dtype, added: torch.dtype, shape: tuple[int, ...]) -> None:
    x, delta = random(*shape, seed=2, dtype=stream), random(*shape, seed=3, dtype=added)
    weight = random(shape[-1], seed=4)
    total, normed = add_rms_norm(x, delta, weight, EPS, "triton")
    assert torch.equal(total, x + delta)
    close([normed], [F.rms_norm(total.double(), weight.shape, weight.double(), EPS)], [stream])


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (12, 12, 64), (9, 3, 80), (33, 1, 256)])
def test_rope(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    spec = ModelSpec.from_preset("tiny", hidden=heads * head_dim, heads=heads, kv_heads=kv_heads)
    q, k = random(2, 67, heads, head_dim, seed=5, dtype=dtype), random(2, 67, kv_heads, head_dim, seed=6, dtype=dtype)
    packed = torch.arange(67, device="cuda").repeat(2, 1) % torch.tensor([[67], [13]], device="cuda")
    for positions in (packed, packed[1]):
        turn = rope.tables(spec, positions)
        wide = [table.double() for table in turn]
        mine = results(lambda q, k, turn=turn: rotate_qk(q, k, *turn, implementation="triton"), q, k)
        theirs = results(lambda q, k, wide=wide: (rotate(q, *wide), rotate(k, *wide)), q.double(), k.double())
        close(mine, theirs, [dtype] * 4)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 1030), (700, 14336)])
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate, up = random(*shape, seed=7, dtype=dtype), random(*shape, seed=8, dtype=dtype)
    gate[0, 0] = -200.0
    mine = results(lambda g, u: swiglu(g, u, "triton"), gate, up)
    theirs = results(lambda g, u: F.silu(g) * u, gate.double(), up.double())
    close(mine, theirs, [dtype] * 3, roundings=2)  # silu is rounded before the product, as PyTorch does
    assert torch.equal(swiglu_packed(torch.cat((gate, up), dim=-1)), mine[0])


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_model_with_these_kernels_under_autocast(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to fp32 as PyTorch's formulas under autocast are."""
    spec = ModelSpec.from_preset("tiny", qk_norm=True)
    tokens = torch.randint(0, spec.vocab, (3, 65), generator=torch.Generator().manual_seed(1)).cuda()

    def gradients(model: GPT, autocast: bool) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            _, loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    exact, plain = gradients(GPT(spec).cuda(), False), gradients(GPT(spec).cuda(), True)
    monkeypatch.setattr(dispatch, "fastest", lambda op, _device, **_shape: "triton" if op in FUSED else "torch")
    model = GPT(spec).cuda()
    model.recompute = recompute
    mine = gradients(model, True)
    assert (mine - exact).norm() < 1.3 * (plain - exact).norm()
