"""A live server's engine is profiled on request, and its trace is read as any other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiny_engine
from api_server import MODEL, Api, House

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
    assert profiled.post("/v1/completions", body, headers=headers).json()["choices"] == before
    again = profiled.http.post("/start_profile", headers=headers)
    assert again.status_code == 400 and "is being profiled already; /stop_profile ends it" in again.text
    stopped = profiled.http.post("/stop_profile", params={"model": MODEL}, headers=headers)
    assert stopped.json() == started.json()
    path = Path(stopped.json()["trace"])
    facts = summarise([read_trace(path)])
    assert len(facts["steps"]) >= 6 and any(op["op"].startswith("aten::") for op in facts["ops"])
    assert profiled.post("/v1/completions", body, headers=headers).json()["choices"] == before
    idle = profiled.http.post("/stop_profile", headers=headers)
    assert idle.status_code == 400 and "is not being profiled; /start_profile begins it" in idle.text


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

    async def profile(self, folder: Path | None) -> Path:
        await asyncio.sleep(0)
        if folder is None:
            raise APIError(500, "profile_failed", "the disk is full")
        return folder


def test_an_api_process_gets_the_answer_of_the_engine() -> None:
    replies: list[Reply] = []

    async def main() -> None:
        serving = SimpleNamespace(local_models=[SimpleNamespace(backend=Profiled("tiny", tiny_engine.tiny))])
        host = APIProcessHandle(cast(Any, serving), cast(Any, None), cast(Any, None))
        vars(host)["send"] = replies.append
        host.call(Call(1, "profile", ("tiny", Path("traces"))))
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
