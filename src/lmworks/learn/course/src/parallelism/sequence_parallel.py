"""Sequence parallelism around a tensor-parallel MLP: outside of it each rank has its slice of the sequence.

    torchrun --nproc_per_node=4 src/parallelism/sequence_parallel.py

compares the result and the gradients with those of one rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from communication.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from communication.links import Link


class GatherSequence(torch.autograd.Function):
    """Into the MLP: this rank's slice of the sequence (tokens / ranks, width) → all of it (tokens, width)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link = link
        return ring_all_gather(x, link)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """grad (tokens, width): what comes back through this rank's part of the MLP alone."""
        # exercise sequence_parallel.gather_backward(ctx, grad)
        return ring_reduce_scatter(grad, ctx.link), None
        # end sequence_parallel.gather_backward


class ScatterSequence(torch.autograd.Function):
    """Out of the MLP: a rank's addend of the output (tokens, width) → its slice of the sum (tokens / ranks, width)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link = link
        return ring_reduce_scatter(x, link)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """grad (tokens / ranks, width): of this rank's slice of the output."""
        # exercise sequence_parallel.scatter_backward(ctx, grad)
        return ring_all_gather(grad, ctx.link), None
        # end sequence_parallel.scatter_backward


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def sequence_parallel_mlp(x: Tensor, norm: Tensor, up: Tensor, down: Tensor, link: Link) -> Tensor:
    """gelu(rms_norm(x, norm) · upᵀ) · downᵀ over the whole sequence and the whole inner width.

    x and the result (tokens / ranks, width): this rank's slice of the sequence. norm (width): whole. up (inner / ranks,
    width) and down (width, inner / ranks): this rank's parts.
    """
    # exercise sequence_parallel.forward(x, norm, up, down, link)
    whole = GatherSequence.apply(rms_norm(x, norm), link)
    return ScatterSequence.apply(F.gelu(whole @ up.T) @ down.T, link)
    # end sequence_parallel.forward


def finish_gradients(norm: Tensor, up: Tensor, down: Tensor, link: Link) -> None:
    """Called after the backward pass: makes each .grad the gradient of the loss of all ranks together."""
    # exercise sequence_parallel.gradients(norm, up, down, link)
    norm.grad = ring_all_reduce(norm.grad, link)
    # end sequence_parallel.gradients


def main() -> None:
    dist.init_process_group("gloo")
    link = Link()
    generator = torch.Generator().manual_seed(0)
    x, norm, up, down = (torch.randn(shape, generator=generator) for shape in ((64, 32), (32,), (128, 32), (32, 128)))
    whole = [one.clone().requires_grad_() for one in (x, norm, up, down)]
    expected = F.gelu(rms_norm(whole[0], whole[1]) @ whole[2].T) @ whole[3].T
    expected.square().sum().backward()

    def own(x: Tensor, norm: Tensor, up: Tensor, down: Tensor) -> list[Tensor]:
        """This rank's parts."""
        rank, ranks = link.rank, link.ranks
        return [x.chunk(ranks)[rank], norm, up.chunk(ranks)[rank], down.chunk(ranks, dim=1)[rank]]

    parts = [one.clone().requires_grad_() for one in own(x, norm, up, down)]
    out = sequence_parallel_mlp(*parts, link)
    out.square().sum().backward()
    finish_gradients(*parts[1:], link)
    if link.rank == 0:
        pairs = {"result": (out, expected.chunk(link.ranks)[0])}
        for name, part, grad in zip(("x", "norm", "up", "down"), parts, own(*(one.grad for one in whole)), strict=True):
            pairs[f"gradient of {name}"] = part.grad, grad
        print(f"{link.ranks} ranks beside one, relative difference:")
        for name, (got, wanted) in pairs.items():
            print(f"  {name:<16} {((got - wanted).norm() / wanted.norm()).item():.1g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
