"""A layer whose inputs several ranks share: each multiplies its own, and the products are summed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class RowParallelLinear(nn.Module):
    """`part` is all that this rank adds to the sum, adapters too; the bias comes after it."""

    def __init__(self, part: nn.Module, bias: Tensor | None, over_ranks: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.over_ranks = part, over_ranks
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.total(self.part(x))

    def total(self, product: Tensor) -> Tensor:
        y = self.over_ranks(product)
        return y if self.bias is None else y + self.bias
