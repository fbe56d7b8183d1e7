"""Collectives: bandwidths by nccl-tests' formulas, every result checked, failures told in one line."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lmworks.bench import collective_ops, collectives
from lmworks.bench.collective_ops import OPS, Group, group_layout, make_call
from lmworks.bench.collectives import Row, Sweep, measure
from lmworks.bench.link_profile import fits_of, links_table
from lmworks.parallel.local_ranks import on_ranks
from lmworks.plan.devices.links import KINDS
from lmworks.plan.devices.profile import read_links
from lmworks.spec import LMWorksError

SIZES = (1024, 4096, 16384, 65536)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return measure(Sweep("cpu", SIZES, dtypes=("fp32", "bf16"), groups=("all", "2"), point_s=0.0, rounds=3), 3)


def test_every_point_is_measured_once(rows: list[Row]) -> None:
    assert set(OPS) == set(KINDS)  # those that a plan prices
    points = [(row.op, row.group, row.dtype, row.in_place, row.bytes) for row in rows]
    assert len(set(points)) == len(points) == Sweep("cpu", SIZES, dtypes=("", ""), groups=("", "")).points() == 160
    assert all(row.ranks == (2 if row.op == "send" or row.group == "2" else 3) for row in rows)
    assert all(row.wrong == 0 and row.fastest_us <= row.time_us_low <= row.time_us <= row.time_us_high for row in rows)


@pytest.mark.parametrize(
    ("op", "ranks", "factor"),  # of nccl-tests, doc/PERFORMANCE.md
    [
        ("all-reduce", 2, 1.0),
        ("all-reduce", 8, 1.75),
        ("reduce-scatter", 4, 0.75),
        ("all-gather", 4, 0.75),
        ("all-to-all", 8, 0.875),
        ("broadcast", 8, 1.0),
        ("send", 2, 1.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(op: str, ranks: int, factor: float) -> None:
    row = Row(op, "all", ranks, "fp32", True, 2_000_000, 1000.0, 990.0, 1010.0, 980.0, 0)
    assert row.algbw == pytest.approx(2.0)  # GB/s: 2 MB in a millisecond
    assert row.busbw == pytest.approx(2.0 * factor)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int64"])
def test_results_are_right_in_and_out_of_place(dtype: str) -> None:
    def on_rank(rank: int) -> dict[str, int]:
        found = {}
        for op in OPS:
            for in_place in Sweep("cpu", SIZES).variants(op):
                call = make_call(op, in_place, 1000, dtype, torch.device("cpu"), Group(None, (0, 1, 2), rank))
                call.fill()
                call.run()
                found[f"{op} {in_place}"] = call.wrong()
        return found

    for found in on_ranks(3, on_rank):
        assert len(found) == 10 and not any(found.values()), found


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_result_is_counted(op: str) -> None:
    """One element of what another rank sends is off by one: whoever gets it says so."""

    def on_rank(rank: int) -> int:
        real: dict[str, Any] = {name: getattr(dist, name) for name in ("all_reduce", "broadcast", "send")}
        for name, function in real.items():

            def damaged(tensor: torch.Tensor, *rest: Any, function: Any = function, **options: Any) -> Any:
                tensor[0] += rank == 0
                return function(tensor, *rest, **options)

            setattr(dist, name, damaged)
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):

            def damaged_input(
                output: torch.Tensor, given: torch.Tensor, *rest: Any, function: Any = getattr(dist, name), **more: Any
            ) -> Any:
                given[-1] += rank == 0
                return function(output, given, *rest, **more)

            setattr(dist, name, damaged_input)
        call = make_call(op, False, 1000, "fp32", torch.device("cpu"), Group(None, (0, 1), rank))
        call.fill()
        call.run()
        return call.wrong()

    assert max(on_ranks(2, on_rank)) == 1


def test_groups_inside_nodes_and_between_them() -> None:
    assert group_layout("all", 6, 3) == [(0, 1, 2, 3, 4, 5)]
    assert group_layout("intra", 6, 3) == [(0, 1, 2), (3, 4, 5)]
    assert group_layout("inter", 6, 3) == [(0, 3), (1, 4), (2, 5)]
    assert group_layout("2", 6, 3) == [(0, 1)]


def test_groups_of_two_nodes() -> None:
    rows = measure(Sweep("cpu", (1024,), ops=("all-reduce",), groups=("intra", "inter"), point_s=0.0), 4, nodes=2)
    assert [(row.group, row.ranks, row.wrong) for row in rows] == [
        ("intra", 2, 0), ("intra", 2, 0), ("inter", 2, 0), ("inter", 2, 0),
    ]  # fmt: skip


def test_a_rank_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*arguments: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return collective_ops.make_call(*arguments)

    monkeypatch.setattr(collectives, "make_call", die)  # forked ranks have it too
    with pytest.raises(LMWorksError, match="rank 1 was ended by SIGKILL while collectives were measured"):
        measure(Sweep("cpu", (1024, 4096)), 3)


def test_a_profile_takes_the_form_that_trainers_call(rows: list[Row]) -> None:
    table = links_table(rows, SIZES, torch.device("cpu"))
    assert read_links("links", table) == table
    chosen = [row for row in rows if row.op == "all-reduce" and row.dtype == "fp32" and row.group == "all"]
    in_place = [row.time_us for row in chosen if row.in_place]
    assert table["all-reduce"]["3"] == collectives.monotone(in_place)
    gathers = [row.time_us for row in rows if (row.op, row.group, row.dtype) == ("all-gather", "2", "fp32")]
    assert table["all-gather"]["2"] == collectives.monotone(gathers[:4])  # in place comes first
    assert list(table["send"]) == ["2"] and set(table["fit"]) == set(OPS)
    assert len(fits_of(rows)) == len(rows) // len(SIZES)
