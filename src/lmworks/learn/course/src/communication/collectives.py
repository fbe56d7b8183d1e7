"""Collectives by hand, around a ring: each rank talks to its two neighbours.

    torchrun --nproc_per_node=4 src/communication/collectives.py

compares the ring with gloo's own all-reduce.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from communication.links import Link


def ring_reduce_scatter(x: Tensor, link: Link) -> Tensor:
    """x (ranks · n) on every rank → chunk `link.rank` of the sum over ranks (n). x is left as it is."""
    # exercise reduce_scatter(x, link)
    chunks = list(x.chunk(link.ranks))
    right, left = (link.rank + 1) % link.ranks, (link.rank - 1) % link.ranks
    for turn in range(link.ranks - 1):
        leaving, coming = (link.rank - turn - 1) % link.ranks, (link.rank - turn - 2) % link.ranks
        chunks[coming] = chunks[coming] + link.exchange(right, chunks[leaving], left)
    return chunks[link.rank]
    # end reduce_scatter


def ring_all_gather(own: Tensor, link: Link) -> Tensor:
    """Chunk `link.rank` (n) of each rank → all of them in order (ranks · n)."""
    # exercise all_gather(own, link)
    chunks = [own] * link.ranks
    right, left = (link.rank + 1) % link.ranks, (link.rank - 1) % link.ranks
    passing = own
    for turn in range(link.ranks - 1):
        passing = link.exchange(right, passing, left)
        chunks[(link.rank - turn - 1) % link.ranks] = passing
    return torch.cat(chunks)
    # end all_gather


def ring_all_reduce(x: Tensor, link: Link) -> Tensor:
    """The sum over ranks, in the shape of x, whatever that is."""
    # exercise ring_all_reduce(x, link)
    flat = x.flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % link.ranks))
    total = ring_all_gather(ring_reduce_scatter(padded, link), link)
    return total[: len(flat)].view(x.shape)
    # end ring_all_reduce


def zero2_step(weights: Tensor, grad: Tensor, momentum: Tensor, lr: float, link: Link) -> tuple[Tensor, Tensor]:
    """One update of SGD with momentum 0.9, as ZeRO-2 does it: (all weights, this rank's momentum).

    weights and grad (ranks · n): the weights are the same on all ranks, each has the gradient of its own batch, and the
    update is by their mean. momentum (n): of this rank's chunk of the weights alone.
    """
    # exercise zero2(weights, grad, momentum, lr, link)
    own = ring_reduce_scatter(grad, link) / link.ranks
    momentum = 0.9 * momentum + own
    shard = weights.chunk(link.ranks)[link.rank] - lr * momentum
    return ring_all_gather(shard, link), momentum
    # end zero2


def main() -> None:
    dist.init_process_group("gloo")
    link = Link()
    for count in (1_000, 1_000_000):
        x = torch.randn(count, generator=torch.Generator().manual_seed(link.rank))
        expected = x.clone()
        dist.all_reduce(expected)
        began = time.perf_counter()
        got = ring_all_reduce(x, link)
        seconds = time.perf_counter() - began
        if link.rank == 0:
            apart = (got - expected).abs().max().item()
            print(f"{count:>9,} numbers over {link.ranks} ranks: {1e3 * seconds:.2f} ms, {apart:.1g} from gloo's sum")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
