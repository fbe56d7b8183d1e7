"""One sequence over several ranks: attention, loss and gradients are those of one rank that holds it whole."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import on_ranks
from torch import Tensor

from lmworks.data import Batch
from lmworks.model.attention import make_pattern, reference
from lmworks.parallel import context, ring
from lmworks.parallel.mesh import Mesh
from lmworks.spec import Grid, ModelSpec, ParallelSpec

BATCH, SEQ = 2, 48
PATTERNS: dict[str, dict[str, Any]] = {
    "causal": {},
    "grouped": {"kv_heads": 2},
    "one kv head": {"kv_heads": 1},
    "window": {"sliding_window": 7},
    "documents": {},
    "alibi": {"positions": "alibi"},
    "all at once": {"positions": "alibi", "sliding_window": 9, "kv_heads": 2},
}


def make_spec(**changes: Any) -> ModelSpec:
    return ModelSpec(layers=2, hidden=32, heads=4, vocab=64, context=SEQ, init_std=0.3, **changes)


def make_batch(documents: bool) -> Batch:
    """Rows whose documents end at different places; every fifth target is not counted."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (BATCH, SEQ + 1), generator=draw)
    targets = tokens[:, 1:].clone()
    targets[:, ::5] = -100
    ends = torch.rand((BATCH, SEQ), generator=draw) < 0.12
    return Batch(tokens[:, :-1], targets, ends.cumsum(dim=1) if documents else None)


def make_layout(cp: int, method: str) -> tuple[ParallelSpec, Mesh]:
    parallel = ParallelSpec(cp=cp, cp_method=method)
    return parallel, Mesh(Grid.of(parallel), "cpu")


def far(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def draw_qkv(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and the gradient of the result, for the whole sequence."""
    draw = torch.Generator().manual_seed(2)
    heads = (spec.heads, spec.kv_heads, spec.kv_heads, spec.heads)
    return [torch.randn(BATCH, SEQ, n, spec.head_dim, generator=draw).to(dtype) for n in heads]


def one_rank(spec: ModelSpec, documents: Tensor | None) -> list[Tensor]:
    """The result and the gradients of q, k and v as it is written on paper, in fp64."""
    *qkv, grad = (x.double() for x in draw_qkv(spec))
    leaves = [x.requires_grad_() for x in qkv]
    q, k, v = leaves
    out = reference(q, k, v, make_pattern(spec, documents))
    return [out, *torch.autograd.grad(out, leaves, grad)]


def attend_here(spec: ModelSpec, cp: int, method: str, documents: bool, dtype: torch.dtype) -> list[Tensor]:
    """The same of this rank's part, and where that part stands."""
    parallel, mesh = make_layout(cp, method)
    local = context.split(make_batch(documents), parallel, mesh)
    place = context.place(SEQ, parallel, mesh.rank("cp"), torch.device("cpu"))
    *qkv, grad = (x[:, place] for x in draw_qkv(spec, dtype))
    leaves = [x.contiguous().requires_grad_() for x in qkv]
    q, k, v = leaves
    out = context.make_attend(spec, parallel, mesh, local)(q, k, v, 0)
    return [place, out, *torch.autograd.grad(out, leaves, grad)]


def differences(spec: ModelSpec, cp: int, method: str, documents: bool, dtype: torch.dtype) -> list[float]:
    """How far the result and each gradient of this rank are from those of one rank."""
    place, *ours = attend_here(spec, cp, method, documents, dtype)
    theirs = one_rank(spec, make_batch(documents).documents)
    return [far(mine, whole[:, place]) for mine, whole in zip(ours, theirs, strict=True)]


def every_pattern(rank: int, cp: int, method: str) -> dict[str, list[float]]:
    with patch.object(ring, "TILE", 4):  # chunks of several tiles, so that some are skipped and some are whole
        return {
            f"{name}, {backend}": differences(
                make_spec(**changes, attention=backend), cp, method, "doc" in name or "all" in name, torch.float32
            )
            for name, changes in PATTERNS.items()
            for backend in (("auto", "reference") if method == "ring" else ("auto",))
        }


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("cp", [2, 4])
def test_attention_is_that_of_one_rank(cp: int, method: str) -> None:
    for rank, found in enumerate(on_ranks(cp, every_pattern, cp, method)):
        for name, errors in found.items():
            assert max(errors) <= 1e-6, f"rank {rank}, {name}: {errors}"
