"""Schedules of collectives as data: rounds of transfers between ranks.

A buffer is cut into equal chunks. All transfers of a round happen at once and read what their sender held before the
round. What a rank holds at the start: of an all-reduce and a reduce-scatter every chunk (its own addend), of an
all-gather chunk `rank`, of a broadcast everything on rank 0, of an all-to-all the chunks `rank * ranks + peer`. At the
end a reduce-scatter leaves chunk `rank` on each rank, an all-to-all the chunks `peer * ranks + rank`.

Sources: Thakur, Rabenseifner and Gropp 2005 (recursive halving and doubling, Bruck, scatter + all-gather), Patarasuk
and Yuan 2009 (ring), Sanders, Speck and Träff 2009 (two trees), NCCL's in-order binary trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest

from ...spec import SpecError


@dataclass(frozen=True)
class Transfer:
    """`src` sends these chunks to `dst`, which adds them to its own (`reduce`) or replaces them."""

    src: int
    dst: int
    chunks: tuple[int, ...]
    reduce: bool = False


Round = list[Transfer]


@dataclass(frozen=True)
class Schedule:
    collective: str
    algorithm: str
    ranks: int
    chunks: int  # into which the buffer of a rank is cut; of an all-to-all one for each peer
    rounds: list[Round]

    def sent(self, rank: int) -> float:
        """Bytes that a rank sends for each byte of the buffer."""
        return sum(len(move.chunks) for turn in self.rounds for move in turn if move.src == rank) / self.chunks

    @property
    def most_sent(self) -> float:
        return max(self.sent(rank) for rank in range(self.ranks))


def schedule(collective: str, algorithm: str, ranks: int, members: int = 1, pipeline: int = 1) -> Schedule:
    """`members`: ranks of a machine, for hierarchical ones; `pipeline`: pieces that follow one another down a chain or
    a tree.
    """
    try:
        make = MAKERS[collective, algorithm]
    except KeyError:
        known = ", ".join(name for kind, name in MAKERS if kind == collective)
        raise SpecError(f"no schedule of {collective} by {algorithm}; there are {known or 'none'}") from None
    chunks, rounds = make(ranks, members, pipeline)
    return Schedule(collective, algorithm, ranks, chunks, [turn for turn in rounds if turn])


Made = tuple[int, Iterable[Round]]


def together(*parts: Iterable[Round]) -> list[Round]:
    """Schedules that run at the same time, round by round."""
    return [[move for turn in turns for move in turn] for turns in zip_longest(*parts, fillvalue=[])]


def power_below(ranks: int) -> int:
    return 1 << (ranks.bit_length() - 1)


# --- rings -----------------------------------------------------------------------------------------------


def ring_reduce(places: list[int], pieces: list[tuple[int, ...]]) -> list[Round]:
    """Reduce-scatter: `places[i]` ends with `pieces[i]`."""
    count = len(places)
    return [
        [Transfer(places[i], places[(i + 1) % count], pieces[(i - turn - 1) % count], True) for i in range(count)]
        for turn in range(count - 1)
    ]


def ring_gather(places: list[int], pieces: list[tuple[int, ...]]) -> list[Round]:
    """All-gather: `places[i]` begins with `pieces[i]`."""
    count = len(places)
    return [
        [Transfer(places[i], places[(i + 1) % count], pieces[(i - turn) % count]) for i in range(count)]
        for turn in range(count - 1)
    ]


def singles(ranks: int) -> list[tuple[int, ...]]:
    return [(chunk,) for chunk in range(ranks)]


def ring_all_reduce(ranks: int, members: int, pipeline: int) -> Made:
    everyone = list(range(ranks))
    return ranks, ring_reduce(everyone, singles(ranks)) + ring_gather(everyone, singles(ranks))


def ring_reduce_scatter(ranks: int, members: int, pipeline: int) -> Made:
    return ranks, ring_reduce(list(range(ranks)), singles(ranks))


def ring_all_gather(ranks: int, members: int, pipeline: int) -> Made:
    return ranks, ring_gather(list(range(ranks)), singles(ranks))


def chain_broadcast(ranks: int, members: int, pipeline: int) -> Made:
    rounds = range(ranks - 2 + pipeline)
    return pipeline, [
        [Transfer(rank, rank + 1, (turn - rank,)) for rank in range(ranks - 1) if 0 <= turn - rank < pipeline]
        for turn in rounds
    ]


# --- trees -----------------------------------------------------------------------------------------------


def parent(role: int, ranks: int) -> int:
    """In an in-order binary tree with root 0; odd roles are leaves."""
    low = role & -role
    up = (role ^ low) | (low << 1)
    return up if up < ranks else role ^ low


def tree_parents(ranks: int, second: bool = False) -> dict[int, int]:
    """Rank → parent; the root is missing. Inner ranks of the first tree are leaves of the second."""

    def place(role: int) -> int:
        if not second:
            return role
        return ranks - 1 - role if ranks % 2 == 0 else (role + 1) % ranks

    return {place(role): place(parent(role, ranks)) for role in range(1, ranks)}


def depths(parents: dict[int, int]) -> dict[int, int]:
    def depth(rank: int) -> int:
        return 1 + depth(parents[rank]) if rank in parents else 0

    return {rank: depth(rank) for rank in {*parents, *parents.values()}}


def tree_rounds(parents: dict[int, int], pieces: list[int], up: bool) -> list[Round]:
    """Pieces follow one another: up to the root (if `up`: a reduction), then down."""
    below = depths(parents)
    deepest = max(below.values(), default=0)
    climb = deepest if up else 0
    rounds: list[Round] = [[] for _ in range(climb + deepest + len(pieces) - 1)]
    for order, piece in enumerate(pieces):
        for rank, above in parents.items():
            if up:
                rounds[order + deepest - below[rank]].append(Transfer(rank, above, (piece,), True))
            rounds[order + climb + below[rank] - 1].append(Transfer(above, rank, (piece,)))
    return rounds


def tree_all_reduce(ranks: int, members: int, pipeline: int) -> Made:
    return pipeline, tree_rounds(tree_parents(ranks), list(range(pipeline)), up=True)


def double_tree_all_reduce(ranks: int, members: int, pipeline: int) -> Made:
    halves = list(range(pipeline)), list(range(pipeline, 2 * pipeline))
    trees = tree_parents(ranks), tree_parents(ranks, second=True)
    return 2 * pipeline, together(*(tree_rounds(tree, half, True) for tree, half in zip(trees, halves, strict=True)))


def tree_broadcast(ranks: int, members: int, pipeline: int) -> Made:
    return pipeline, tree_rounds(tree_parents(ranks), list(range(pipeline)), up=False)


# --- recursive halving and doubling ----------------------------------------------------------------------


def halving(ranks: int, chunks: int) -> list[Round]:
    """Reduce-scatter among a power of two, nearest partner first: the largest messages travel least.

    Chunk c ends on rank c mod ranks.
    """
    rounds = []
    bit = 1
    while bit < ranks:
        low = bit - 1  # bits on which a rank and the chunks it still works on agree
        rounds.append(
            [
                Transfer(rank, rank ^ bit, kept, True)
                for rank in range(ranks)
                if (kept := tuple(c for c in range(chunks) if c & low == rank & low and (c ^ rank) & bit))
            ]
        )
        bit *= 2
    return rounds


def reversed_copies(rounds: list[Round]) -> list[Round]:
    """An all-gather is its reduce-scatter read backwards."""
    return [[Transfer(move.dst, move.src, move.chunks) for move in turn] for turn in reversed(rounds)]


def fold(ranks: int, chunks: int) -> Round:
    """Ranks beyond a power of two hand everything to a partner."""
    core = power_below(ranks)
    return [Transfer(rank, rank - core, tuple(range(chunks)), True) for rank in range(core, ranks)]


def halving_doubling_all_reduce(ranks: int, members: int, pipeline: int) -> Made:
    core = power_below(ranks)
    first = [fold(ranks, core)]
    down = halving(core, core)
    return core, [*first, *down, *reversed_copies(down), *reversed_copies(first)]


def recursive_doubling_all_reduce(ranks: int, members: int, pipeline: int) -> Made:
    core = power_below(ranks)
    first = [fold(ranks, 1)]
    middle = [
        [Transfer(rank, rank ^ (1 << bit), (0,), True) for rank in range(core)] for bit in range(core.bit_length() - 1)
    ]
    return 1, [*first, *middle, *reversed_copies(first)]


def recursive_halving_reduce_scatter(ranks: int, members: int, pipeline: int) -> Made:
    core = power_below(ranks)
    last = [Transfer(rank - core, rank, (rank,)) for rank in range(core, ranks)]
    return ranks, [fold(ranks, ranks), *halving(core, ranks), last]


def recursive_doubling_all_gather(ranks: int, members: int, pipeline: int) -> Made:
    if ranks != power_below(ranks):
        raise SpecError(f"recursive_doubling of all_gather wants a power of two, not {ranks} ranks; bruck takes any")
    return ranks, reversed_copies(halving(ranks, ranks))


# --- Bruck, pairwise, scatter ----------------------------------------------------------------------------


def bruck_all_gather(ranks: int, members: int, pipeline: int) -> Made:
    rounds, held = [], 1
    while held < ranks:
        count = min(held, ranks - held)
        rounds.append(
            [
                Transfer(rank, (rank - held) % ranks, tuple((rank + k) % ranks for k in range(count)))
                for rank in range(ranks)
            ]
        )
        held += count
    return ranks, rounds


def scatter_all_gather_broadcast(ranks: int, members: int, pipeline: int) -> Made:
    """Van de Geijn's: a binomial scatter from rank 0, then a ring."""
    rounds = []
    bit = 1 << (ranks - 1).bit_length() >> 1
    while bit:
        rounds.append(
            [
                Transfer(rank, rank + bit, tuple(range(rank + bit, min(rank + 2 * bit, ranks))))
                for rank in range(0, ranks - bit, 2 * bit)
            ]
        )
        bit //= 2
    return ranks, [*rounds, *ring_gather(list(range(ranks)), singles(ranks))]


