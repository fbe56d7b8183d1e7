"""One sequence over several ranks: attention, loss and gradients are those of one rank that holds it whole."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lmworks.data import Batch
from lmworks.model import GPT
from lmworks.model.attention import Pattern, make_pattern, reference
from lmworks.model.gpt import default_positions
from lmworks.parallel import context_parallel, ring_attention
from lmworks.parallel.comm_counter import CommCounter
from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.mesh import Mesh
from lmworks.parallel.ring_attention import Ring
from lmworks.spec import Grid, ModelSpec, ParallelSpec, SpecError
from variations import with_slow

BATCH, SEQ = 2, 48
PATTERNS: dict[str, dict[str, Any]] = {
    "causal": {},
    "grouped": {"kv_heads": 2},
    "one kv head": {"kv_heads": 1},
    "window": {"sliding_window": 7},
    "documents": {},
    "alibi": {"positions": "alibi"},
    "soft cap": {"attention_softcap": 0.5},
    "all at once": {"positions": "alibi", "sliding_window": 9, "kv_heads": 2, "attention_softcap": 0.5},
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


@cache  # making its groups takes longer than a case does
def make_layout(cp: int, method: str) -> tuple[ParallelSpec, Mesh]:
    parallel = ParallelSpec(cp=cp, cp_method=method)
    return parallel, Mesh(Grid.of(parallel), "cpu")


def far(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def draw_qkv(spec: ModelSpec) -> list[Tensor]:
    """q, k, v and the gradient of the result, for the whole sequence."""
    draw = torch.Generator().manual_seed(2)
    heads = (spec.heads, spec.kv_heads, spec.kv_heads, spec.heads)
    return [torch.randn(BATCH, SEQ, n, spec.head_dim, generator=draw) for n in heads]


def one_rank(spec: ModelSpec, documents: Tensor | None, layer: int) -> list[Tensor]:
    """The result and the gradients of q, k and v as it is written on paper, in fp64."""
    *qkv, grad = (x.double() for x in draw_qkv(spec))
    leaves = [x.requires_grad_() for x in qkv]
    q, k, v = leaves
    out = reference(q, k, v, replace(make_pattern(spec, documents), window=spec.window_of(layer)))
    return [out, *torch.autograd.grad(out, leaves, grad)]


def differences(
    spec: ModelSpec,
    cp: int,
    method: str,
    *,
    documents: bool = False,
    heads: slice = slice(None),
    bf16: bool = False,
    layer: int = 0,
) -> list[float]:
    """How far the result and the gradients of q, k and v on this rank are from those of one rank; worst of a tensor."""
    parallel, mesh = make_layout(cp, method)
    local = context_parallel.split(make_batch(documents), parallel, mesh)
    place = context_parallel.place(SEQ, parallel, mesh.rank("cp"), torch.device("cpu"))
    *qkv, grad = (x[:, place][:, :, heads] for x in draw_qkv(spec))
    leaves = [x.contiguous().requires_grad_() for x in qkv]
    q, k, v = leaves
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        out = context_parallel.make_attend(spec, parallel, mesh, local, heads)(q, k, v, layer)
    ours = [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]
    theirs = one_rank(spec, make_batch(documents).documents, layer)
    return [far(mine, whole[:, place][:, :, heads]) for mine, whole in zip(ours, theirs, strict=True)]


def every_pattern(rank: int, cp: int, method: str) -> dict[str, list[float]]:
    found = {}
    with patch.object(
        ring_attention, "TILE", 4
    ):  # chunks of several tiles: some are skipped, some whole, some have a seam
        for name, changes in PATTERNS.items():
            for backend in ("auto", "reference"):
                spec, documents = make_spec(**changes, attention=backend), name in ("documents", "all at once")
                found[f"{name}, {backend}"] = differences(spec, cp, method, documents=documents)
        for layer in (0, 1):  # with a window, and without
            spec = make_spec(sliding_window=7, layer_types=("sliding", "full"), kv_heads=2)
            found[f"window on some layers, {layer}"] = differences(spec, cp, method, documents=True, layer=layer)
        if cp == 2:  # as on the second of two tensor-parallel ranks
            found["half of the heads"] = differences(make_spec(positions="alibi"), cp, method, heads=slice(2, 4))
    return found


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("cp", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_attention_is_that_of_one_rank(cp: int, method: str) -> None:
    for rank, found in enumerate(on_ranks(cp, every_pattern, cp, method)):
        for name, errors in found.items():
            assert max(errors) <= 1e-6, f"rank {rank}, {name}: {errors}"


def late_chunk_one_on(rank: int, cp: int, chunk: int) -> tuple[int, int]:
    return rank * chunk, (2 * cp - 1 - rank) * chunk + 1


def late_chunk_of_the_next(rank: int, cp: int, chunk: int) -> tuple[int, int]:
    return rank * chunk, (2 * cp - 2 - rank) * chunk


def wrong_offsets(rank: int) -> dict[str, float]:
    """The worst error of each pattern when a rank is mistaken about where its late chunk stands."""
    found = {}
    for name in ("window", "alibi"):
        with patch.object(ring_attention, "chunk_starts", late_chunk_one_on):
            found[name] = max(differences(make_spec(**PATTERNS[name]), 2, "ring"))
    with patch.object(ring_attention, "chunk_starts", late_chunk_of_the_next):
        found["documents"] = max(differences(make_spec(), 2, "ring", documents=True))
        found["causal"] = max(differences(make_spec(), 2, "ring"))
    return found


def test_a_wrong_mask_offset_is_noticed() -> None:
    ranks = on_ranks(2, wrong_offsets)
    for name in ranks[0]:
        assert max(found[name] for found in ranks) > 1e-3, name


def in_bf16(rank: int, cp: int, method: str, documents: bool) -> list[float]:
    return differences(make_spec(kv_heads=2), cp, method, documents=documents, bf16=True)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_bf16_is_as_near_as_on_one_rank(method: str, documents: bool) -> None:
    (alone,) = on_ranks(1, in_bf16, 1, method, documents)
    assert min(alone) > 1e-4, "autocast was not on"
    for errors in on_ranks(2, in_bf16, 2, method, documents):
        assert all(ours <= 2 * theirs for ours, theirs in zip(errors, alone, strict=True)), (errors, alone)


NETWORKS: dict[str, dict[str, Any]] = {
    "rope": {"qk_norm": True},
    "grouped": {"kv_heads": 2, "tie_embeddings": True},
    "learned": {"positions": "learned"},
    "window": {"sliding_window": 7, "positions": "alibi"},
    "layers": {"sliding_window": 7, "layer_types": ("sliding", "full"), "rope_local_theta": 50.0},
    "layers, experts": {"sliding_window": 7, "layer_types": ("full", "sliding"), "experts": 4, "expert_ffn": 32},
    "sinks": {"attention_sinks": True, "kv_heads": 2},
    "sinks and caps": {"attention_sinks": True, "attention_softcap": 1.0, "final_softcap": 2.0},
}


def loss_and_gradients(
    spec: ModelSpec, local: context_parallel.Local, attend: Any, recompute: str
) -> dict[str, Tensor]:
    network = GPT(spec, seed=3)
    network.recompute = recompute
    _, loss = network(local.tokens, local.targets, positions=local.positions, attend=attend, reduction="sum")
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in network.named_parameters() if p.grad is not None}}


def whole_network(rank: int, cp: int, method: str, network: str, documents: bool, recompute: str) -> dict[str, float]:
    """Relative difference of the loss and of every gradient, summed over ranks, from those of one rank."""
    spec, batch = make_spec(**NETWORKS[network]), make_batch(documents)
    parallel, mesh = make_layout(cp, method)
    local = context_parallel.split(batch, parallel, mesh)
    found = loss_and_gradients(spec, local, context_parallel.make_attend(spec, parallel, mesh, local), recompute)
    for value in found.values():
        dist.all_reduce(value, group=mesh.group("cp"))
    alone = GPT(spec, seed=3)
    _, loss = alone(batch.tokens, batch.targets, documents=batch.documents, reduction="sum")
    loss.backward()
    theirs = {"loss": loss.detach(), **{name: p.grad for name, p in alone.named_parameters()}}
    assert theirs.keys() == found.keys()
    return {name: far(found[name], value) for name, value in theirs.items() if value is not None}


@pytest.mark.parametrize(
    ("cp", "method", "network", "documents", "recompute"),
    [
        (2, "ring", "rope", False, "selective"),
        (4, "ring", "grouped", True, "full"),
        (4, "ring", "learned", True, "mlp"),
        (2, "ring", "window", False, "none"),
        (2, "ring", "layers", True, "selective"),
        (4, "ring", "layers, experts", False, "full"),
        (4, "ulysses", "layers", False, "none"),
        (2, "ring", "sinks", True, "selective"),
        (2, "ring", "sinks and caps", False, "full"),
        (4, "ulysses", "sinks and caps", True, "none"),
        (2, "ulysses", "rope", True, "selective"),
        (4, "ulysses", "grouped", False, "full"),
        (2, "ulysses", "learned", True, "none"),
        (4, "ulysses", "window", False, "none"),
    ],
)
def test_a_network_is_that_of_one_rank(cp: int, method: str, network: str, documents: bool, recompute: str) -> None:
    found = on_ranks(cp, whole_network, cp, method, network, documents, recompute)[0]
    assert found.pop("loss") <= 1e-6
    assert max(found.values()) <= 1e-5, max(found.items(), key=lambda item: item[1])


def traffic(rank: int, cp: int, method: str, recompute: str) -> tuple[int, int, int]:
    """Bytes that a rank sends, or puts into exchanges: of numbers in the forward pass, and in the backward pass."""
    spec = make_spec(kv_heads=2)
    parallel, mesh = make_layout(cp, method)
    local = context_parallel.split(make_batch(False), parallel, mesh)
    network = GPT(spec, seed=3)
    network.recompute = recompute
    attend = context_parallel.make_attend(spec, parallel, mesh, local)
    with CommCounter(mesh) as forward:
        _, loss = network(local.tokens, local.targets, positions=local.positions, attend=attend, reduction="sum")
    with CommCounter(mesh) as backward:
        loss.backward()
    kinds = {call.kind for call in forward.calls + backward.calls}
    assert kinds == ({"send", "recv"} if method == "ring" else {"all-to-all"})
    sent, back = (sum(call.bytes for call in seen.calls if call.kind != "recv") for seen in (forward, backward))
    return sent, back, len(backward.calls)


@pytest.mark.parametrize("recompute", with_slow(["none", "selective", "mlp", "full"], ["none", "mlp"]))
def test_ring_sends_what_the_formula_says(recompute: str) -> None:
    cp, spec = 4, make_spec(kv_heads=2)
    once = 2 * (cp - 1) * SEQ * BATCH * spec.kv_dim // cp * spec.layers  # numbers that travel when keys go around
    again = once * 4 if recompute == "full" else 0  # the others keep what the ring found
    for sent, back, _ in on_ranks(cp, traffic, cp, "ring", recompute):
        assert sent == once * 4
        assert back == once * (4 + 4) + again


def test_ulysses_sends_what_the_formula_says() -> None:
    cp, spec = 4, make_spec(kv_heads=2)
    kv_dim = max(spec.kv_heads, cp) * spec.head_dim
    put_in = SEQ * BATCH * 2 * (spec.q_dim + kv_dim) // cp * 4 * spec.layers  # of which a share 1/cp stays
    for sent, back, exchanges in on_ranks(cp, traffic, cp, "ulysses", "none"):
        assert (sent, back, exchanges) == (put_in, put_in, 2 * spec.layers)


def work(cp: int, seq: int, pattern: Pattern) -> list[int]:
    """Scores that each rank computes."""

    def pairs(rank: int) -> int:
        seat = cast(dist.ProcessGroup, SimpleNamespace(rank=lambda: rank, size=lambda: cp))
        return sum(tile.pairs for source in range(cp) for tile in Ring(seat, pattern, seq).tiles(source))

    return [pairs(rank) for rank in range(cp)]


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_every_rank_has_the_same_work(cp: int) -> None:
    seq = 16 * cp
    pairs = work(cp, seq, Pattern())
    assert sum(pairs) == seq * (seq + 1) // 2  # what may be seen, and nothing else
    assert max(pairs) == min(pairs)


def test_what_nobody_sees_is_not_computed() -> None:
    seq, cp = 128, 4
    documents = torch.arange(seq).div(32, rounding_mode="floor").unsqueeze(0)
    with patch.object(ring_attention, "TILE", 8):
        windowed = sum(work(cp, seq, Pattern(window=8)))
        apart = sum(work(cp, seq, Pattern(documents=documents)))
    assert windowed <= seq * 2 * 8  # two tiles for a query
    assert apart == 4 * 32 * 33 // 2  # documents end where tiles do: no score is computed in vain


def test_a_rank_gets_its_tokens_with_their_positions() -> None:
    batch = make_batch(True)
    whole = default_positions(batch.tokens, batch.documents)
    for method, place in (("ring", [0, 1, 2, 3, 4, 5, 42, 43, 44, 45, 46, 47]), ("ulysses", list(range(12)))):
        parallel = ParallelSpec(cp=4, cp_method=method)
        local = context_parallel.split(batch, parallel, cast(Mesh, SimpleNamespace(rank=lambda axis: 0)))
        assert torch.equal(local.tokens, batch.tokens[:, place])
        assert torch.equal(local.targets, batch.targets[:, place])
        assert torch.equal(local.positions, whole[:, place])
        assert local.documents is not None
        assert batch.documents is not None
        assert torch.equal(local.documents, batch.documents[:, place])


def test_a_sequence_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(SpecError, match=r"parallel.cp = 4 \(ring\) needs data.seq = 52 divisible by 8"):
        context_parallel.place(52, ParallelSpec(cp=4), 0, torch.device("cpu"))
