"""Schedules of collectives, executed by point-to-point messages over gloo: torch's result, and rounds and bytes as the
formulas say.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lmworks.parallel.local_ranks import on_ranks
from lmworks.plan.collective_algorithms.schedules import MAKERS, Schedule, schedule, tree_parents
from lmworks.plan.collective_algorithms.traffic import ALGORITHMS, Algorithm, Traffic
from lmworks.spec import SpecError

WIDTH = 3  # numbers of a chunk


def algorithm_of(collective: str, name: str) -> Algorithm:
    return next(one for one in ALGORITHMS[collective] if one.name == name)


def cases(ranks: int) -> list[Schedule]:
    """Every algorithm; hierarchical ones with all sizes of machines, pipelined ones with one piece and with four."""
    found = []
    for collective, name in MAKERS:
        if name == "hierarchical":
            found += [schedule(collective, name, ranks, m) for m in range(2, ranks) if ranks % m == 0]
        elif (collective, name) == ("all_gather", "recursive_doubling") and ranks & (ranks - 1):
            continue
        else:
            found += [schedule(collective, name, ranks, pipeline=pieces) for pieces in (1, 4)]
    return found


def execute(rank: int, plan: Schedule) -> tuple[Any, Any, int]:
    """This rank's result, torch's, and the bytes that it sent."""
    world = plan.ranks
    slots = world * world if plan.collective == "all_to_all" else plan.chunks
    numbers = torch.Generator().manual_seed(rank)
    mine = torch.randint(1, 1000, (slots, WIDTH), generator=numbers).float()  # whole numbers: sums are exact
    held = starting_chunks(plan, rank, mine)
    sent = 0
    for turn in plan.rounds:
        outgoing, incoming, works = [], [], []
        for move in turn:
            if move.src == rank:
                message = torch.cat([held[chunk] for chunk in move.chunks])
                outgoing.append(message)
                works.append(dist.isend(message, move.dst))
                sent += message.nbytes
            if move.dst == rank:
                message = torch.empty(len(move.chunks) * WIDTH)
                incoming.append((move, message))
                works.append(dist.irecv(message, move.src))
        for work in works:
            assert work is not None
            work.wait()
        for move, message in incoming:
            for chunk, part in zip(move.chunks, message.split(WIDTH), strict=True):
                held[chunk] = held[chunk] + part if move.reduce else part.clone()
    result, expected = results(plan, rank, mine, held)
    return result, expected, sent


def starting_chunks(plan: Schedule, rank: int, mine: torch.Tensor) -> dict[int, torch.Tensor]:
    everything = range(len(mine))
    start: dict[str, Any] = {
        "all_gather": [rank],
        "broadcast": everything if rank == 0 else [],
        "all_to_all": range(rank * plan.ranks, (rank + 1) * plan.ranks),
    }
    return {chunk: mine[chunk].clone() for chunk in start.get(plan.collective, everything)}


def results(
    plan: Schedule, rank: int, mine: torch.Tensor, held: dict[int, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    world, wanted = plan.ranks, list(range(len(mine)))
    if plan.collective == "all_gather":
        expected = torch.empty(world, WIDTH)
        dist.all_gather_into_tensor(expected, mine[rank : rank + 1])
    elif plan.collective == "all_to_all":
        wanted = [peer * world + rank for peer in range(world)]
        expected = torch.empty(world, WIDTH)
        dist.all_to_all_single(expected, mine[rank * world : (rank + 1) * world].contiguous())
    else:
        expected = mine.clone()
        dist.broadcast(expected, 0) if plan.collective == "broadcast" else dist.all_reduce(expected)
    if plan.collective == "reduce_scatter":
        wanted, expected = [rank], expected[rank : rank + 1]
    return torch.stack([held[chunk] for chunk in wanted]), expected


def execute_all(rank: int, plans: list[Schedule]) -> list[tuple[bool, int]]:
    found = []
    for plan in plans:
        result, expected, sent = execute(rank, plan)
        found.append((torch.equal(result, expected), sent))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_executed_over_gloo(ranks: int) -> None:
    plans = cases(ranks)
    by_rank = on_ranks(ranks, execute_all, plans)
    for plan, outcomes in zip(plans, zip(*by_rank, strict=True), strict=True):
        name = f"{plan.collective} {plan.algorithm}"
        assert all(right for right, _ in outcomes), name
        buffer = plan.chunks * WIDTH * 4
        assert [sent / buffer for _, sent in outcomes] == pytest.approx([plan.sent(rank) for rank in range(ranks)])
        members = machine_of(plan)
        formula = algorithm_of(plan.collective, plan.algorithm).traffic(ranks, members)
        assert max(sent for _, sent in outcomes) / buffer == pytest.approx(formula.sent), name
        assert len(plan.rounds) == formula.rounds + pieces_of(plan) - 1, name


def machine_of(plan: Schedule) -> int:
    """Members of a machine that a hierarchical schedule was made for: the first rounds stay in one."""
    if plan.algorithm != "hierarchical":
        return 1
    first = plan.rounds[-1] if plan.collective == "all_gather" else plan.rounds[0]
    return max(abs(move.src - move.dst) for move in first) + 1


def pieces_of(plan: Schedule) -> int:
    """Pieces that follow one another."""
    if plan.algorithm == "double_tree":
        return plan.chunks // 2
    return plan.chunks if plan.algorithm == "tree" or (plan.collective, plan.algorithm) == ("broadcast", "ring") else 1


@pytest.mark.parametrize(("collective", "name"), list(MAKERS), ids="-".join)
def test_formulas_equal_schedules_of_more_ranks(collective: str, name: str) -> None:
    """Rounds and bytes of the busiest rank, for every number of ranks up to 33 and every size of machine."""
    for ranks in range(2, 34):
        if (collective, name) == ("all_gather", "recursive_doubling") and ranks & (ranks - 1):
            continue
        for members in (m for m in range(1, ranks) if ranks % m == 0 and (m == 1 or name == "hierarchical")):
            plan = schedule(collective, name, ranks, members)
            formula = algorithm_of(collective, name).traffic(ranks, members)
            assert (len(plan.rounds), plan.most_sent) == (formula.rounds, pytest.approx(formula.sent)), (ranks, members)


@pytest.mark.parametrize(
    ("collective", "name", "ranks", "rounds", "sent"),
    [
        # Patarasuk and Yuan 2009, eq. 1: no rank sends less than 2(p−1)/p in an all-reduce
        ("all_reduce", "ring", 10, 18, 1.8),
        # Thakur, Rabenseifner, Gropp 2005, sections 4.1 to 4.5
        ("all_gather", "recursive_doubling", 8, 3, 7 / 8),
        ("all_gather", "bruck", 6, 3, 5 / 6),
        ("all_gather", "ring", 6, 5, 5 / 6),
        ("broadcast", "scatter_all_gather", 8, 3 + 7, 2 * 7 / 8),
        ("reduce_scatter", "recursive_halving", 8, 3, 7 / 8),
        ("all_to_all", "bruck", 8, 3, 3 / 2),
        ("all_to_all", "pairwise", 8, 7, 7 / 8),
        ("all_reduce", "recursive_doubling", 8, 3, 3),
        ("all_reduce", "halving_doubling", 8, 6, 2 * 7 / 8),
        ("all_reduce", "halving_doubling", 9, 8, 2 * 7 / 8 + 1),
        # Sanders, Speck, Träff 2009; NCCL 2.4: full bandwidth, logarithmic latency
        ("all_reduce", "double_tree", 1024, 20, 2),
    ],
)
def test_published_formulas(collective: str, name: str, ranks: int, rounds: int, sent: float) -> None:
    found = algorithm_of(collective, name).traffic(ranks, 1)
    assert (found.rounds, found.sent) == (rounds, pytest.approx(sent))
    in_one_machine = algorithm_of(collective, name).traffic(ranks, ranks)
    assert in_one_machine == Traffic(rounds, 0, pytest.approx(sent), 0.0)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 64, 100, 1023])
def test_two_trees_share_no_inner_rank(ranks: int) -> None:
    first, second = tree_parents(ranks), tree_parents(ranks, second=True)
    for tree in (first, second):
        assert len(tree) == ranks - 1
        assert max(list(tree.values()).count(rank) for rank in range(ranks)) <= 2
    roots = {min(set(range(ranks)) - tree.keys()) for tree in (first, second)}
    assert set(first.values()) & set(second.values()) <= roots


@pytest.mark.parametrize("ranks", [16, 24, 64])
@pytest.mark.parametrize("members", [4, 8])
def test_bytes_between_machines(ranks: int, members: int) -> None:
    """Near partners first: of halving and doubling, and of a hierarchy, each port sends its share of the buffer."""
    for name in ("halving_doubling", "hierarchical"):
        if name == "halving_doubling" and ranks & (ranks - 1):
            continue
        plan = schedule("all_reduce", name, ranks, members)
        formula = algorithm_of("all_reduce", name).traffic(ranks, members)
        crossing = [
            sum(
                len(move.chunks)
                for turn in plan.rounds
                for move in turn
                if move.src == rank and move.dst // members != rank // members
            )
            for rank in range(ranks)
        ]
        assert max(crossing) / plan.chunks == pytest.approx(formula.across)
        assert formula.across == pytest.approx(2 / members * (1 - members / ranks))


def test_what_has_no_schedule() -> None:
    with pytest.raises(SpecError, match="no schedule of broadcast by bruck; there are ring, tree, scatter_all_gather"):
        schedule("broadcast", "bruck", 4)
    with pytest.raises(SpecError, match="wants a power of two, not 6 ranks"):
        schedule("all_gather", "recursive_doubling", 6)
    with pytest.raises(SpecError, match="6 ranks are not a multiple of 4"):
        schedule("all_reduce", "hierarchical", 6, 4)
    assert math.isclose(schedule("all_reduce", "ring", 4).most_sent, 1.5)
