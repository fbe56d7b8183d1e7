"""Routers: what each sends where, and what it is worth."""

from __future__ import annotations

import pytest

from lmworks.fleet.autoscale import Static
from lmworks.fleet.generate import Traffic, generate
from lmworks.fleet.routing import ROUTERS, make_router
from lmworks.fleet.server import Sequence, Server
from lmworks.fleet.server_model import ServerModel, StepTime
from lmworks.fleet.simulate import simulate
from lmworks.fleet.trace import Arrival
from lmworks.spec import SpecError

MODEL = ServerModel(StepTime(((0, 0.01), (64, 0.03)), key=1e-7, prompt_token=2e-4), blocks=4000, max_seqs=64)


def servers(*loads: int) -> list[Server]:
    found = [Server(MODEL, 16) for _ in loads]
    for server, load in zip(found, loads, strict=True):
        for number in range(load):
            server.add(Sequence(number, Arrival(0.0, 100, 10)), 0.0)
    return found


def test_round_robin_takes_turns() -> None:
    router, found = make_router("round_robin"), servers(5, 0, 0)
    assert [found.index(router(found, Arrival(0, 1, 1))) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_loaded_takes_the_emptiest_and_ties_by_chance() -> None:
    router, found = make_router("least_loaded"), servers(3, 1, 1)
    assert {found.index(router(found, Arrival(0, 1, 1))) for _ in range(40)} == {1, 2}


def test_power_of_two_never_takes_the_fullest() -> None:
    router, found = make_router("power_of_two"), servers(9, 4, 1, 2)
    taken = [found.index(router(found, Arrival(0, 1, 1))) for _ in range(600)]
    assert 0 not in taken
    assert taken.count(2) == pytest.approx(300, abs=60)  # in half of the six pairs


def test_prefix_aware_weighs_the_prefix_against_the_load() -> None:
    ids = tuple(range(20))  # 320 tokens
    found = servers(0, 0)
    found[0].add(Sequence(0, Arrival(0.0, 320, 1, ids)), 0.0)
    found[0].wake()
    router = make_router("prefix_aware")
    assert {found.index(router(found, Arrival(1.0, 321, 1, ids))) for _ in range(20)} == {0}
    for number in range(4):  # 400 tokens of others outweigh the 320 that are cached
        found[0].add(Sequence(1 + number, Arrival(1.0, 100, 10)), 1.0)
    assert {found.index(router(found, Arrival(1.0, 321, 1, ids))) for _ in range(20)} == {1}


def test_prefix_aware_finds_more_than_round_robin() -> None:
    """Sessions whose prompts hold all turns before: their server has them, the others have not."""
    trace = generate("heavy_tailed", Traffic(4.0, 200, 100, 300.0, longest=8000), seed=0)
    prompts = sum(one.prompt for one in trace.arrivals)
    share = {
        name: sum(one.cached for one in simulate(trace, MODEL, make_router(name), Static(4)).served) / prompts
        for name in ("round_robin", "prefix_aware")
    }
    assert share["prefix_aware"] > share["round_robin"] + 0.2


def test_unknown_routers_are_named() -> None:
    with pytest.raises(SpecError, match="least_loaded"):
        make_router("least_loadd")
    assert set(ROUTERS) == {"round_robin", "least_loaded", "power_of_two", "prefix_aware"}
