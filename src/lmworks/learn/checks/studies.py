"""Further exercises, `src/studies/` and `src/reliability/`: worked out by hand, and by what has to hold."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from ..checking.expect import Mismatch, expect_equal


def near(case: str, got: float, expected: float, remark: str = "") -> None:
    if not math.isclose(got, expected, rel_tol=1e-6):
        raise Mismatch(case, expected, got, remark=remark)


def scaling_law(module: ModuleType) -> None:
    for sizes, a, alpha, floor in (([1.0, 10.0], 2.0, 0.5, 0.0), ([1e6, 1e7, 1e8], 400.0, 0.34, 0.0),
                                   ([1e6, 1e7, 1e8], 400.0, 0.34, 1.7)):  # fmt: skip
        losses = [floor + a / size**alpha for size in sizes]
        got = module.fit_power_law(sizes, losses, floor)
        case = f"fit of sizes {[f'{size:g}' for size in sizes]}, floor {floor}"
        near(f"{case}: α", got[1], alpha, "on a line in logarithms the slope is −α")
        near(f"{case}: A", got[0], a)
    got = module.fit_power_law([1.0, math.e, math.e**2], [1.0, 1.0, math.exp(-0.6)])
    near("three points off a line: α", got[1], 0.3, "least squares: the slope is Σ(x − x̄)(y − ȳ) / Σ(x − x̄)²")
    near("three points off a line: A", got[0], math.exp(0.1))
    for flops, numbers in ((6.0, (1.0, 0.5, 1.0, 0.5)), (6e20, (400.0, 0.34, 400.0, 0.34)),
                           (1e21, (406.4, 0.34, 410.7, 0.28)), (1e23, (482.0, 0.35, 2085.0, 0.37))):  # fmt: skip
        a, alpha, b, beta = numbers
        parameters, tokens = module.compute_optimal(flops, *numbers)
        case = f"{flops:g} FLOP, a = {a:g}, α = {alpha}, b = {b:g}, β = {beta}"
        near(f"{case}: 6 · parameters · tokens", 6 * parameters * tokens, flops, "the whole budget is spent")

        def loss(
            n: float, a: float = a, alpha: float = alpha, b: float = b, beta: float = beta, flops: float = flops
        ) -> float:
            return a / n**alpha + b / (flops / (6 * n)) ** beta

        low, high = math.log(1e-6), math.log(flops)
        for _ in range(200):  # thirds of a convex function of log N
            left, right = low + (high - low) / 3, high - (high - low) / 3
            low, high = (low, right) if loss(math.exp(left)) < loss(math.exp(right)) else (left, high)
        if not math.isclose(parameters, math.exp(low), rel_tol=1e-3):
            raise Mismatch(f"{case}: parameters", math.exp(low), parameters, remark="where the loss is least")


def asha(module: ModuleType) -> None:
    for case, rungs, running, eta, expected, remark in (
        ("two have reported", [{0: 2.0, 1: 1.0}, {}], set(), 2, (1, 1), "the better half of two"),
        ("one has reported", [{0: 2.0}, {}], set(), 2, None, "half of one, rounded down, is none: a new trial"),
        ("the best has gone on", [{0: 2.0, 1: 1.0}, {1: 0.9}], set(), 2, None, "the best half is one, and it is gone"),
        ("the best is running", [{0: 2.0, 1: 1.0}, {}], {1}, 2, None, "it is on its way to the next rung already"),
        ("two of four", [{0: 2.0, 1: 1.0, 2: 3.0, 3: 1.5}, {1: 0.9}], set(), 2, (3, 1), "the second of the best half"),
        ("a third of six", [{t: float(t) for t in range(6)}, {0: 0.0}], set(), 3, (1, 1), "the best two of six"),
        ("higher rungs first", [{0: 4.0, 1: 3.0, 2: 2.0, 3: 1.0, 4: 0.5, 5: 0.4}, {2: 1.5, 3: 0.5}, {}], set(), 2,
         (3, 2), "what has come far is finished first"),
        ("the last rung", [{0: 1.0, 1: 2.0}, {0: 0.5, 5: 0.7}], set(), 2, None, "who has run whole goes nowhere"),
        ("equal losses", [{4: 1.0, 2: 1.0}, {}], set(), 2, (2, 1), "the smaller number"),
        ("nothing yet", [{}, {}], set(), 2, None, ""),
    ):  # fmt: skip
        got = module.promotion([dict(rung) for rung in rungs], set(running), eta)
        got = tuple(got) if isinstance(got, list) else got
        expect_equal(f"{case}, η = {eta}", got, expected, remark=remark, rungs=rungs, running=running)


def corrupted_rank(module: ModuleType) -> None:
    weights = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    weights[0, 0] = 1.75  # 1.25 without the first bit of its mantissa
    whole = module.digest(weights)
    expect_equal("the digest is a whole number", isinstance(whole, int), True)
    expect_equal("of a copy", module.digest(weights.clone()), whole)
    expect_equal("of the same weights, not contiguous", module.digest(weights.T.clone().T), whole)
    for place in (0, 7, 19):
        for bit in (30, 22, 0, 1, 15, 31):
            flipped = weights.clone()
            flipped.view(-1).view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(1 << 31)
            remark = "every bit counts, the last of the mantissa as well as the sign"
            same = module.digest(flipped) == whole
            expect_equal(f"bit {bit} of weight {place} flipped: the digest is the same", same, False, remark=remark)
    swapped = weights.clone()
    swapped[0, 0], swapped[0, 1] = weights[0, 1], weights[0, 0]
    same = module.digest(swapped) == whole
    expect_equal("two weights exchanged: the digest is the same", same, False, remark="each place has its own factor")
    zeros = module.digest(torch.zeros(3)), module.digest(torch.tensor([0.0, -0.0, 0.0]))
    expect_equal("0 and −0: the digests are the same", zeros[0] == zeros[1], False, remark="bits, not values")
    nans = torch.full((2,), float("nan"))
    expect_equal("NaN: the digest of a copy is the same", module.digest(nans) == module.digest(nans.clone()), True)
    for digests, expected, remark in (
        ({0: 5, 1: 5, 2: 5}, [], "all agree"),
        ({0: 5, 1: 7, 2: 5}, [1], "two against one"),
        ({0: 7, 1: 5, 2: 5}, [0], "rank 0 may be the wrong one"),
        ({0: 5, 1: 7, 2: 8}, [0, 1, 2], "three that differ: any may be right"),
        ({0: 5, 1: 7}, [0, 1], "of two neither has the majority"),
        ({0: 5, 1: 5, 2: 7, 3: 7}, [0, 1, 2, 3], "two against two"),
        ({3: 5, 8: 5, 9: 5, 12: 7, 13: 8}, [12, 13], "three of five agree"),
        ({0: 1, 1: 2, 2: 2, 3: 3, 4: 4}, [0, 1, 2, 3, 4], "two of five are the most, and not more than half"),
    ):
        expect_equal(f"outliers of {digests}", sorted(module.outliers(dict(digests))), expected, remark=remark)


def resumable_batches(module: ModuleType) -> None:
    def read(seed: int, steps: int, batch: int, documents: int) -> list[int]:
        return [one for step in range(steps) for one in module.batch_at(seed, step, batch, documents)]

    for batch, documents in ((2, 4), (3, 9), (4, 10)):
        case = f"seed 1, batches of {batch}, {documents} documents"
        seen = read(1, 5 * documents, batch, documents)
        epochs = [seen[at : at + documents] for at in range(0, len(seen) - documents + 1, documents)]
        for number, epoch in enumerate(epochs[:3]):
            remark = "an epoch reads each document once; a batch may reach into the next"
            expect_equal(f"{case}: epoch {number}, sorted", sorted(epoch), list(range(documents)), remark=remark)
        different = len({tuple(epoch) for epoch in epochs}) > 1
        expect_equal(f"{case}: epochs differ in their order", different, True)
        again = module.batch_at(1, 3, batch, documents)
        expected = seen[3 * batch : 4 * batch]
        remark = "a function of its arguments alone: what was read before does not count"
        expect_equal(f"{case}: step 3 once more", again, expected, remark=remark)
        torch.manual_seed(0)
        first = module.batch_at(1, 3, batch, documents)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        expect_equal(f"{case}: with another global seed", module.batch_at(1, 3, batch, documents), first)
        untouched = bool(torch.equal(torch.get_rng_state(), before))
        remark = "a generator of its own: dropout would draw other numbers after a resume"
        expect_equal(f"{case}: PyTorch's global generator is left alone", untouched, True, remark=remark)
    orders = {tuple(read(seed, 2, 4, 8)) for seed in range(8)}
    expect_equal("8 seeds: more than four orders", len(orders) > 4, True, remark="the seed decides")
    epochs_of = {seed: [tuple(read(seed, 6, 4, 8)[at : at + 8]) for at in (0, 8, 16)] for seed in range(3)}
    shifted = any(epochs_of[seed][1:] == epochs_of[seed + 1][:2] for seed in range(2))
    remark = "seed + epoch makes epoch 1 of seed 0 the same as epoch 0 of seed 1"
    expect_equal("seeds that follow one another share epochs", shifted, False, remark=remark)
    for ranks in (1, 2, 4):
        together = [one for rank in range(ranks) for one in module.batch_at(3, 5, 8, 20, rank, ranks)]
        remark = "the ranks' parts in order are the batch of one rank"
        expect_equal(f"step 5 on {ranks} ranks together", together, module.batch_at(3, 5, 8, 20), remark=remark)


CHECKS = {
    "scaling_law": scaling_law,
    "asha": asha,
    "corrupted_rank": corrupted_rank,
    "resumable_batches": resumable_batches,
}
