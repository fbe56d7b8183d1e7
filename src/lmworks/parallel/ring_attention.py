"""Ring attention: every rank keeps its queries, and keys and values are passed around (Liu et al. 2023).

The sequence is cut into 2·cp chunks of c positions; rank r holds chunks r and 2·cp−1−r, an early and a late one, so
that under the causal mask every rank has the same work: 2c² scores with each block from elsewhere, c² + c(c+1) with its
own.

    step i:  send the block at hand on, receive the next  ‖  attend to the block of rank r−i, merge by log-sum-exp

Backward goes around once more. The gradients of keys and values are sent with their block, in fp32, and are back after
the last hop. Each rank sends, for one layer and a sequence of S positions, batch B, with b bytes a number

    forward   2·(cp−1)/cp · S·B·kv_heads·head_dim · b
    backward  2·(cp−1)/cp · S·B·kv_heads·head_dim · (b + 4)

With a window, documents or ALiBi, chunks are cut further into tiles of at most `TILE` positions; those that no
query can see are skipped, and partly masked ones get a bias made from global positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed import ProcessGroup

from ..kernels.training import attention_tile
from ..model.activation_checkpointing import saved_outputs
from ..model.attention import Pattern

TILE = 1024  # scores of a tile with a bias may be in memory: batch · heads · TILE² numbers


def chunk_starts(rank: int, cp: int, chunk: int) -> tuple[int, int]:
    """Global position of the first token of a rank's two chunks."""
    return rank * chunk, (2 * cp - 1 - rank) * chunk


@dataclass(frozen=True)
class Tile:
    """Queries and keys by their place among a rank's local ones, and the global position at which each begins."""

    queries: slice
    keys: slice
    query_start: int
    key_start: int
    causal: bool  # on the diagonal, and nothing but the causal rule hides anything
    biased: bool

    @property
    def pairs(self) -> int:
        """Scores that are computed."""
        rows, columns = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        return rows * (rows + 1) // 2 if self.causal else rows * columns


