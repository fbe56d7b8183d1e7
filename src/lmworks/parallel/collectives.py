"""Collectives that autograd can pass through: each forward operation with the one that carries its gradient back.

    copy       identity          ↔  all-reduce       (enter a tensor-parallel region)
    total      all-reduce        ↔  identity         (leave it)
    gather     all-gather        ↔  reduce-scatter   (enter it from sequence shards)
    scatter    reduce-scatter    ↔  all-gather       (leave it to sequence shards)
    exchange   all-to-all        ↔  all-to-all back

`gather` and `scatter` work along a dimension whose chunks are of equal size. A group of one does nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

# The functional operators: torch.compile traces them, and they are named alike in every version of PyTorch.
ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group.group_name))


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Chunks of every rank, joined along `dim`."""
    parts = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))  # along dim 0
    return parts if dim == 0 else torch.cat(parts.chunk(group.size()), dim)


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The sum over ranks, of which each gets its chunk along `dim`."""
    stacked = x.contiguous() if dim == 0 else torch.cat(x.chunk(group.size(), dim))
    return ops.wait_tensor(ops.reduce_scatter_tensor(stacked, "sum", group.size(), group.group_name))


def all_to_all(x: Tensor, out_splits: list[int], in_splits: list[int], group: ProcessGroup) -> Tensor:
    """Rows of x in runs of `in_splits`, one for each rank; back come runs of `out_splits`."""
    return ops.wait_tensor(ops.all_to_all_single(x.contiguous(), out_splits, in_splits, group.group_name))


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad, ctx.dim, ctx.group), None, None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.group), None, None


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out_splits: list[int], in_splits: list[int], group: ProcessGroup) -> Tensor:
        ctx.back = in_splits, out_splits, group
        return all_to_all(x, out_splits, in_splits, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, *ctx.back), None, None, None


def copy(x: Tensor, group: ProcessGroup) -> Tensor:
    return x if group.size() == 1 else Copy.apply(x, group)


def total(x: Tensor, group: ProcessGroup) -> Tensor:
    return x if group.size() == 1 else Total.apply(x, group)


def gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return x if group.size() == 1 else Gather.apply(x, dim, group)


def scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return x if group.size() == 1 else Scatter.apply(x, dim, group)


def exchange(x: Tensor, out_splits: list[int], in_splits: list[int], group: ProcessGroup) -> Tensor:
    return x if group.size() == 1 else Exchange.apply(x, out_splits, in_splits, group)
