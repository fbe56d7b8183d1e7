"""Context parallelism: one sequence over several ranks. Only attention notices; all else works on tokens one by one.

`split` gives a rank its tokens and `make_attend` the backend with which they see the tokens of the others:

    local = split(batch, parallel, mesh)
    attend = make_attend(model, parallel, mesh, local, heads)
    network(local.tokens, local.targets, positions=local.positions, attend=attend, reduction="sum")

The loss and the gradients are then sums over this rank's tokens: add them up over the axis "cp". `ring` sends keys and
values around (any number of heads, communication behind computation); `ulysses` exchanges heads (less traffic with many
ranks and few heads, but no more ranks than heads).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..data import Batch
from ..model.attention import Attend, by_layer, dense, make_pattern
from ..model.gpt import default_positions
from ..spec import ModelSpec, ParallelSpec, SpecError
from .collectives import differentiable_all_to_all
from .mesh import Mesh
from .ring_attention import Ring, chunk_starts


@dataclass(frozen=True)
class Local:
    """What a rank holds of a micro-batch."""

    tokens: Tensor  # (batch, seq/cp)
    targets: Tensor  # (batch, seq/cp)
    positions: Tensor  # (seq/cp) or, with documents, (batch, seq/cp): those that the tokens have in the whole sequence
    documents: Tensor | None  # (batch, seq/cp)
    whole_documents: Tensor | None  # (batch, seq): a mask needs to know those of the other ranks' keys
    seq: int  # of the whole sequence


def split(batch: Batch, parallel: ParallelSpec, mesh: Mesh) -> Local:
    """This rank's tokens with their places in the sequence."""
    seq = batch.tokens.shape[1]
    index = place(seq, parallel, mesh.rank("cp"), batch.tokens.device)
    documents = None if batch.documents is None else batch.documents[:, index]
    positions = default_positions(batch.tokens, batch.documents)[..., index]
    return Local(batch.tokens[:, index], batch.targets[:, index], positions, documents, batch.documents, seq)


def place(seq: int, parallel: ParallelSpec, rank: int, device: torch.device) -> Tensor:
    """Where in the sequence the tokens of a rank stand, in the order in which it holds them."""
    cp, ring = parallel.cp, parallel.cp > 1 and parallel.cp_method == "ring"
    pieces = 2 * cp if ring else cp
    if seq % pieces:
        raise SpecError(f"parallel.cp = {cp} ({parallel.cp_method}) needs data.seq = {seq} divisible by {pieces}")
    chunk = seq // pieces
    starts = chunk_starts(rank, cp, chunk) if ring else (rank * chunk,)
    return torch.cat([torch.arange(start, start + chunk, device=device) for start in starts])


def make_attend(
    model: ModelSpec, parallel: ParallelSpec, mesh: Mesh, local: Local, heads: slice = slice(None)
) -> Attend:
    """The backend for one micro-batch; `heads` are the query heads of this tensor-parallel rank."""
    documents, device, cp = local.whole_documents, local.tokens.device, parallel.cp
    if cp == 1:
        return dense(model, device, documents, heads=heads)
    group = mesh.group("cp")
    if parallel.cp_method == "ring":
        fused = model.attention != "reference"
        return by_layer(
            model, lambda alike: Ring(group, make_pattern(alike, documents, heads=heads), local.seq, fused=fused)
        )
    first, stop, _ = heads.indices(model.heads)
    count, extra = divmod(stop - first, cp)
    if extra:
        raise SpecError(
            f"parallel.cp = {cp} does not divide the {stop - first} heads of a rank; use cp_method = 'ring'"
        )
    first += mesh.rank("cp") * count
    return Ulysses(group, dense(model, device, documents, heads=slice(first, first + count)))


@dataclass
class Ulysses:
    """Attention of one micro-batch on one rank (Jacobs et al. 2023); q, k and v are contiguous parts of the sequence.

        (batch, S/cp, heads, head_dim)  — all-to-all →  (batch, S, heads/cp, head_dim)  — attention →  and back

    Queries, keys and values are sent in one exchange. For one layer a rank sends

        forward   (cp−1)/cp² · S·B·(2·heads + 2·kv)·head_dim · b     backward   the same

    bytes, with kv = max(kv_heads, cp): where ranks are more than key/value heads, each head is sent to all the ranks
    whose query heads share it, and their gradients are summed on the way back.
    """

    group: ProcessGroup
    dense: Attend  # over the whole sequence, with the slopes of the heads that come here

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, **per_head: Tensor) -> Tensor:
        device_type, cp = q.device.type, self.group.size()
        if torch.is_autocast_enabled(device_type):  # attention takes them in this dtype, so they are sent in it
            dtype = torch.get_autocast_dtype(device_type)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if k.shape[2] < cp:
            k, v = (x.repeat_interleave(cp // x.shape[2], dim=2) for x in (k, v))
        widths = [x.shape[3] for x in (q, k, v)]
        shares = [x.unflatten(2, (cp, -1)).flatten(3) for x in (q, k, v)]  # (batch, seq/cp, cp, heads/cp · head_dim)
        parts = self.to_heads(torch.cat(shares, dim=3)).split([share.shape[3] for share in shares], dim=2)
        q, k, v = (part.unflatten(2, (-1, width)) for part, width in zip(parts, widths, strict=True))
        own = {name: x.chunk(cp)[self.group.rank()] for name, x in per_head.items()}
        return self.to_sequence(self.dense(q, k, v, layer, **own))

    def to_heads(self, x: Tensor) -> Tensor:
        """(batch, seq/cp, cp, width) → (batch, seq, width)."""
        return self.all_to_all(x.movedim(2, 0)).movedim(0, 1).flatten(1, 2)

    def to_sequence(self, x: Tensor) -> Tensor:
        """(batch, seq, heads/cp, head_dim) → (batch, seq/cp, heads, head_dim)."""
        return self.all_to_all(x.unflatten(1, (self.group.size(), -1)).movedim(1, 0)).movedim(0, 2).flatten(2, 3)

    def all_to_all(self, x: Tensor) -> Tensor:
        """The i-th part along dim 0 goes to rank i; parts come back in the order of the ranks they are from."""
        rows = [1] * self.group.size()
        return differentiable_all_to_all(x, rows, rows, self.group)
