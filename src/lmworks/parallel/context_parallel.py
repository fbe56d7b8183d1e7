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

from ..data import Batch
from ..model.attention import Attend, dense, make_pattern
from ..model.gpt import default_positions
from ..spec import ModelSpec, ParallelSpec, SpecError
from .mesh import Mesh
from .ring_attention import Ring, chunk_starts
from .ulysses import Ulysses


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
        pattern = make_pattern(model, documents, heads=heads)
        return Ring(group, pattern, local.seq, fused=model.attention != "reference")
    first, stop, _ = heads.indices(model.heads)
    count, extra = divmod(stop - first, cp)
    if extra:
        raise SpecError(
            f"parallel.cp = {cp} does not divide the {stop - first} heads of a rank; use cp_method = 'ring'"
        )
    first += mesh.rank("cp") * count
    return Ulysses(group, dense(model, device, documents, heads=slice(first, first + count)))
