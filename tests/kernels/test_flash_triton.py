"""Flash attention as a GPU runs it, through Triton's interpreter (`test_interpreted` starts these with it).

Against PyTorch's own attention and its autograd, in fp64. Tiles are small, so that a short sequence has some of every
kind: seen in full, across the diagonal, at the edge of a window or of a document, and not seen at all.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.kernels.training.flash_attention import DocumentBounds, flash_attention
from lmworks.kernels.training.flash_forward_triton import PASSES, Tiles, choose_tiles
from lmworks.model import GPT
from lmworks.spec import ModelSpec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
if INTERPRETED:
    from lmworks.kernels.training import flash_backward_triton, flash_forward_triton
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")


@dataclass(frozen=True)
class Case:
    seq: int
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 16
    window: int = 0
    lengths: tuple[int, ...] = ()  # of the documents of the first sequence; another is whole
    batch: int = 1
    tiles: Tiles = Tiles(16, 16, 4, 1)

    def documents(self) -> Tensor | None:
        if not self.lengths:
            return None
        first = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))
        return torch.stack((first, torch.zeros_like(first)))[: self.batch]

    def inputs(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        """q, k, v and the gradient of the result."""
        rng = torch.Generator().manual_seed(self.seq)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return tuple(torch.randn(self.batch, self.seq, n, self.head_dim, generator=rng).to(dtype) for n in heads)


CASES = {
    "heads that share keys": Case(37, heads=2, head_dim=24),
    "wide tiles of keys": Case(40, tiles=Tiles(16, 32, 4, 1)),
    "wide tiles of queries, window": Case(45, window=13, tiles=Tiles(32, 16, 4, 1)),
    "documents": Case(36, lengths=(1, 3, 20, 12)),
    "documents, window": Case(40, 1, 1, 16, 11, (4, 31, 5), batch=2),
}


def expected(case: Case, *given: Tensor) -> list[Tensor]:
    """The result and the gradients of q, k and v, by SDPA in fp64."""
    q, k, v = (x.double().transpose(1, 2).requires_grad_() for x in given[:3])
    near = torch.ones(case.seq, case.seq, dtype=torch.bool).tril()
    if case.window:
        near &= near.triu(1 - case.window)
    mask = near.expand(q.shape[0], 1, -1, -1)
    if (documents := case.documents()) is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return [x.transpose(1, 2) for x in (out, *torch.autograd.grad(out, (q, k, v), given[3].double().transpose(1, 2)))]


def found(case: Case, *given: Tensor) -> list[Tensor]:
    """The same by the kernels, with the tiles of the case."""
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    with (
        patch.object(flash_forward_triton, "choose_tiles", lambda *_: case.tiles),
        patch.object(flash_backward_triton, "choose_tiles", lambda *_: case.tiles),
    ):
        out = flash_attention(q, k, v, window=case.window, documents=case.documents(), implementation="triton")
        return [out, *torch.autograd.grad(out, (q, k, v), given[3])]


def compare(case: Case, dtype: torch.dtype, atol: float) -> None:
    given = case.inputs(dtype)
    for name, want, got in zip(("out", "dq", "dk", "dv"), expected(case, *given), found(case, *given), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", CASES)
def test_attention_and_gradients_equal_sdpa(name: str) -> None:
    compare(CASES[name], torch.float32, 1e-5)


def test_rounding_in_16_bits() -> None:
    """Weights and their gradients are rounded to 11 bits before a product, results once more. (The interpreter has no
    products in bf16; a GPU does those.)"""
    compare(Case(20), torch.float16, 4e-3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_random_shapes(seed: int) -> None:
    draw = random.Random(seed)
    seq = draw.randint(1, 130)
    cuts = sorted({0, seq, *(draw.randint(0, seq) for _ in range(draw.choice((0, 0, 4))))})
    kv_heads = draw.choice((1, 2))
    compare(
        Case(
            seq,
            heads=kv_heads * draw.choice((1, 3)),
            kv_heads=kv_heads,
            head_dim=draw.choice((32, 33, 64, 80, 128, 256)),
            window=draw.choice((0, 0, draw.randint(1, seq))),
            lengths=tuple(b - a for a, b in itertools.pairwise(cuts)) if len(cuts) > 2 else (),
            batch=draw.choice((1, 2)),
            tiles=Tiles(draw.choice((16, 32, 64)), draw.choice((16, 32, 64)), 4, 1),
        ),
        torch.float32,
        2e-5,
    )


def test_log_sum_exp() -> None:
    case = CASES["heads that share keys"]
    q, k, v, _ = case.inputs()
    _, lse = flash_forward_triton.launch(q, k, v, None, 0, 0.5, case.tiles)
    scores = 0.5 * torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(2, dim=2))
    hidden = torch.ones(case.seq, case.seq, dtype=torch.bool).triu(1)
    torch.testing.assert_close(lse.double(), scores.masked_fill(hidden, -torch.inf).logsumexp(-1), rtol=0, atol=1e-5)


def test_unaligned_inputs_are_copied() -> None:
    """Heads cut out of one projection, at an address that is no multiple of 16, and a gradient that was spread out."""
    case = Case(20, heads=2, head_dim=6)
    _, _, _, grad = given = case.inputs()
    row = torch.cat([torch.zeros(1, 20, 1), *(x.flatten(2) for x in given[:3])], dim=2)
    q, k, v = (x.unflatten(2, (-1, 6)) for x in row[..., 1:].split((12, 6, 6), dim=2))
    spread = grad[:, :, :1].expand(-1, -1, 2, -1)
    want = expected(case, q, k, v, spread)
    for got, right in zip(found(case, q, k, v, spread), want, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter
def test_tiles_of_other_documents_are_not_read() -> None:
    """Not even for a weight of zero: zero times NaN is NaN. The last tile of queries begins its walk at key 16."""
    case = Case(48, lengths=(20, 28))
    q, k, v, _ = case.inputs()
    k[:, :16] = v[:, :16] = torch.nan
    bounds = DocumentBounds.of(case.documents())
    out, lse = flash_forward_triton.launch(q, k, v, bounds.starts, 0, 0.25, case.tiles)
    assert out[:, 32:].isfinite().all()
    assert lse[..., 32:].isfinite().all()


def test_bounds_of_documents() -> None:
    bounds = DocumentBounds.of(torch.tensor([[0, 0, 3, 4, 4], [1, 1, 1, 1, 1]]))
    assert bounds.starts.tolist() == [[0, 0, 2, 3, 3], [0] * 5]
    assert bounds.ends.tolist() == [[2, 2, 3, 5, 5], [5] * 5]


@pytest.mark.parametrize("name", PASSES)
def test_every_head_has_its_tiles(name: str) -> None:
    for head_dim in (1, 8, 16, 24, 64, 96, 128, 200, 256):
        width = flash_forward_triton.width_of(torch.empty(1, 1, 1, head_dim))
        assert width >= head_dim
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            tiles = choose_tiles(name, width, dtype)
            assert min(tiles.rows, tiles.keys) >= 16 and tiles.warps in (4, 8)


def small(**changes: object) -> ModelSpec:
    return ModelSpec(vocab=32, hidden=32, layers=2, heads=2, kv_heads=1, context=20, ffn=32, **changes)


def gradients_of(spec: ModelSpec, recompute: str = "none") -> dict[str, Tensor]:
    model = GPT(spec, seed=1)
    model.recompute = recompute
    tokens = torch.arange(20).unsqueeze(0)
    documents = torch.tensor([[0] * 9 + [1] * 11])
    _, loss = model(tokens, tokens.roll(-1, 1), documents=documents)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_training_with_selective_recompute_runs_it_once() -> None:
    want = gradients_of(small(attention="reference"))
    with patch.object(flash_forward_triton, "launch", wraps=flash_forward_triton.launch) as launched:
        got = gradients_of(small(attention="flash"), "selective")
    assert launched.call_count == 2  # once a layer
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("documents", [False, True])
def test_custom_op_passes_opcheck(documents: bool) -> None:
    """Schema, shapes without values, autograd, and the whole of it traced with sizes left open."""
    q, k, v, _ = (x.requires_grad_() for x in Case(20).inputs())
    bounds = DocumentBounds.of(torch.tensor([[0] * 9 + [1] * 11])) if documents else None
    edges = (None, None) if bounds is None else (bounds.starts, bounds.ends)
    torch.library.opcheck(torch.ops.lmworks.flash_attention.default, (q, k, v, *edges, 0, 0.2))


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    q, k, v, grad = (x.requires_grad_() for x in Case(20).inputs())

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q * 2, k, v, implementation="triton").sin()

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for one, other in zip(
        torch.autograd.grad(compiled(q, k, v), (q, k, v), grad),
        torch.autograd.grad(block(q, k, v), (q, k, v), grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
