"""A live server's engine is profiled on request, and its trace is read as any other."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_server import MODEL, Api, House, until

from lmworks.trace import read_trace
from lmworks.trace.summary import summarise

KEY = "secret-of-an-operator"


@pytest.fixture
def profiled(house: House, tmp_path: Path) -> Api:
    return house.open(keys=[KEY], profile_dir=tmp_path / "traces")


def test_steps_between_start_and_stop_are_recorded(profiled: Api) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"model": MODEL, "prompt": "Hello", "temperature": 0, "max_tokens": 6}
    before = profiled.post("/v1/completions", body, headers=headers).json()["choices"]
    started = profiled.http.post("/start_profile", headers=headers)
    assert started.status_code == 200, started.text
    assert profiled.post("/v1/completions", body, headers=headers).json()["choices"] == before
    again = profiled.http.post("/start_profile", headers=headers)
    assert again.status_code == 400 and "is being profiled already; /stop_profile ends it" in again.text
    stopped = profiled.http.post("/stop_profile", params={"model": MODEL}, headers=headers)
    assert stopped.json() == started.json()
    path = Path(stopped.json()["trace"])
    until(path.exists)
    facts = summarise([read_trace(path)])
    assert len(facts["steps"]) >= 6 and any(op["op"].startswith("aten::") for op in facts["ops"])
    assert profiled.post("/v1/completions", body, headers=headers).json()["choices"] == before
    idle = profiled.http.post("/stop_profile", headers=headers)
    assert idle.status_code == 400 and "is not being profiled; /start_profile begins it" in idle.text


def test_profile_needs_a_key_and_the_option(profiled: Api, api: Api) -> None:
    assert profiled.http.post("/start_profile").status_code == 401
    assert profiled.http.post("/stop_profile", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert api.http.post("/start_profile").status_code == 404  # not a server that was started with --profile-dir