def pairwise_all_to_all(ranks: int, members: int, pipeline: int) -> Made:
    return ranks, [
        [Transfer(rank, (rank + turn) % ranks, (rank * ranks + (rank + turn) % ranks,)) for rank in range(ranks)]
        for turn in range(1, ranks)
    ]


def bruck_all_to_all(ranks: int, members: int, pipeline: int) -> Made:
    """A block that must travel k ranks goes once for each bit of k."""
    rounds, bit = [], 1
    while bit < ranks:
        turn = []
        for rank in range(ranks):
            held = []  # a block that has made the lower bits of its way, and has this one before it
            for way in range(1, ranks):
                if way & bit:
                    src = (rank - (way & (bit - 1))) % ranks
                    held.append(src * ranks + (src + way) % ranks)
            turn.append(Transfer(rank, (rank + bit) % ranks, tuple(held)))
        rounds.append(turn)
        bit *= 2
    return ranks, rounds


# --- hierarchical: `members` of each machine, then ranks of the same place in every machine ----------------


def machines_of(ranks: int, members: int) -> tuple[list[list[int]], list[list[int]]]:
    """Ranks by machine, and by place in the machine."""
    if ranks % members:
        raise SpecError(f"hierarchical wants machines that are full: {ranks} ranks are not a multiple of {members}")
    inside = [list(range(first, first + members)) for first in range(0, ranks, members)]
    return inside, [list(range(place, ranks, members)) for place in range(members)]


