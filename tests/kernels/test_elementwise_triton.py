"""Norms, rotations and SwiGLU with their backward passes, through Triton's interpreter (see `test_interpreted`).

The references are PyTorch's own formulas under autograd, in fp64 where the kernels compute in fp32.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.kernels import dispatch
from lmworks.kernels.rms_norm import add_rms_norm, rms_norm
from lmworks.kernels.rope import rotate, rotate_qk
from lmworks.kernels.swiglu import swiglu
from lmworks.kernels.training.permute import unpermute
from lmworks.model import GPT, rope
from lmworks.spec import ModelSpec, SpecError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
if INTERPRETED:
    from lmworks.kernels import rms_norm_triton
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")

EPS = 1e-5
BF16, FP32 = torch.bfloat16, torch.float32
# (rows…, hidden): a row alone, rows in tiles of which the last is not full, a width that is no power of two, heads
SHAPES = [(1, 1300), (3, 2, 300), (37, 64), (2, 5, 3, 24)]


def random(*shape: int, seed: int, dtype: torch.dtype = FP32) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng).to(dtype).requires_grad_()


def results(function: Callable[..., Tensor | tuple[Tensor, ...]], *given: Tensor, seed: int = 9) -> list[Tensor]:
    """What the function gives, then the gradient of everything that it was given, for random gradients of results."""
    given = tuple(x.detach().clone().requires_grad_() for x in given)
    out = function(*given)
    out = out if isinstance(out, tuple) else (out,)
    rng = torch.Generator().manual_seed(seed)
    grads = [torch.randn(x.shape, generator=rng).to(BF16).to(x.dtype) for x in out]
    torch.autograd.backward(out, grads)
    return [x.detach() for x in (*out, *(x.grad for x in given if x.grad is not None))]


def close(mine: list[Tensor], theirs: list[Tensor], dtypes: list[torch.dtype]) -> None:
    """Right to the last bits of fp32. Of bf16 to two of them: the interpreter cuts off where a GPU rounds, and once
    more where something is rounded on the way (the stream, silu)."""
    assert [x.dtype for x in mine] == dtypes
    for one, other in zip(mine, theirs, strict=True):
        largest = other.abs().max().item()
        step = {FP32: 4e-6, BF16: 2**-6}[one.dtype]
        torch.testing.assert_close(one.double(), other.double(), rtol=step, atol=step / 4 * largest)


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = random(*shape, seed=0), random(shape[-1], seed=1)
    mine = results(lambda x, w: rms_norm(x, w, EPS, "triton"), x, weight)
    theirs = results(lambda x, w: F.rms_norm(x, w.shape, w, EPS), x.double(), weight.double())
    close(mine, theirs, [FP32] * 3)


def test_heads_in_bf16_beside_weights_in_fp32() -> None:
    """As under autocast; the heads are a view of a wider projection."""
    wide, weight = random(7, 5 * 24, seed=2, dtype=BF16), random(24, seed=3)
    mine = results(lambda x, w: rms_norm(x[:, :72].unflatten(-1, (3, 24)), w, EPS, "triton"), wide, weight)
    theirs = results(
        lambda x, w: F.rms_norm(x[:, :72].unflatten(-1, (3, 24)), w.shape, w, EPS), wide.double(), weight.double()
    )
    close(mine, theirs, [BF16, BF16, FP32])


@pytest.mark.parametrize(("stream", "added"), [(FP32, FP32), (BF16, BF16), (FP32, BF16), (BF16, FP32)])
def test_add_rms_norm(stream: torch.dtype, added: torch.dtype) -> None:
    """Of quarters, whose sums bf16 holds: what the interpreter cuts off them would be in the norm."""
    x, delta = (random(5, 130, seed=seed).detach().mul(4).round().div(4) for seed in (4, 5))
    x, delta, weight = x.to(stream), delta.to(added), random(130, seed=6)
    close(
        [*add_rms_norm(x, delta, weight, EPS, "triton")],
        added_norm(x, delta, weight),
        [torch.result_type(x, delta)] * 2,
    )


def added_norm(x: Tensor, delta: Tensor, weight: Tensor) -> list[Tensor]:
    """In fp64."""
    total, weight = x.detach().double() + delta.detach().double(), weight.detach().double()
    return [total, F.rms_norm(total, weight.shape, weight, EPS)]


def test_add_rms_norm_names_its_implementations() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(SpecError, match="add_rms_norm has no implementation 'tritn': torch or triton"):
        add_rms_norm(x, x, torch.ones(3), EPS, "tritn")


def test_weight_gradient_sums_over_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles of rows than programs: each takes several, in an order that is always the same."""
    x, weight = random(37, 24, seed=10), random(24, seed=11)
    monkeypatch.setattr(rms_norm_triton, "multiprocessors", lambda _device: 2)
    tiles = rms_norm_triton.Tiles(elements=128, resident=1)
    _, _, r = rms_norm_triton.forward(x, None, weight, EPS, tiles)
    grad = random(37, 24, seed=12)
    found = [rms_norm_triton.backward(grad, x, weight, r, tiles) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    wide = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    F.rms_norm(wide[0], (24,), wide[1], EPS).backward(grad.detach().double())
    close([x.detach() for x in found[0]], [wide[0].grad, wide[1].grad], [FP32, FP32])


def test_batch_invariance() -> None:
    """What an engine with `batch_invariant` relies on."""
    x, weight = random(33, 64, seed=13).detach(), random(64, seed=14).detach()
    alone = torch.cat([rms_norm(row, weight, EPS, "triton") for row in x.split(1)])
    assert torch.equal(rms_norm(x, weight, EPS, "triton"), alone)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "dtype"), [(4, 2, 16, BF16), (18, 3, 24, FP32)])
