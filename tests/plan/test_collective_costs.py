"""Time of collective algorithms on a cluster: the planner's where both price one, published runs, crossovers."""

from __future__ import annotations

import csv
from itertools import pairwise
from statistics import median

import numpy as np
import pytest

from lmworks.plan.collective_algorithms.compare import compare, curves
from lmworks.plan.collective_algorithms.costs import Group, algorithms, cost, why_not
from lmworks.plan.collective_algorithms.traffic import COLLECTIVES
from lmworks.spec import SpecError, catalogue, parse_cluster
from lmworks_validation.sources import PUBLISHED

MIB = 2**20
SIZES = 2.0 ** np.arange(8, 34)
NCCL = {"all_reduce": ("ring", "double_tree"), "all_to_all": ("pairwise",)}  # that the planner chooses from


def group(text: str, ranks: int = 0, stride: int = 1, **changes: object) -> Group:
    cluster = parse_cluster(text).replace(**changes)
    return Group.of(cluster, catalogue()[cluster.gpu], ranks or cluster.gpus, stride)


@pytest.mark.parametrize("text", ["16xh100", "1024xh100", "64xa100", "144xgb200", "64xmi300x", "16xl40s"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_between_machines_the_planner_takes_the_faster_of_those_in_nccl(text: str, collective: str) -> None:
    places = group(text, ranks=2, stride=72) if text == "144xgb200" else group(text)
    names = NCCL.get(collective, ("ring",))
    usable = [one for one in algorithms(collective) if one.name in names]
    own = curves(collective, places, usable, SIZES).min(axis=0)
    np.testing.assert_allclose(own, places.planned(collective, SIZES), rtol=1e-12)


def test_hierarchical_is_the_planners_two_levels() -> None:
    """As HSDP is priced: reduce-scatter in a machine, all-reduce across, all-gather."""
    places = group("64xh100")
    links, nbytes = places.fabric, 256.0 * MIB
    expected = (
        links.seconds("reduce-scatter", nbytes, 8)
        + links.seconds("all-reduce", nbytes / 8, 8, 8)
        + links.seconds("all-gather", nbytes, 8)
    )
    found = next(row for row in compare("all_reduce", int(nbytes), places).rows if row.algorithm.name == "hierarchical")
    assert found.seconds == pytest.approx(expected)


def test_eight_h200_as_published() -> None:
    """stas00/ml-engineering, NCCL 2.27.7: 473.1 GB/s on the bus at 4 GiB, 436.2 at 256 MiB; more than a ring has."""
    places = group("8xh200")
    for nbytes, busbw, within in ((2**32, 473.1e9, 0.03), (2**28, 436.2e9, 0.08)):
        found = compare("all_reduce", nbytes, places)
        assert found.winner.algorithm.name == "in_network"
        assert found.busbw(found.winner.seconds) == pytest.approx(busbw, rel=within)
        ring = next(row for row in found.rows if row.algorithm.name == "ring")
        assert found.busbw(ring.seconds) < 0.8 * busbw


def test_published_rings_of_128_machines() -> None:
    """nccl-tests with NCCL_ALGO=Ring on 1,024 H100: the explorer's ring within a tenth."""
    with (PUBLISHED / "nccl_multinode.csv").open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["algorithm"] == "ring"]
    errors = []
    for row in rows:
        places = group("1024xh100", network=row["network"], nic_gbs=float(row["nic_gbs"]))
        found = next(
            one for one in compare("all_reduce", int(row["message_bytes"]), places).rows if one.algorithm.name == "ring"
        )
        errors.append(abs(found.seconds / float(row["time_us"]) * 1e6 - 1))
    assert len(rows) >= 5 and median(errors) < 0.1


@pytest.mark.parametrize("text", ["8xh100", "1024xh100", "64xa100"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_terms(text: str, collective: str) -> None:
    """Time is at most α + β and at least either term; small messages are latency, large ones bandwidth."""
    places = group(text)
    for one in algorithms(collective):
        if why_not(places, collective, one.name):
            continue
        found = cost(places, collective, one, SIZES)
        alpha, beta = np.broadcast_arrays(found.alpha, found.beta, SIZES)[:2]
        assert np.all(found.seconds <= (alpha + beta) * (1 + 1e-9)), one.name
        assert np.all(found.seconds >= np.maximum(alpha, beta) * (1 - 1e-9)), one.name
        assert alpha[0] > beta[0] and beta[-1] > alpha[-1], one.name
        assert np.all(np.diff(found.seconds) >= -1e-12), one.name


def test_more_machines_cost_a_ring_most() -> None:
    """Its rounds grow with the ranks, a tree's with their logarithm (NCCL 2.4's reason for trees)."""
    small = {}
    for machines in (2, 128):
        rows = compare("all_reduce", 64 * 1024, group(f"{8 * machines}xh100")).rows
        small[machines] = {row.algorithm.name: row.seconds for row in rows}
    assert small[128]["ring"] > 20 * small[2]["ring"]
    assert small[128]["double_tree"] < 4 * small[2]["double_tree"]


@pytest.mark.parametrize("text", ["8xh100", "1024xh100", "64xa100"])
def test_crossovers(text: str) -> None:
    """The spans join without a gap, and in each the named algorithm is the fastest."""
    places = group(text)
    for collective in COLLECTIVES:
        spans = compare(collective, MIB, places).crossovers
        assert (spans[0][1], spans[-1][2]) == (2**8, 2**34)
        for (_, _, end), (_, start, _) in pairwise(spans):
            assert end == start
        for name, low, high in spans:
            size = int((low * high) ** 0.5)
            assert compare(collective, size, places).winner.algorithm.name == name


def test_who_can_add_up() -> None:
    missing = compare("all_reduce", MIB, group("64xh100", network="roce")).missing
    assert missing == {"in_network": "the network does not add up (SHARP: InfiniBand)"}
    assert "NVSwitch from Hopper on" in compare("all_reduce", MIB, group("8xa100")).missing["in_network"]
    one = compare("all_reduce", MIB, group("64xa100", ranks=8, stride=8))  # a rank in each machine: the network alone
    assert "in_network" in {row.algorithm.name for row in one.rows} and "hierarchical" in one.missing
    assert compare("all_gather", MIB, group("24xh100")).missing == {
        "recursive_doubling": "24 ranks are no power of two"
    }


def test_what_is_refused() -> None:
    with pytest.raises(SpecError, match=r"the cluster has 8 accelerators, too few for 4 ranks at a stride of 8"):
        group("8xh100", 4, 8)
    with pytest.raises(SpecError, match="they do not fill machines, of which each has 8"):
        group("64xh100", 12)
    with pytest.raises(SpecError, match=r"cluster\.nic_gbs: .* is not in the catalogue"):
        group("16xl4")
    with pytest.raises(SpecError, match="collective 'shout' is not one of"):
        algorithms("shout")
