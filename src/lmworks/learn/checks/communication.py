"""Further exercises, `src/communication/`: sums of simulated ranks, and the bytes that each of them sends."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..checking.expect import Mismatch, expect_at_most, expect_close, expect_equal
from .simulated_ranks import SimulatedLink, on_ranks

TARGET = "a target of this exercise: bytes that a rank sends"


def inputs(ranks: int, *shape: int) -> list[Tensor]:
    """Whole numbers: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(ranks)
    return [torch.randint(-9, 10, shape, generator=generator).float() for _ in range(ranks)]


def reduce_scatter(module: ModuleType) -> None:
    for ranks, size in ((1, 2), (2, 1), (2, 3), (3, 1), (4, 2), (7, 5)):
        case = f"{ranks} ranks, chunks of {size}"
        given = inputs(ranks, ranks * size)
        kept = [x.clone() for x in given]
        got, network = on_ranks(case, given, module.ring_reduce_scatter)
        chunks = torch.stack(kept).sum(0).chunk(ranks)
        for rank in range(ranks):
            remark = f"rank {rank} ends with chunk {rank} of the sum"
            expect_close(f"{case}: rank {rank}", got[rank], chunks[rank], remark=remark, inputs=torch.stack(kept))
            expect_close(f"{case}: the input of rank {rank} is left as it was", given[rank], kept[rank])
        expect_at_most(f"{case}: bytes sent", max(network.bytes_sent), (ranks - 1) * size * 4, remark=TARGET)


def all_gather(module: ModuleType) -> None:
    for ranks, size in ((1, 2), (2, 1), (3, 1), (4, 2), (7, 5)):
        case = f"{ranks} ranks, chunks of {size}"
        given = inputs(ranks, size)
        got, network = on_ranks(case, given, module.ring_all_gather)
        for rank in range(ranks):
            remark = "every rank ends with all chunks, in the order of ranks"
            expect_close(f"{case}: rank {rank}", got[rank], torch.cat(given), remark=remark)
        expect_at_most(f"{case}: bytes sent", max(network.bytes_sent), (ranks - 1) * size * 4, remark=TARGET)


def ring_all_reduce(module: ModuleType) -> None:
    for ranks, shape in ((1, (2,)), (2, (2,)), (2, (3,)), (3, (2, 3)), (4, (5, 2)), (4, (1,)), (3, ())):
        case = f"{ranks} ranks, shape {shape}"
        given = inputs(ranks, *shape)
        got, network = on_ranks(case, given, module.ring_all_reduce)
        for rank in range(ranks):
            expect_close(f"{case}: rank {rank}", got[rank], torch.stack(given).sum(0), inputs=torch.stack(given))
        chunk = -(-given[0].numel() // ranks)
        most = 2 * (ranks - 1) * chunk * 4
        expect_at_most(f"{case}: bytes sent", max(network.bytes_sent), most, remark=f"{TARGET}, 2 (ranks − 1) chunks")


def zero2(module: ModuleType) -> None:
    for ranks, size, steps in ((1, 2, 2), (2, 1, 1), (2, 2, 2), (4, 3, 3)):
        case = f"{ranks} ranks, {size} weights each, {steps} steps"
        weights = inputs(ranks, ranks * size)[0]
        parameter = torch.nn.Parameter(weights.clone())
        optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
        grads = [inputs(ranks + step, ranks * size) for step in range(steps)]

        def train(weights: Tensor, link: SimulatedLink, grads: list[list[Tensor]] = grads) -> Tensor:
            size = len(weights) // link.ranks
            momentum = torch.zeros(size)
            for each in grads:
                found = module.zero2_step(weights, each[link.rank], momentum, 0.5, link)
                if not isinstance(found, tuple) or len(found) != 2:
                    raise Mismatch("what is returned", "a tuple (weights, momentum)", found)
                weights, momentum = found
                if momentum.shape != (size,):
                    remark = "a rank keeps the momentum of its own chunk: that is what ZeRO saves"
                    raise Mismatch("a rank's momentum, its shape", (size,), tuple(momentum.shape), remark=remark)
            return weights

        got, network = on_ranks(case, [weights] * ranks, train)
        for step in range(steps):
            parameter.grad = torch.stack(grads[step][:ranks]).mean(0)
            optimizer.step()
        for rank in range(ranks):
            expect_close(f"{case}: rank {rank}", got[rank], parameter.data, rtol=1e-4, atol=1e-4)
        most = steps * 2 * (ranks - 1) * size * 4
        expect_at_most(f"{case}: bytes sent", max(network.bytes_sent), most, remark=f"{TARGET}, as an all-reduce has")


def alpha_beta(cost: ModuleType) -> None:
    for ranks, nbytes, ring, tree in ((2, 8, 2 * (10 + 4), 2 * (10 + 8)), (4, 8, 6 * (10 + 2), 4 * (10 + 8)),
                                      (5, 10, 8 * (10 + 2), 6 * (10 + 10)), (8, 0, 140, 60)):  # fmt: skip
        case = f"{ranks} ranks, {nbytes} bytes, α = 10, β = 1"
        remark = "2 (ranks − 1) rounds of a chunk"
        expect_equal(f"ring: {case}", float(cost.ring_seconds(ranks, nbytes, 10, 1)), float(ring), remark=remark)
        remark = "as many rounds up as the tree is deep, as many down, each with the whole buffer"
        expect_equal(f"tree: {case}", float(cost.tree_seconds(ranks, nbytes, 10, 1)), float(tree), remark=remark)
    expect_equal("ring: 2 ranks, 8 bytes, α = 0, β = 0.5", float(cost.ring_seconds(2, 8, 0, 0.5)), 4.0)
    expect_equal("tree: 2 ranks, 8 bytes, α = 0, β = 0.5", float(cost.tree_seconds(2, 8, 0, 0.5)), 8.0)
    expect_equal("two ranks: as many rounds, half of the bytes", float(cost.crossover_bytes(2, 10, 1)), 0.0)
    for ranks, alpha, beta in ((4, 10.0, 1.0), (8, 1.0, 2.0), (64, 5e-6, 2e-11)):
        rounds, depth = 2 * (ranks - 1), (ranks - 1).bit_length()
        expected = (rounds - 2 * depth) * alpha / ((2 * depth - rounds / ranks) * beta)
        remark = "where both take the same time"
        case = f"crossover of {ranks} ranks, α = {alpha:g}, β = {beta:g}"
        expect_equal(case, float(cost.crossover_bytes(ranks, alpha, beta)), expected, remark=remark)


CHECKS = {
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "ring_all_reduce": ring_all_reduce,
    "zero2": zero2,
    "alpha_beta": alpha_beta,
}
