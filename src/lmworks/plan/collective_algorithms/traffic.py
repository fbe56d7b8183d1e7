"""Rounds and bytes of each algorithm, in closed form: what its α and β terms multiply.

`schedules.py` has the same algorithms step by step; tests execute them and compare. Bytes are shares of the buffer, the
whole one as nccl-tests counts it, that the busiest rank sends. p ranks stand in N machines, m in each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log2
from typing import Self

from .schedules import power_below

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


@dataclass(frozen=True)
class Traffic:
    inside_rounds: int = 0  # on the links of a machine
    across_rounds: int = 0  # on the network between machines
    inside: float = 0.0  # bytes on those links, of the busiest rank
    across: float = 0.0  # bytes on the network, of the busiest port

    @property
    def rounds(self) -> int:
        return self.inside_rounds + self.across_rounds

    @property
    def sent(self) -> float:
        return self.inside + self.across

    @classmethod
    def flat(cls, p: int, m: int, rounds: int, sent: float) -> Self:
        """On one level: all inside where there is one machine, otherwise all across."""
        return cls(rounds, 0, sent, 0.0) if m == p else cls(0, rounds, 0.0, sent)


@dataclass(frozen=True)
class Algorithm:
    name: str
    formula: str  # flat, of n bytes
    source: str
    traffic: Callable[[int, int], Traffic]  # of p ranks, m in a machine
    nccl: str = ""  # NCCL_ALGO that has it


def lg(count: int) -> int:
    return (count - 1).bit_length()


def ring(turns: int, p: int, m: int) -> Traffic:
    """Rings shifted by one rank use all ports of a machine; each carries its share."""
    sent, machines = turns * (p - 1) / p, p // m
    if machines == 1:
        return Traffic(turns * (p - 1), 0, sent, 0.0)
    far = turns * (machines - 1)
    return Traffic(turns * (p - 1) - far, far, sent - sent / m, sent / m)


def tree(turns: int, trees: int, p: int, m: int) -> Traffic:
    """Trees between machines, a chain inside each, as NCCL has them; a tree of ranks where there is one machine."""
    count = p if m == p else p // m
    most = float(min(count - 1, 3))  # of an inner rank: one up, one to each child
    if turns == 1:
        most = 2.0 if count > 3 else 1.0  # of a broadcast: nothing up
    if trees == 2 and count > 2:
        most = (most + 1) / 2  # inner in one tree, leaf in the other, half of the bytes each
    if m == p or m == 1:
        return Traffic.flat(p, m, turns * lg(count), most)
    return Traffic(turns * (m - 1), turns * lg(count), float(turns), most / m)


def recursive(turns: int, p: int, m: int, *, halve: bool) -> Traffic:
    """Among the power of two below p, near partners for the large messages; `halve`: messages shrink with distance.

    The ranks beyond it first hand their buffer to a partner, and get the result at the end.
    """
    core = power_below(p)
    near = core if m == p else min(m & -m, core)  # partners at a shorter distance are in the same machine
    rounds_near, rounds_far = turns * int(log2(near)), turns * int(log2(core // near))
    if halve:
        sent_near, sent_far = turns * (1 - 1 / near), turns * (1 / near - 1 / core)
    else:
        sent_near, sent_far = float(rounds_near), float(rounds_far)
    extra = 0 if core == p else 1
    if m == p:
        return Traffic(rounds_near + 2 * extra, 0, sent_near + extra, 0.0)
    return Traffic(rounds_near, rounds_far + 2 * extra, sent_near, sent_far + extra)


def recursive_scatter(p: int, m: int) -> Traffic:
    """A reduce-scatter by halving; a rank beyond the power of two sends its whole buffer, which is the most."""
    found = recursive(1, p, m, halve=True)
    if power_below(p) == p:
        return found
    return Traffic(found.inside_rounds, found.across_rounds, *((1.0, 0.0) if m == p else (0.0, 1.0)))


def bruck_exchange(p: int, m: int) -> Traffic:
    """A block that must travel k ranks is sent once for each bit of k."""
    return Traffic.flat(p, m, lg(p), sum(way.bit_count() for way in range(p)) / p)


def two_levels(turns: int, p: int, m: int) -> Traffic:
    machines = p // m
    return Traffic(turns * (m - 1), turns * (machines - 1), turns * (m - 1) / m, turns * (machines - 1) / p)


def two_level_exchange(p: int, m: int) -> Traffic:
    machines = p // m
    return Traffic(m - 1, machines - 1, (m - 1) / m, (machines - 1) / machines)


def switches_add(p: int, m: int) -> Traffic:
    """A switch adds up what its ports read, and copies to all of them: a byte goes once up and once down.

    With NVLS a rank also sends the 1/m that it has read reduced; with SHARP a port sends its 1/m of the machine's sum.
    """
    if m == p:
        return Traffic(2, 0, 1 + 1 / p, 0.0)
    return Traffic(2 if m > 1 else 0, 2, 1 + 1 / m if m > 1 else 0.0, 1 / m)


def chain(p: int, m: int) -> Traffic:
    machines = p // m
    if machines == 1:
        return Traffic(p - 1, 0, 1.0, 0.0)
    return Traffic(p - machines, machines - 1, 1 - 1 / m, 1 / m)


def pairwise(p: int, m: int) -> Traffic:
    return Traffic.flat(p, m, p - 1, (p - 1) / p) if m in (1, p) else Traffic(m - 1, p - m, (m - 1) / p, (p - m) / p)


def scatter_all_gather(p: int, m: int) -> Traffic:
    """The root scatters through its own port; the ring then uses all of them."""
    circle = ring(1, p, m)
    if m == p:
        return Traffic(circle.rounds + lg(p), 0, 2 * circle.sent, 0.0)
    near = Traffic(lg(m), lg(p) - lg(m), (m - 1) / p, (p - m) / p)
    rounds = circle.inside_rounds + near.inside_rounds, circle.across_rounds + near.across_rounds
    return Traffic(*rounds, circle.inside + near.inside, circle.across + near.across)


THAKUR = "Thakur, Rabenseifner, Gropp 2005"
ALGORITHMS: dict[str, list[Algorithm]] = {
    "all_reduce": [
        Algorithm("ring", "2(p−1)α + 2(p−1)/p nβ", "Patarasuk, Yuan 2009", lambda p, m: ring(2, p, m), "Ring"),
        Algorithm("tree", "2⌈lg p⌉α + 3nβ", "pipelined binary tree", lambda p, m: tree(2, 1, p, m)),
        Algorithm(
            "double_tree",
            "2⌈lg p⌉α + 2nβ",
            "Sanders, Speck, Träff 2009; NCCL 2.4",
            lambda p, m: tree(2, 2, p, m),
            "Tree",
        ),
        Algorithm("recursive_doubling", "lg p (α + nβ)", THAKUR, lambda p, m: recursive(1, p, m, halve=False)),
        Algorithm(
            "halving_doubling",
            "2 lg p α + 2(p−1)/p nβ",
            f"Rabenseifner's; {THAKUR}",
            lambda p, m: recursive(2, p, m, halve=True),
        ),
        Algorithm(
            "hierarchical",
            "2(m−1)α + 2(m−1)/m nβ inside, 2(N−1)α + 2(N−1)/N n/m β across",
            "reduce-scatter, all-reduce across, all-gather",
            lambda p, m: two_levels(2, p, m),
        ),
        Algorithm("in_network", "2α + (1+1/m) nβ inside, 2α + n/m β across", "NVLS, SHARP", switches_add, "NVLS"),
    ],
    "reduce_scatter": [
        Algorithm("ring", "(p−1)α + (p−1)/p nβ", "Patarasuk, Yuan 2009", lambda p, m: ring(1, p, m), "Ring"),
        Algorithm("recursive_halving", "lg p α + (p−1)/p nβ", THAKUR, recursive_scatter),
        Algorithm("hierarchical", "(p−1)/p nβ in m+N−2 rounds", "two levels", lambda p, m: two_levels(1, p, m)),
    ],
    "all_gather": [
        Algorithm("ring", "(p−1)α + (p−1)/p nβ", THAKUR, lambda p, m: ring(1, p, m), "Ring"),
        Algorithm(
            "recursive_doubling",
            "lg p α + (p−1)/p nβ",
            f"{THAKUR}; powers of two",
            lambda p, m: recursive(1, p, m, halve=True),
        ),
        Algorithm("bruck", "⌈lg p⌉α + (p−1)/p nβ", THAKUR, lambda p, m: Traffic.flat(p, m, lg(p), (p - 1) / p)),
        Algorithm("hierarchical", "(p−1)/p nβ in m+N−2 rounds", "two levels", lambda p, m: two_levels(1, p, m)),
    ],
    "broadcast": [
        Algorithm("ring", "(p−1)α + nβ", "pipelined chain", chain, "Ring"),
        Algorithm("tree", "⌈lg p⌉α + 2nβ", "pipelined binary tree", lambda p, m: tree(1, 1, p, m)),
        Algorithm(
            "scatter_all_gather",
            "(⌈lg p⌉+p−1)α + 2(p−1)/p nβ",
            f"van de Geijn's; {THAKUR}",
            scatter_all_gather,
        ),
    ],
    "all_to_all": [
        Algorithm("pairwise", "(p−1)α + (p−1)/p nβ", THAKUR, pairwise, "send, recv"),
        Algorithm("bruck", "⌈lg p⌉α + ½lg p nβ", THAKUR, bruck_exchange),
        Algorithm("hierarchical", "(m−1)/m nβ inside, (N−1)/N nβ across", "two levels", two_level_exchange),
    ],
}
