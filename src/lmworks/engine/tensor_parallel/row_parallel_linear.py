"""A linear layer sharded by input: each rank multiplies its shard, and the partial products are summed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class RowParallelLinear(nn.Module):
    """`part` computes this rank's partial product, adapters included; the bias is added after the all-reduce."""

    def __init__(self, part: nn.Module, bias: Tensor | None, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.reduce = part, reduce
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.all_reduce(self.part(x))

    def all_reduce(self, product: Tensor) -> Tensor:
        y = self.reduce(product)
        return y if self.bias is None else y + self.bias
