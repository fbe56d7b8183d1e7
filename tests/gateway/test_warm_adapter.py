"""Requests for a LoRA adapter go where it is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lmworks.gateway.health import load_of
from lmworks.gateway.policies.warm_adapter import WarmAdapter
from lmworks.gateway.servers import KINDS, Load

METRICS = rb"""# TYPE lmworks:warm_adapters gauge
lmworks:num_requests_running{model_name="base"} 3.0
lmworks:warm_adapters{model_name="base",adapter="sql"} 1.0
lmworks:warm_adapters{model_name="base",adapter="odd \"name\""} 1.0
lmworks:warm_adapters_other{model_name="base",adapter="no"} 1.0
"""


def server(name: str, warm: set[str], queue: float = 0.0) -> Any:
    return SimpleNamespace(url=f"http://{name}/v1", queue=queue, load=Load(warm_adapters=warm))


def chosen(servers: list[Any], adapter: str) -> list[str]:
    exchange: Any = SimpleNamespace(rule=SimpleNamespace(name=adapter))
    return [each.url[7] for each in WarmAdapter().narrow(servers, exchange)]


def test_loaded_adapters_are_read_from_the_metrics() -> None:
    of: Any = SimpleNamespace(kind=KINDS["lmworks"], open=0)
    load = load_of(of, METRICS)
    assert (load.warm_adapters, load.running) == ({"sql", 'odd \\"name\\"'}, 3.0)


def test_servers_that_have_it_are_preferred_unless_they_are_busy() -> None:
    servers = [server("a", {"x"}), server("b", {"y"}), server("c", {"x", "y"})]
    assert chosen(servers, "x") == ["a", "c"]
    assert chosen(servers, "y") == ["b", "c"]
    servers[0].queue = 9.0
    assert chosen(servers, "x") == ["c"]
    servers[2].queue = 9.0
    assert chosen(servers, "x") == ["b"]  # it is loaded there, too


def test_cold_adapters_spread_and_come_back_to_one_server() -> None:
    servers = [server(name, {"other"}) for name in "abc"]
    places = {adapter: chosen(servers, adapter) for adapter in (f"team-{number}" for number in range(30))}
    assert all(len(place) == 1 for place in places.values())
    assert {place[0] for place in places.values()} == {"a", "b", "c"}
    assert places == {adapter: chosen(servers[::-1], adapter) for adapter in places}


def test_without_any_adapter_there_is_no_preference() -> None:
    assert chosen([server("a", set()), server("b", set())], "base") == ["a", "b"]
