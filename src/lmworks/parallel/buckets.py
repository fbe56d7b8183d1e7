"""Weights that travel together: many small tensors as one flat buffer, sorted by the rank that owns their rows.

    buffer = [ rank 0's rows of every weight | rank 1's rows of every weight | … ]

so that a reduce-scatter gives each rank the rows it owns, and an all-gather brings everyone's back. Rows are dealt as
`torch.chunk` does, ⌈rows/n⌉ to a rank, and the last ranks' parts are filled up to the same length: that filling is the
only padding, and it exists in the buffer alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class Bucket:
    """`ranks` = 1: everyone owns all rows, and the buffer is all-reduced."""

    def __init__(self, parameters: list[nn.Parameter], group: ProcessGroup, ranks: int, rank: int) -> None:
        self.parameters, self.group, self.ranks, self.rank = parameters, group, ranks, rank
        self.rows = [-(-parameter.shape[0] // ranks) for parameter in parameters]  # of one rank, at most
        sizes = [n * parameter[0].numel() for n, parameter in zip(self.rows, parameters, strict=True)]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]  # of each weight in a rank's part
        self.length = sum(sizes)  # of a rank's part
        self.ready = 0  # weights whose gradient is there, in the backward pass that runs now

    @property
    def complete(self) -> bool:
        return self.ready == len(self.parameters)

    def own(self, index: int, tensor: Tensor) -> Tensor:
        """This rank's rows of a tensor shaped like the weight `index`: a view, empty on a rank past the last row."""
        n = self.rows[index]
        return tensor[min(self.rank * n, len(tensor)) : (self.rank + 1) * n]

    def pack(self, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
        """The buffer, filled with tensors shaped like the weights; None stands for zeros."""
        flat = torch.empty(self.ranks * self.length, dtype=dtype, device=self.parameters[0].device)
        given = [torch.zeros_like(p) if t is None else t for p, t in zip(self.parameters, tensors, strict=True)]
        inside, outside = self.pairs(flat, given)
        torch._foreach_copy_(inside, outside)
        return flat

    def unpack(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        inside, outside = self.pairs(flat, tensors)
        torch._foreach_copy_(outside, inside)

    def pairs(self, flat: Tensor, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the buffer, and of the tensors, that hold the same elements: two for each weight at most."""
        parts = flat.view(self.ranks, self.length)
        inside, outside = [], []
        for tensor, n, start in zip(tensors, self.rows, self.starts, strict=True):
            full, rest = divmod(len(tensor), n)  # ranks with all their rows; rows of the rank after them
            width = tensor[0].numel()
            inside.append(parts[:full, start : start + n * width])
            outside.append(tensor[: full * n].view(full, n * width))
            if rest:
                inside.append(parts[full, start : start + rest * width])
                outside.append(tensor[full * n :].view(-1))
        return inside, outside

    def pack_own(self, tensors: Sequence[Tensor]) -> Tensor:
        """One rank's part, filled with its own rows."""
        part = torch.zeros(self.length, dtype=self.parameters[0].dtype, device=self.parameters[0].device)
        torch._foreach_copy_(self.own_views(part, tensors), list(tensors))
        return part

    def own_views(self, part: Tensor, shapes: Sequence[Tensor]) -> list[Tensor]:
        """The rows in one rank's part, shaped like `shapes`."""
        return [
            part[start : start + like.numel()].view_as(like) for start, like in zip(self.starts, shapes, strict=True)
        ]


def make_buckets(
    parameters: list[nn.Parameter], size: float, group: ProcessGroup, ranks: int, rank: int
) -> list[tuple[int, Bucket]]:
    """Buckets of about `size` bytes in the given order, each with the place of its last weight in it."""
    found, held = [], list[nn.Parameter]()
    for index, parameter in enumerate(parameters):
        held.append(parameter)
        if sum(p.nbytes for p in held) >= size or index == len(parameters) - 1:
            found.append((index, Bucket(held, group, ranks, rank)))
            held = []
    return found