def test_rope(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    spec = ModelSpec.from_preset("tiny", hidden=heads * head_dim, heads=heads, kv_heads=kv_heads)
    positions = torch.tensor([[0, 1, 0], [7, 2, 900]])  # of packed documents; then those of one row for both
    q, k = random(2, 3, heads, head_dim, seed=15, dtype=dtype), random(2, 3, kv_heads, head_dim, seed=16, dtype=dtype)
    for turn in (rope.tables(spec, positions), rope.tables(spec, positions[1])):
        wide = [table.double() for table in turn]
        mine = results(lambda q, k, turn=turn: rotate_qk(q, k, *turn, implementation="triton"), q, k)
        theirs = results(lambda q, k, wide=wide: (rotate(q, *wide), rotate(k, *wide)), q.double(), k.double())
        close(mine, theirs, [dtype] * 4)


def test_rope_reads_strided_heads() -> None:
    """Views of one projection, in a flat batch, and gradients in another order, as attention gives them."""
    turn = rope.tables(ModelSpec.from_preset("tiny", hidden=64, heads=4), torch.tensor([4, 0, 9]))
    qkv = random(3, 8 * 16, seed=17)

    def split(x: Tensor, turned: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        q, k, _ = x.unflatten(-1, (8, 16)).split((4, 2, 2), dim=1)
        q, k = turned(q, k)
        return q.transpose(0, 1) * 1, k.transpose(0, 1) * 1

    mine = results(lambda x: split(x, lambda q, k: rotate_qk(q, k, *turn, implementation="triton")), qkv)
    theirs = results(lambda x: split(x, lambda q, k: (rotate(q, *turn), rotate(k, *turn))), qkv)
    close(mine, theirs, [FP32] * 3)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_swiglu(dtype: torch.dtype) -> None:
    """Also of two halves that lie side by side, and of values at which exp overflows."""
    gate, up = random(2, 3, 1030, seed=18, dtype=dtype), random(2, 3, 1030, seed=19, dtype=dtype)
    with torch.no_grad():
        gate[0, 0, :2] = torch.tensor([-200.0, 200.0])
    mine = results(lambda g, u: swiglu(g, u, "triton"), gate, up)
    theirs = results(lambda g, u: F.silu(g) * u, gate.double(), up.double())
    # In bf16 silu is rounded before the product, as PyTorch rounds it.
    if dtype == BF16:
        theirs[0] = F.silu(gate.detach()) * up.detach()
        theirs[2] = results(lambda g, u: F.silu(g) * u, gate, up)[2]
    close(mine, theirs, [dtype] * 3)
    both = torch.cat((gate, up), dim=-1)
    assert torch.equal(results(lambda b: swiglu(*b.chunk(2, dim=-1), "triton"), both)[0], mine[0])


@pytest.mark.parametrize(
    "recompute", [*(pytest.param(p, marks=pytest.mark.slow) for p in ("none", "full")), "selective"]
)
def test_model_with_these_kernels_equals_torch(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients are those of PyTorch's formulas, also where a block is computed again."""
    spec = ModelSpec.from_preset("tiny", layers=1, hidden=32, heads=4, kv_heads=2, ffn=40, qk_norm=True)
    tokens = torch.randint(0, spec.vocab, (1, 4), generator=torch.Generator().manual_seed(21))
    passed: list[str] = []

    def fastest(op: str, _device: torch.device, **_shape: int) -> str:
        passed.append(op)
        return "triton" if op in ("rms_norm", "rope", "swiglu") else "torch"

    models = [GPT(spec), GPT(spec)]
    for model in models:
        _, model.loss = model(tokens[:, :-1], tokens[:, 1:])
        model.loss.backward()
        monkeypatch.setattr(dispatch, "fastest", fastest)
        models[1].recompute = recompute
    assert {"rms_norm", "rope", "swiglu"} <= set(passed)
    torch.testing.assert_close(models[1].loss, models[0].loss, rtol=1e-6, atol=0)
    for (name, one), other in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, *range(3, 20)))])