def hierarchical_reduce_scatter(ranks: int, members: int, pipeline: int) -> Made:
    inside, across = machines_of(ranks, members)
    columns = [tuple(column) for column in across]  # chunk `rank` ends on its rank: a place keeps its whole column
    first = together(*(ring_reduce(places, columns) for places in inside))
    return ranks, first + together(*(ring_reduce(column, [(rank,) for rank in column]) for column in across))


def hierarchical_all_gather(ranks: int, members: int, pipeline: int) -> Made:
    chunks, rounds = hierarchical_reduce_scatter(ranks, members, pipeline)
    return chunks, reversed_copies(list(rounds))


def hierarchical_all_reduce(ranks: int, members: int, pipeline: int) -> Made:
    """Reduce-scatter in each machine, all-reduce of each part between machines, all-gather in each machine."""
    chunks, rounds = hierarchical_reduce_scatter(ranks, members, pipeline)
    down = list(rounds)
    return chunks, [*down, *reversed_copies(down)]


def hierarchical_all_to_all(ranks: int, members: int, pipeline: int) -> Made:
    """Blocks go to the place of their receiver in the sender's machine first, then to its machine."""
    rounds: list[Round] = []
    for turn in range(1, members):
        rounds.append(
            [
                Transfer(rank, near, tuple(rank * ranks + dst for dst in range(near % members, ranks, members)))
                for rank in range(ranks)
                for near in [rank - rank % members + (rank + turn) % members]
            ]
        )
    machines_of(ranks, members)
    for turn in range(1, ranks // members):
        rounds.append(
            [
                Transfer(rank, far, tuple(src * ranks + far for src in range(first, first + members)))
                for rank in range(ranks)
                for far in [(rank + turn * members) % ranks]
                for first in [rank - rank % members]
            ]
        )
    return ranks, rounds


Maker = Callable[[int, int, int], Made]
MAKERS: dict[tuple[str, str], Maker] = {
    ("all_reduce", "ring"): ring_all_reduce,
    ("all_reduce", "tree"): tree_all_reduce,
    ("all_reduce", "double_tree"): double_tree_all_reduce,
    ("all_reduce", "recursive_doubling"): recursive_doubling_all_reduce,
    ("all_reduce", "halving_doubling"): halving_doubling_all_reduce,
    ("all_reduce", "hierarchical"): hierarchical_all_reduce,
    ("reduce_scatter", "ring"): ring_reduce_scatter,
    ("reduce_scatter", "recursive_halving"): recursive_halving_reduce_scatter,
    ("reduce_scatter", "hierarchical"): hierarchical_reduce_scatter,
    ("all_gather", "ring"): ring_all_gather,
    ("all_gather", "recursive_doubling"): recursive_doubling_all_gather,
    ("all_gather", "bruck"): bruck_all_gather,
    ("all_gather", "hierarchical"): hierarchical_all_gather,
    ("broadcast", "ring"): chain_broadcast,
    ("broadcast", "tree"): tree_broadcast,
    ("broadcast", "scatter_all_gather"): scatter_all_gather_broadcast,
    ("all_to_all", "pairwise"): pairwise_all_to_all,
    ("all_to_all", "bruck"): bruck_all_to_all,
    ("all_to_all", "hierarchical"): hierarchical_all_to_all,
}
