"""Every panel of the dashboard has data, from a real Prometheus that scrapes a real gateway and a real server."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmworks.launch import to_yaml
from lmworks.observability.alerts import rules
from lmworks.observability.dashboard import ROWS, query
from lmworks.observability.prometheus import RULES_FILE, prometheus_config
from serve_processes import start_server

PANELS = [panel for row in ROWS.values() for panel in row]
WINDOW = "10s"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def until(condition: Callable[[], Any], seconds: float = 90) -> Any:
    end = time.monotonic() + seconds
    while not (found := attempt(condition)):
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.1)
    return found


def attempt(condition: Callable[[], Any]) -> Any:
    try:
        return condition()
    except httpx.TransportError:
        return None


GATEWAY = """
[health]
interval = 0.2
[[pools]]
name = "local"
urls = ["{server}"]
[[pools]]
name = "next"
urls = ["{server}"]
[[models]]
name = "tiny"
hedge_seconds = 20.0
[[rollouts]]
model = "tiny"
stable = "local"
candidate = "next"
shadow = 1.0
[[slos]]
name = "chat"
ttft = 30.0
[[quality_checks]]
model = "tiny"
prompt = "1, 2, 3,"
expect = "."
every = 1.0
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian's package)")
def test_every_panel_has_data(tmp_path: Path, model: Path) -> None:
    """And the rules are loaded, and none of them is in error."""
    server = start_server(model / "tiny", model / "template.jinja", tmp_path / "server.log")
    ports = free_port(), free_port()
    (tmp_path / "gateway.toml").write_text(GATEWAY.format(server=server.url))
    config = prometheus_config([f"127.0.0.1:{ports[0]}"], [server.url.split("/")[2]], interval="1s")
    (tmp_path / RULES_FILE).parent.mkdir()
    (tmp_path / RULES_FILE).write_text(to_yaml([rules()]))
    (tmp_path / "prometheus.yml").write_text(to_yaml([config]))
    commands = [
        [sys.executable, "-m", "lmworks", "gateway", str(tmp_path / "gateway.toml"), "--port", str(ports[0])],
        ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}",
         f"--web.listen-address=127.0.0.1:{ports[1]}", "--enable-feature=exemplar-storage"],
    ]  # fmt: skip
    started = []
    with (tmp_path / "log").open("wb") as log:
        started = [subprocess.Popen(command, stdout=log, stderr=log) for command in commands]
    gateway, prometheus = (f"http://127.0.0.1:{port}" for port in ports)
    trace = "0af7651916cd43dd8448eb211c80319c"
    try:
        with httpx.Client(trust_env=False, timeout=60) as http:

            def ask(**more: Any) -> httpx.Response:
                body = {"model": "tiny", "prompt": "x " * 40, "max_tokens": 8, "ignore_eos": True, **more}
                headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
                return http.post(f"{gateway}/v1/completions", json=body, headers=headers)

            def answers(path: str, **params: Any) -> Any:
                return http.get(f"{prometheus}/api/v1/{path}", params=params).json()["data"]

            server.wait_ready()
            until(lambda: http.get(f"{gateway}/ready").status_code == 200)
            until(lambda: http.get(f"{prometheus}/-/ready").status_code == 200)
            ask(stream=True)
            until(lambda: answers("query", query="lmworks:gateway_requests_total")["result"])
            for _ in range(8):  # between scrapes, so that rates are not of nothing
                assert ask(stream=True).status_code == 200 and ask().status_code == 200
                assert ask(max_tokens=0).status_code == 400
                time.sleep(0.5)
            ask(prompt="", stream=True)
            time.sleep(2)
            empty = []
            for panel in PANELS:
                for legend, text in panel.queries.items():
                    asked = query(text).replace("$__rate_interval", WINDOW)
                    values = answers("query", query=asked)["result"]
                    if not panel.optional and not any(one["value"][1] != "NaN" for one in values):
                        empty.append((panel.title, legend, asked))
            assert not empty, "\n".join(map(str, empty))
            groups = answers("rules")["groups"]
            assert [rule["name"] for group in groups for rule in group["rules"] if rule["health"] == "err"] == []
            assert sum(len(group["rules"]) for group in groups) == len(rules()["groups"][0]["rules"])
            shown = answers(
                "query_exemplars", query="lmworks:gateway_time_to_first_token_seconds_bucket", start=0, end=1e10
            )
            assert {one["labels"]["trace_id"] for series in shown for one in series["exemplars"]} == {trace}
    finally:
        for one in started:
            one.terminate()
        for one in started:
            one.wait(30)
        server.kill()
