"""Ulysses: trade a part of the sequence for a part of the heads, attend as on one rank, trade back.

The method of Jacobs et al. 2023:

    (batch, S/cp, heads, head_dim)  — all-to-all →  (batch, S, heads/cp, head_dim)  — attention →  and back

Queries, keys and values travel in one exchange. Of what a rank holds it keeps a share 1/cp, so for one layer it sends

    forward   (cp−1)/cp² · S·B·(2·heads + 2·kv)·head_dim · b     backward   the same

bytes, with kv = max(kv_heads, cp): where ranks are more than key/value heads, each head is sent to all the ranks whose
query heads share it, and their gradients are summed on the way back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..model.attention import Dense
from .collectives import exchange


@dataclass
class Ulysses:
    """The attention backend of one micro-batch on one rank: q, k and v are contiguous parts of the sequence."""

    group: ProcessGroup
    dense: Dense  # over the whole sequence, with the slopes of the heads that come here

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, **per_head: Tensor) -> Tensor:
        device_type, cp = q.device.type, self.group.size()
        if torch.is_autocast_enabled(device_type):  # attention would take them in this dtype: so they travel in it
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
        return exchange(x, rows, rows, self.group)
