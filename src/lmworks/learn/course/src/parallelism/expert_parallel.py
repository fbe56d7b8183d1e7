"""Expert parallelism: each rank has some of the experts, and vectors of tokens are sent to them and back.

    torchrun --nproc_per_node=4 src/parallelism/expert_parallel.py

compares with one rank that has all experts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from communication.links import Link

Expert = Callable[[Tensor], Tensor]  # (rows, width) → (rows, width), each row for itself


def route(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """x (tokens, width), router (experts, width) → the experts of each token and their weights, both (tokens, top_k).

    The likeliest experts by softmax(x · routerᵀ); their weights are those probabilities, over their sum.
    """
    # exercise expert_dispatch.route(x, router, top_k)
    weights, chosen = (x @ router.T).softmax(dim=-1).topk(top_k, dim=-1)
    return chosen, weights / weights.sum(dim=-1, keepdim=True)
    # end expert_dispatch.route


def dispatch(x: Tensor, chosen: Tensor, weights: Tensor, experts: list[Expert], link: Link) -> Tensor:
    """Σ weight · expert(x) over the chosen experts of each of this rank's tokens, in the shape of x.

    experts: those of this rank, all ranks have as many. The first of rank r is expert r · len(experts) of `chosen`.
    """
    # exercise expert_dispatch.dispatch(x, chosen, weights, experts, link)
    local, top_k = len(experts), chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs by expert, so by rank
    given = chosen.flatten().bincount(minlength=link.ranks * local)  # pairs of each expert
    each = [local] * link.ranks
    got = link.all_to_all(given, each, each).view(link.ranks, local)  # from each rank for each expert here
    to, of = given.view(link.ranks, local).sum(dim=1).tolist(), got.sum(dim=1).tolist()
    arrived = link.all_to_all(x[order // top_k], to, of)
    expert = torch.arange(local).repeat(link.ranks).repeat_interleave(got.flatten())
    results = torch.empty_like(arrived)
    for index, compute in enumerate(experts):
        results[expert == index] = compute(arrived[expert == index])
    back = link.all_to_all(results, of, to) * weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(x).index_add(0, order // top_k, back)
    # end expert_dispatch.dispatch


def main() -> None:
    dist.init_process_group("gloo")
    link = Link()
    generator = torch.Generator().manual_seed(0)
    tokens, width, local, top_k = 64, 32, 2, 2
    router = torch.randn(link.ranks * local, width, generator=generator)
    matrices = torch.randn(link.ranks * local, width, width, generator=generator)
    experts: list[Expert] = [lambda rows, matrix=matrix: F.gelu(rows @ matrix.T) for matrix in matrices]
    x = torch.randn(link.ranks, tokens, width, generator=generator)[link.rank]
    chosen, weights = route(x, router, top_k)
    out = dispatch(x, chosen, weights, experts[link.rank * local : (link.rank + 1) * local], link)
    if link.rank == 0:
        everyone = torch.stack([expert(x) for expert in experts], dim=1)
        expected = (everyone.gather(1, chosen.unsqueeze(-1).expand(-1, -1, width)) * weights.unsqueeze(-1)).sum(dim=1)
        sent = int((chosen // local != link.rank).sum())
        print(f"rank 0 of {link.ranks}: {sent} of {chosen.numel()} vectors go to experts of other ranks")
        print(
            f"relative difference from one rank that has all experts: {(out - expected).norm() / expected.norm():.1g}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