def test_random_shapes(seed: int) -> None:
    draw = Random(seed)
    rows, width, kv_heads, half = draw.randint(1, 40), draw.randint(1, 600), draw.randint(1, 5), draw.randint(1, 40)
    x, delta = random(rows, width, seed=seed), random(rows, width, seed=seed + 100)
    weight = random(width, seed=seed + 200)
    wide = x.double(), delta.double(), weight.double()
    close([*add_rms_norm(x, delta, weight, EPS, "triton")], added_norm(x, delta, weight), [FP32] * 2)
    mine = results(lambda x, w: rms_norm(x, w, EPS, "triton"), x, weight)
    close(mine, results(lambda x, w: F.rms_norm(x, w.shape, w, EPS), wide[0], wide[2]), [FP32] * 3)
    mine = results(lambda g, u: swiglu(g, u, "triton"), x, delta)
    close(mine, results(lambda g, u: F.silu(g) * u, *wide[:2]), [FP32] * 3)
    heads = kv_heads * draw.randint(1, 9)
    q, k = random(2, rows, heads, 2 * half, seed=seed), random(2, rows, kv_heads, 2 * half, seed=seed + 100)
    turn = rope.tables(ModelSpec.from_preset("tiny", head_dim=2 * half), torch.arange(rows))
    mine = results(lambda q, k: rotate_qk(q, k, *turn, implementation="triton"), q, k)
    close(mine, results(lambda q, k: (rotate(q, *turn), rotate(k, *turn)), q.double(), k.double()), [FP32] * 4)


def test_zero_rows() -> None:
    x, weight = torch.zeros(0, 40, requires_grad=True), random(40, seed=20)
    _, grad_x, grad_weight = results(lambda x, w: rms_norm(x, w, EPS, "triton"), x, weight)
    assert grad_x.shape == (0, 40)
    assert not grad_weight.any()
    assert swiglu(x, x, "triton").shape == (0, 40)


def test_unknown_implementation_is_rejected() -> None:
    with pytest.raises(SpecError, match=r"swiglu has no implementation 'cuda'"):
        swiglu(torch.zeros(1, 2), torch.zeros(1, 2), "cuda")


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("tokens, top_k, hidden", [(7, 3, 40), (5, 1, 2100)])
def test_unpermute(tokens: int, top_k: int, hidden: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Against plain indexing; without weights the rows of a token are added."""
    order = torch.randperm(tokens * top_k, generator=torch.Generator().manual_seed(1))
    back = order.argsort()
    rows = random(tokens * top_k, hidden, seed=20, dtype=dtypes[0])
    weights = random(tokens, top_k, seed=21, dtype=dtypes[1])

    def plain(rows: Tensor, weights: Tensor) -> Tensor:
        return (rows[back].unflatten(0, (-1, top_k)) * weights.unsqueeze(-1)).sum(dim=1)

    mine = results(lambda r, w: unpermute(r, w, order, back, top_k, "triton"), rows, weights)
    close(mine, results(plain, rows.double(), weights.double()), [dtypes[1], *dtypes])
    mine = results(lambda r: unpermute(r, None, order, back, top_k, "triton"), rows)
    ones = torch.ones(tokens, top_k, dtype=torch.float64)
    close(mine, results(lambda r: plain(r, ones), rows.double()), [dtypes[0]] * 2)
