"""Hand-made pages for the tests of the paged kernels, and what PyTorch's own attention says of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.kernels.inference.paged_attention import GATHER_UNIT, AttentionMetadata, LayerCache, SharedPrefixes

NOWHERE = 2**30  # a number of a block that must never be followed


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    size: int = 16
    window: int = 0
    alibi: bool = False
    dtype: torch.dtype = torch.float32
    stored: torch.dtype | None = None  # what the cache holds, where that is not dtype
    invariant: bool = False
    softcap: float = 0.0
    with_sinks: bool = False

    def options(self, device: str = "cpu") -> dict[str, object]:
        return {"invariant": self.invariant, **self.scores(device)}

    def scores(self, device: str = "cpu") -> dict[str, object]:
        rule = {"window": self.window, "slopes": self.slopes(device)}
        return {**rule, "softcap": self.softcap, "sinks": self.sinks(device)}

    def sinks(self, device: str = "cpu") -> Tensor | None:
        heads = self.kv_heads * self.group
        return torch.linspace(-1.0, 4.0, heads, device=device) if self.with_sinks else None

    def slopes(self, device: str = "cpu") -> Tensor | None:
        heads = self.kv_heads * self.group
        return torch.linspace(0.5, 0.02, heads, device=device) if self.alibi else None


@dataclass(frozen=True)
class Made:
    q: Tensor  # (tokens, heads, head_dim)
    cache: LayerCache
    metadata: AttentionMetadata
    keys: list[Tensor]  # of each sequence, side by side: (length, kv_heads, head_dim), as the cache holds them
    values: list[Tensor]

    def to(self, device: str) -> Made:
        cache = LayerCache(*(x if x is None else x.to(device) for x in vars(self.cache).values()))
        p = self.metadata
        shared = None if p.shared is None else SharedPrefixes(*(x.to(device) for x in vars(p.shared).values()))
        metadata = AttentionMetadata(
            p.block_tables.to(device),
            p.seq_lens.to(device),
            p.query_start_loc.to(device),
            p.max_query_len,
            shared,
            None if p.key_starts is None else p.key_starts.to(device),
            p.keys,
        )
        return replace(self, q=self.q.to(device), cache=cache, metadata=metadata)


def make(case: Case, seed: int = 0) -> Made:
    """Blocks scattered over a pool whose every other place is NaN, and tables that end in a number out of range."""
    rng = torch.Generator().manual_seed(seed)
    need = [-(-length // case.size) for length in case.lengths]
    order = torch.randperm(sum(need) + 2, generator=rng)
    tables = torch.full((len(need), max(need) + 2), NOWHERE, dtype=torch.int32)
    shape = (len(order), case.kv_heads, case.size, case.head_dim)
    pools, scales = [], []
    for _ in range(2):
        if case.stored is None:
            pools.append(torch.full(shape, torch.nan, dtype=case.dtype))
        else:
            pools.append(torch.full(shape, 77.0).to(case.stored))
        scales.append(torch.full(shape[:3], torch.nan))
    held: list[list[Tensor]] = [[], []]
    at = 0
    for row, length in enumerate(case.lengths):
        blocks = order[at : at + need[row]]
        at += need[row]
        tables[row, : need[row]] = blocks
        for pool, scale, into in zip(pools, scales, held, strict=True):
            x = torch.randn(length, case.kv_heads, case.head_dim, generator=rng)
            kept = torch.empty_like(x)
            for j in range(length):
                block, offset = blocks[j // case.size], j % case.size
                if case.stored is None:
                    pool[block, :, offset] = x[j].to(case.dtype)
                    kept[j] = x[j].to(case.dtype).float()
                else:  # any scale will do here; `place` is tested on its own
                    by = 0.01 + 0.02 * torch.rand(case.kv_heads, generator=rng)
                    held_as = (x[j] / by.unsqueeze(1)).clamp(-127, 127).round().to(case.stored)
                    pool.view(torch.uint8)[block, :, offset] = held_as.view(torch.uint8)
                    scale[block, :, offset] = by
                    kept[j] = held_as.float() * by.unsqueeze(1)
            into.append(kept)
    starts = F.pad(torch.tensor(case.queries).cumsum(0), (1, 0)).to(torch.int32)
    q = torch.randn(int(starts[-1]), case.kv_heads * case.group, case.head_dim, generator=rng).to(case.dtype)
    cache = LayerCache(*pools, *(scales if case.stored is not None else (None, None)))
    metadata = AttentionMetadata(tables, torch.tensor(case.lengths, dtype=torch.int32), starts, max(case.queries))
    return Made(q, cache, metadata, *held)


def share(made: Made, groups: dict[tuple[int, ...], int], tile: int) -> Made:
    """Sequences of a group begin with the same keys, and are cut into tiles. Only a tile's first has their blocks."""
    size, tables = made.cache.size, made.metadata.block_tables.clone()
    lengths, members, starts = torch.zeros(len(tables), dtype=torch.int32), list[int](), [0]
    keys, values = list(made.keys), list(made.values)
    for group, prefix in groups.items():
        for place, row in enumerate(group):
            lengths[row] = prefix
            first = tables[group[0], : prefix // size]
            tables[row, : prefix // size] = NOWHERE if place % tile else first
            for own in (keys, values):
                own[row] = torch.cat((own[group[0]][:prefix], own[row][prefix:]))
        members += group
        starts += [len(members) - len(group[begin + tile :]) for begin in range(0, len(group), tile)]
    starts += [starts[-1]] * 2  # tiles without sequences
    places = torch.tensor(members + [0] * (len(tables) - len(members)), dtype=torch.int32)
    shared = SharedPrefixes(lengths, places, torch.tensor(starts, dtype=torch.int32))
    return replace(made, metadata=replace(made.metadata, block_tables=tables, shared=shared), keys=keys, values=values)


def gathered(made: Made, spare: int = 256) -> Made:
    """Told where the keys of each sequence go."""
    room = -(-made.metadata.seq_lens // GATHER_UNIT) * GATHER_UNIT
    starts = F.pad(room.cumsum(0), (1, 0)).to(torch.int32)
    return replace(made, metadata=replace(made.metadata, key_starts=starts, keys=int(starts[-1]) + spare))


def expected(case: Case, made: Made) -> Tensor:
    """By `scaled_dot_product_attention`, in fp64, sequence by sequence, the mask spelt out.

    With a cap or sinks, which it does not have, as on paper.
    """
    out = torch.zeros(made.q.shape, dtype=torch.float64)
    slopes = case.slopes()
    starts = made.metadata.query_start_loc.tolist()
    for row, (length, queries) in enumerate(zip(case.lengths, case.queries, strict=True)):
        if not length:
            continue
        position = torch.arange(length - queries, length).unsqueeze(1)
        distance = position - torch.arange(length)
        bias = torch.zeros(made.q.shape[1], queries, length, dtype=torch.float64)
        if slopes is not None:
            bias -= slopes.double().view(-1, 1, 1) * distance
        hidden = (distance < 0) | ((distance >= case.window) if case.window else torch.tensor(False))
        bias.masked_fill_(hidden, -torch.inf)
        mine = slice(starts[row], starts[row + 1])
        q, k, v = (x.double().transpose(0, 1) for x in (made.q[mine], made.keys[row], made.values[row]))
        k, v = (x.repeat_interleave(case.group, dim=0) for x in (k, v))
        if not case.softcap and not case.with_sinks:
            out[mine] = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(0, 1)
            continue
        scores = q @ k.transpose(1, 2) / case.head_dim**0.5
        if case.softcap:
            scores = case.softcap * (scores / case.softcap).tanh()
        weights = (scores + bias).exp()
        total = weights.sum(dim=-1, keepdim=True)
        if (sinks := case.sinks()) is not None:
            total = total + sinks.double().exp().view(-1, 1, 1)
        out[mine] = (weights / total @ v).transpose(0, 1)
    return out


def random_case(seed: int, head_dims: tuple[int, ...] = (64, 80, 96, 128, 256)) -> Case:
    """Lengths that are multiples of nothing, blocks of 1 to 32, prompts, chunks and decoding in one batch."""
    rng = random.Random(seed)
    lengths = [rng.choice((0, 1, rng.randint(2, 40), rng.randint(40, 200))) for _ in range(rng.randint(1, 4))]
    kind = rng.choice(("decode", "few", "any"))
    most = {"decode": 1, "few": 4, "any": 200}[kind]
    queries = [1 if length == 0 else rng.randint(1, min(most, length)) for length in lengths]
    return Case(
        tuple(lengths),
        tuple(queries),
        kv_heads=rng.choice((1, 2, 3)),
        group=rng.choice((1, 2, 3, 4, 8)),
        head_dim=rng.choice(head_dims),
        size=rng.choice((1, 3, 8, 16, 32)),
        window=rng.choice((0, 0, 1, 17, 70)),
        alibi=rng.random() < 0.25,
        stored=rng.choice((None, None, None, torch.int8, torch.float8_e4m3fn)),
        invariant=rng.random() < 0.3,
        softcap=rng.choice((0.0, 0.0, 1.5, 50.0)),
        with_sinks=rng.random() < 0.3,
    )


NAMED = {
    "decode": Case((37, 0, 130, 1), (1, 1, 1, 1)),
    "speculation": Case((70, 3, 33), (3, 2, 3), group=4),
    "prompts": Case((37, 0, 130, 5), (37, 1, 130, 5)),
    "chunks": Case((90, 140), (7, 71)),
    "window": Case((90, 140), (7, 71), window=20),
    "alibi": Case((90, 140), (7, 71), alibi=True),
    "soft cap": Case((90, 140, 33), (7, 71, 33), softcap=1.5),
    "soft cap of Gemma 2, alibi": Case((90, 140), (1, 1), softcap=50.0, alibi=True),
    "sinks": Case((90, 0, 33), (7, 1, 33), with_sinks=True),
    "sinks, decode": Case((37, 0, 130, 1), (1, 1, 1, 1), with_sinks=True, window=20),
    "sinks, soft cap, int8": Case((90, 140), (1, 71), stored=torch.int8, with_sinks=True, softcap=1.5),
    "int8": Case((90, 140), (1, 71), stored=torch.int8),
    "fp8": Case((90, 140), (1, 1), stored=torch.float8_e4m3fn),
    "heads of 80": Case((35, 66), (3, 66), head_dim=80),
    "multi-query": Case((35, 66), (1, 1), kv_heads=1, group=24),
}