@dataclass
class Ring:
    """The attention backend of one micro-batch on one rank: queries, keys and values are this rank's two chunks."""

    group: ProcessGroup
    pattern: Pattern  # of the whole sequence; documents are (batch, S)
    seq: int  # S
    fused: bool = True  # False: the plain formulas, for comparison
    plans: dict[int, list[Tile]] = field(default_factory=dict)
    ranges: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def cp(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        device_type = q.device.type
        if torch.is_autocast_enabled(device_type):  # as autocast does for PyTorch's own attention
            dtype = torch.get_autocast_dtype(device_type)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        with torch.autocast(device_type, enabled=False):
            v_dim = v.shape[-1]  # values may be narrower than keys: they are sent together, padded
            out = RingAttention.apply(q, k, F.pad(v, (0, k.shape[-1] - v_dim)), sinks, self)
            return out[..., :v_dim]

    def tiles(self, source: int) -> list[Tile]:
        """What this rank computes with the block of rank `source`; made once and shared by all layers."""
        if source not in self.plans:
            self.plans[source] = list(self.find_tiles(source))
        return self.plans[source]

    def find_tiles(self, source: int) -> Iterator[Tile]:
        chunk = self.seq // (2 * self.cp)
        step = chunk if self.pattern.plain else min(chunk, TILE)

        def cuts(rank: int) -> list[tuple[slice, int]]:
            return [
                (slice(half * chunk + i, half * chunk + min(i + step, chunk)), start + i)
                for half, start in enumerate(chunk_starts(rank, self.cp, chunk))
                for i in range(0, chunk, step)
            ]

        for queries, query_start in cuts(self.rank):
            for keys, key_start in cuts(source):
                first = query_start, key_start
                last = query_start + queries.stop - queries.start - 1, key_start + keys.stop - keys.start - 1
                if self.visible(first, last):
                    biased = self.biased(first, last)
                    diagonal = query_start == key_start
                    yield Tile(queries, keys, query_start, key_start, diagonal and not biased, biased)

    def visible(self, first: tuple[int, int], last: tuple[int, int]) -> bool:
        """Whether any query of a tile may see any of its keys."""
        if first[1] > last[0]:
            return False
        window = self.pattern.window
        if window and last[1] <= first[0] - window:
            return False
        if self.document_ids is None:
            return True
        (q_low, q_high), (k_low, k_high) = map(self.document_range, first, last)
        return bool(((q_low <= k_high) & (k_low <= q_high)).any())

    def biased(self, first: tuple[int, int], last: tuple[int, int]) -> bool:
        """Whether a tile needs more than the causal rule."""
        window = self.pattern.window
        if self.pattern.slopes or (window and first[1] <= last[0] - window):
            return True
        if self.document_ids is None:
            return self.pattern.documents is not None
        (q_low, q_high), (k_low, k_high) = map(self.document_range, first, last)
        return not bool(((q_low == q_high) & (k_low == k_high) & (q_low == k_low)).all())

    @cached_property
    def document_ids(self) -> Tensor | None:
        """On the CPU: which tiles there are is decided before any is computed. A simulated step has no ids to read."""
        documents = self.pattern.documents
        return None if documents is None or isinstance(documents, FakeTensor) else documents.cpu()

    def document_range(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Lowest and highest id between two positions, in each row."""
        if (first, last) not in self.ranges:
            assert self.document_ids is not None
            ids = self.document_ids[:, first : last + 1]
            self.ranges[first, last] = ids.amin(dim=1), ids.amax(dim=1)
        return self.ranges[first, last]

    def bias(self, tile: Tile, device: torch.device) -> Tensor | None:
        """What is added to a tile's scores: (1 or batch, 1 or heads, queries, keys)."""
        if not tile.biased:
            return None
        rows, columns = tile.queries.stop - tile.queries.start, tile.keys.stop - tile.keys.start
        q = torch.arange(tile.query_start, tile.query_start + rows, device=device).unsqueeze(1)
        k = torch.arange(tile.key_start, tile.key_start + columns, device=device)
        hidden = (k > q).view(1, 1, rows, columns)
        if self.pattern.window:
            hidden = hidden | (k <= q - self.pattern.window)
        if self.pattern.documents is not None:
            of_q = self.pattern.documents[:, tile.query_start : tile.query_start + rows]
            of_k = self.pattern.documents[:, tile.key_start : tile.key_start + columns]
            hidden = hidden | (of_q.unsqueeze(2) != of_k.unsqueeze(1)).unsqueeze(1)
        bias = torch.zeros(hidden.shape, device=device)
        if self.pattern.slopes:
            bias = bias - torch.tensor(self.pattern.slopes, device=device).view(1, -1, 1, 1) * (q - k)
        return bias.masked_fill(hidden, attention_tile.MASKED_SCORE)

    def send_recv(self, block: Tensor, tag: int) -> tuple[Tensor, list[Any]]:
        """Begin to send a block to the next rank and to receive one from the rank before: (what comes, the work)."""
        following, before = (dist.get_global_rank(self.group, (self.rank + i) % self.cp) for i in (1, -1))
        coming = torch.empty_like(block)
        # Sent and received as one batch, in the same order on every rank: no rank can wait for one that waits for it.
        send = dist.P2POp(dist.isend, block, following, self.group, tag)
        receive = dist.P2POp(dist.irecv, coming, before, self.group, tag)
        return coming, dist.batch_isend_irecv([send, receive])


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: Ring) -> Tensor:
        q, kv = heads_first(q), torch.stack((heads_first(k), heads_first(v)))
        saved = saved_outputs.get()
        if saved:
            out, lse = saved.pop("ring")
        else:
            out, lse = ring_forward(ring, q, kv, sinks)
            if saved is not None:
                saved["ring"] = out, lse
        ctx.ring = ring
        ctx.save_for_backward(q, kv, out, lse, sinks)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            grad = heads_first(grad)
            of_sinks = None if sinks is None else attention_tile.sink_gradient(grad, out, lse, sinks)
            return *ring_backward(ctx.ring, grad, q, kv, out, lse), of_sinks, None


KEYS, GRADIENTS = 0, 1  # tags of the two kinds of message


def ring_forward(ring: Ring, q: Tensor, block: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries over all keys; `block` holds its own keys and values."""
    out = torch.zeros(q.shape, dtype=accumulator(q), device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=out.dtype, device=q.device)
    for step in range(ring.cp):
        if step + 1 < ring.cp:
            coming, works = ring.send_recv(block, KEYS)
        for tile in ring.tiles((ring.rank - step) % ring.cp):
            rows, (tk, tv) = tile.queries, block[:, :, :, tile.keys]
            bias = ring.bias(tile, q.device)
            more = attention_tile.forward(q[:, :, rows], tk, tv, bias, tile.causal, ring.fused, ring.pattern.softcap)
            attention_tile.merge(out[:, :, rows], lse[:, :, rows], *more)
        if step + 1 < ring.cp:
            wait(works)
            block = coming
    if sinks is not None:
        attention_tile.add_sinks(out, lse, sinks)
    return out.to(q.dtype), lse


def ring_backward(
    ring: Ring, grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each (batch, seq, heads, head_dim)."""
    grad, block = grad.to(q.dtype), kv
    dq = torch.zeros(q.shape, dtype=accumulator(q), device=q.device)
    own, travelling = dq.new_zeros(kv.shape), dq.new_zeros(kv.shape)
    returning: list[Any] = []
    for step in range(ring.cp):
        if step + 1 < ring.cp:
            coming, works = ring.send_recv(block, KEYS)
        dkv = own if step == 0 else torch.zeros_like(own)
        for tile in ring.tiles((ring.rank - step) % ring.cp):
            rows, keys = tile.queries, tile.keys
            bias = ring.bias(tile, q.device)
            tg, tq, to, tl = (x[:, :, rows] for x in (grad, q, out, lse))
            tk, tv = block[:, :, :, keys]
            rule = bias, tile.causal, ring.fused, ring.pattern.softcap
            more = attention_tile.backward(tg, tq, tk, tv, to, tl, *rule)
            dq[:, :, rows] += more[0]
            dkv[0][:, :, keys] += more[1]
            dkv[1][:, :, keys] += more[2]
        wait(returning)
        if step > 0:  # gradients of other ranks for this block have arrived; this rank's own part is added at the end
            leaving = travelling + dkv  # referenced until it is sent
            travelling, returning = ring.send_recv(leaving, GRADIENTS)
        if step + 1 < ring.cp:
            wait(works)
            block = coming
    wait(returning)
    dk, dv = own + travelling
    return tuple(x.to(q.dtype).transpose(1, 2) for x in (dq, dk, dv))  # type: ignore[return-value]


def heads_first(x: Tensor) -> Tensor:
    """(batch, seq, heads, head_dim) → (batch, heads, seq, head_dim), contiguous: it may be sent."""
    return x.transpose(1, 2).contiguous()


def accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
