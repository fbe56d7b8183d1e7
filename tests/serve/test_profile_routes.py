"""A live server's engine is profiled on request, and its trace is read as any other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiny_engine
from api_server import MODEL, Api, House, until

from lmworks.serve.backend import ProfileRequest
from lmworks.serve.engine_host import APIProcessHandle, Call, Reply
from lmworks.serve.engine_process import EngineProcess
from lmworks.serve.limits import APIError
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
    assert (started.json()["steps"], started.json()["seconds"]) == (1000, 60)
    assert profiled.post("/v1/completions", body, headers=headers).json()["choices"] == before
    again = profiled.http.post("/start_profile", headers=headers)
    assert again.status_code == 400 and "is being profiled already; /stop_profile ends it" in again.text
    stopped = profiled.http.post("/stop_profile", params={"model": MODEL}, headers=headers)
    assert stopped.json() == {"trace": started.json()["trace"]}
    path = Path(stopped.json()["trace"])
    facts = summarise([read_trace(path)])
    assert len(facts["steps"]) >= 6 and any(op["op"].startswith("aten::") for op in facts["ops"])
    assert profiled.post("/v1/completions", body, headers=headers).json()["choices"] == before
    idle = profiled.http.post("/stop_profile", headers=headers)
    assert idle.status_code == 400 and "is not being profiled; /start_profile begins it" in idle.text


def test_a_recording_ends_at_its_limit_of_steps(profiled: Api) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"model": MODEL, "prompt": "Hello", "temperature": 0, "max_tokens": 12}
    trace = Path(profiled.http.post("/start_profile", params={"steps": 3}, headers=headers).json()["trace"])
    assert profiled.post("/v1/completions", body, headers=headers).status_code == 200
    until(lambda: profiled.house.backend.trace is None)  # the engine has said so
    assert len(summarise([read_trace(trace)])["steps"]) == 3
    stopped = profiled.http.post("/stop_profile", headers=headers)
    assert stopped.json() == {"trace": str(trace)}  # it is told once where that trace is
    assert profiled.http.post("/stop_profile", headers=headers).status_code == 400


def test_a_recording_of_an_idle_engine_ends_at_its_limit_of_seconds(profiled: Api) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    trace = Path(profiled.http.post("/start_profile", params={"seconds": 0.2}, headers=headers).json()["trace"])
    until(lambda: profiled.house.backend.trace is None)
    assert trace.exists()
    again = profiled.http.post("/start_profile", params={"seconds": 60}, headers=headers)
    assert again.status_code == 200
    assert profiled.http.post("/stop_profile", headers=headers).json() == {"trace": again.json()["trace"]}


def test_limits_of_a_recording_have_limits(profiled: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    for wrong, why in (
        ("steps=1001", "steps: "),
        ("steps=0", "steps: "),
        ("seconds=61", "seconds: "),
        ("seconds=x", "seconds: "),
    ):
        refused = profiled.http.post(f"/start_profile?{wrong}", headers=headers)
        assert refused.status_code == 400 and refused.json()["error"]["message"].startswith(why), wrong
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "old.json.gz").write_bytes(b"x" * 2000)
    monkeypatch.setattr("lmworks.serve.app.MAX_PROFILE_BYTES", 2000)
    full = profiled.http.post("/start_profile", headers=headers)
    assert full.status_code == 503 and full.json()["error"]["code"] == "profile_dir_full"


def test_a_trace_that_cannot_be_written_is_an_error(house: House, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    profiled = house.open(keys=[KEY], profile_dir=tmp_path / "file" / "traces")
    headers = {"authorization": f"Bearer {KEY}"}
    for _ in range(2):  # it can be asked again
        assert profiled.http.post("/start_profile", headers=headers).status_code == 200
        failed = profiled.http.post("/stop_profile", headers=headers)
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "profile_failed"
        assert "was not profiled: [Errno 20] Not a directory" in failed.text
    body = {"model": MODEL, "prompt": "Hello", "temperature": 0, "max_tokens": 2}
    assert profiled.post("/v1/completions", body, headers=headers).status_code == 200


class Profiled(EngineProcess):
    """Answers later, and refuses to end."""

    async def profile(self, wanted: ProfileRequest | None) -> Path:
        await asyncio.sleep(0)
        if wanted is None:
            raise APIError(500, "profile_failed", "the disk is full")
        return wanted.folder


def test_an_api_process_gets_the_answer_of_the_engine() -> None:
    replies: list[Reply] = []

    async def main() -> None:
        serving = SimpleNamespace(local_models=[SimpleNamespace(backend=Profiled("tiny", tiny_engine.tiny))])
        host = APIProcessHandle(cast(Any, serving), cast(Any, None), cast(Any, None))
        vars(host)["send"] = replies.append
        host.call(Call(1, "profile", ("tiny", ProfileRequest(Path("traces"), 10, 1.0))))
        host.call(Call(2, "profile", ("tiny", None)))
        assert not replies
        await asyncio.gather(*host.calls)

    asyncio.run(main())
    assert replies == [
        Reply(1, Path("traces"), None),
        Reply(2, None, (500, "profile_failed", "the disk is full", None, None)),
    ]


def test_profile_needs_a_key_and_the_option(profiled: Api, api: Api) -> None:
    assert profiled.http.post("/start_profile").status_code == 401
    assert profiled.http.post("/stop_profile", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert api.http.post("/start_profile").status_code == 404  # not a server that was started with --profile-dir
