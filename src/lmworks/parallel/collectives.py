"""Collectives that autograd can differentiate: each forward operation with the one that its backward pass runs.

    copy_to_region              identity          ↔  all-reduce       (enter a tensor-parallel region)
    reduce_from_region          all-reduce        ↔  identity         (leave it)
    gather_to_region            all-gather        ↔  reduce-scatter   (enter it from sequence shards)
    scatter_from_region         reduce-scatter    ↔  all-gather       (leave it to sequence shards)
    differentiable_all_to_all   all-to-all        ↔  all-to-all back

The dimension that is gathered or scattered has chunks of equal size. A group of one does nothing.
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
    """Send rows of x in runs of `in_splits`, one for each rank; receive runs of `out_splits`."""
    return ops.wait_tensor(ops.all_to_all_single(x.contiguous(), out_splits, in_splits, group.group_name))


class CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class GatherToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad, ctx.dim, ctx.group), None, None


class ScatterFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.group), None, None


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out_splits: list[int], in_splits: list[int], group: ProcessGroup) -> Tensor:
        ctx.back = in_splits, out_splits, group
        return all_to_all(x, out_splits, in_splits, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, *ctx.back), None, None, None


def copy_to_region(x: Tensor, group: ProcessGroup) -> Tensor:
    return x if group.size() == 1 else CopyToRegion.apply(x, group)


def reduce_from_region(x: Tensor, group: ProcessGroup) -> Tensor:
    return x if group.size() == 1 else ReduceFromRegion.apply(x, group)


def gather_to_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return x if group.size() == 1 else GatherToRegion.apply(x, dim, group)


def scatter_from_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return x if group.size() == 1 else ScatterFromRegion.apply(x, dim, group)


def differentiable_all_to_all(x: Tensor, out_splits: list[int], in_splits: list[int], group: ProcessGroup) -> Tensor:
    return x if group.size() == 1 else AllToAll.apply(x, out_splits, in_splits, group)
