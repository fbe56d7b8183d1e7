"""Another server behind ours: one of our own, and one that misbehaves in every way."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_server import MODEL, Api, House, until

from lmworks.serve import forward
from lmworks.serve.serving import Upstream
from lmworks.spec import SpecError

BODY = {"model": MODEL, "prompt": "Hello", "max_tokens": 12, "temperature": 0}
MESSAGES = [{"role": "user", "content": "Hello"}]
Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(scope="module")
def before(house: House, api: Api) -> Api:
    """A server whose only model is behind the other."""
    return house.open(upstream=Upstream(f"{api.url}/v1"))


def test_answers_equal_direct_requests(before: Api, api: Api) -> None:
    assert [model.id for model in before.client().models.list()] == [MODEL]
    assert before.complete(max_tokens=12)["choices"] == api.complete(max_tokens=12)["choices"]
    assert before.http.get("/ready").status_code == 200

    def said(one: Api, **more: Any) -> list[Any]:
        wishes = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 9, "stream": True} | more
        return list(one.client().chat.completions.create(**wishes))

    for more in ({}, {"stream_options": {"include_usage": True}}):
        ours, theirs = said(before, **more), said(api, **more)
        text = ["".join(c.choices[0].delta.content or "" for c in chunks if c.choices) for chunks in (ours, theirs)]
        assert text[0] == text[1]
        assert (ours[-1].usage is None) == (theirs[-1].usage is None), "usage is told to whom asked for it"


def test_upstream_rejections_are_forwarded(before: Api) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        before.client().completions.create(model=MODEL, prompt=[5] * 600, max_tokens=2)
    assert error.value.code == "context_length_exceeded"
    assert before.post("/v1/completions", BODY | {"n": 10**6}).json()["error"]["param"] == "n"
    assert before.post("/v1/completions", BODY | {"model": "other"}).status_code == 404
    assert before.post("/tokenize", {"prompt": "x"}).status_code == 404


def test_disconnect_cancels_upstream_request(before: Api, api: Api) -> None:
    wishes = {"max_tokens": 400, "extra_body": {"ignore_eos": True}, "stream": True}
    for _ in range(10):  # until one is left that is not over yet: on a busy machine an engine is quicker than we are
        stream = before.client().completions.create(model=MODEL, prompt="x", **wishes)  # type: ignore[call-overload]
        assert next(stream.response.iter_raw())
        under_way = not api.house.idle()
        stream.close()
        until(api.house.idle)
        if under_way:
            break
    assert under_way
    until(lambda: before.serving.upstreams[0].open == 0)


# --- one that misbehaves ----------------------------------------------------------------------------------


def models(_: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"data": [{"id": MODEL, "max_model_len": 100}]})


def fake(house: House, answer: Handler, config: Path | None = None, api_key: str | None = None) -> Api:
    def handle(request: httpx.Request) -> httpx.Response:
        return models(request) if request.url.path.endswith("/models") else answer(request)

    return house.open(config, upstream=Upstream("http://there/v1", api_key, httpx.MockTransport(handle)))


def sse(*chunks: Any) -> httpx.Response:
    text = "".join(f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n" for chunk in chunks)
    return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})


def down(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("no route", request=request)


FAILURES: dict[str, tuple[Handler, int, str]] = {
    "down": (down, 502, "upstream_unreachable"),
    "failing": (lambda _: httpx.Response(500, text="Traceback (most recent call last)"), 502, "upstream_failed"),
    "not knowing us": (lambda _: httpx.Response(401, json={"error": {"message": "bad key"}}), 502, "upstream_failed"),
    "full": (
        lambda _: httpx.Response(
            429, json={"error": {"message": "later", "code": "slow_down"}}, headers={"retry-after": "7"}
        ),
        429,
        "slow_down",
    ),
    "elsewhere": (lambda _: httpx.Response(302, headers={"location": "http://x/"}), 502, "upstream_failed"),
    "without content": (lambda _: httpx.Response(204), 502, "upstream_failed"),
    "full for ever": (
        lambda _: httpx.Response(429, text="", headers={"retry-after": "9" * 400}),
        429,
        "upstream_refused",
    ),
    "refusing without words": (lambda _: httpx.Response(400, text="no"), 400, "upstream_refused"),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("stream", [False, True])
def test_upstream_failures_are_translated(house: House, name: str, stream: bool) -> None:
    answer, status, code = FAILURES[name]
    found = fake(house, answer).post("/v1/completions", BODY | {"stream": stream})
    assert (found.status_code, found.json()["error"]["code"]) == (status, code)
    assert "Traceback" not in found.text
    assert found.headers.get("retry-after") == {"full": "7", "down": "1"}.get(name)


def test_invalid_or_truncated_upstream_answer(house: House) -> None:
    broken = fake(house, lambda _: httpx.Response(200, text="<html>")).post("/v1/completions", BODY)
    assert broken.status_code == 502 and broken.json()["error"]["code"] == "upstream_invalid"
    garbled = fake(house, lambda _: sse("<html>")).post("/v1/completions", BODY | {"stream": True})
    assert garbled.status_code == 502 and garbled.json()["error"]["code"] == "upstream_invalid"
    chunk = {"id": "1", "choices": [{"index": 0, "text": "a", "finish_reason": None}]}
    cut = fake(house, lambda _: sse(chunk)).post("/v1/completions", BODY | {"stream": True})
    assert "upstream_lost" in cut.text and "[DONE]" not in cut.text


def test_client_keys_are_not_forwarded(house: House, tmp_path: Path) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"usage": {"prompt_tokens": 20, "completion_tokens": 20}})

    path = tmp_path / "keys.toml"
    path.write_text('[[keys]]\nname = "a"\nsecret = "alices-secret"\ntokens_per_minute = 100\nmax_tokens = 30\n')
    api = fake(house, answer, path, "their-secret")
    assert api.post("/v1/completions", BODY).status_code == 401 and not seen
    headers = {"authorization": "Bearer alices-secret", "cookie": "a=b", "x-request-id": "id-1"}
    body = {"model": MODEL, "messages": MESSAGES}
    statuses = [api.post("/v1/chat/completions", body, headers=headers).status_code for _ in range(4)]
    assert statuses == [200, 200, 429, 429], "40 tokens each as it says, up to 47 as may be, 100 a minute"
    request = seen[0]
    assert request.headers["authorization"] == "Bearer their-secret" and request.headers["x-request-id"] == "id-1"
    assert "cookie" not in request.headers and json.loads(request.content) == body | {"max_tokens": 30}


def test_upstream_that_starts_later(house: House) -> None:
    there: list[bool] = []

    def handle(request: httpx.Request) -> httpx.Response:
        return models(request) if there else down(request)

    upstream = Upstream("http://there/v1", None, httpx.MockTransport(handle))
    api = house.open(upstream=upstream)
    assert api.http.get("/ready").status_code == 503 and api.http.get("/v1/models").json()["data"] == []
    assert api.post("/v1/completions", BODY).status_code == 404
    there.append(True)
    house.run(upstream.refresh_models())
    assert api.http.get("/ready").status_code == 200
    assert api.http.get("/v1/models").json()["data"][0]["max_model_len"] == 100


def test_unforwardable_values_are_rejected(house: House) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"usage": {"prompt_tokens": "a", "completion_tokens": -5}})

    api = fake(house, answer)
    found = api.post("/v1/completions", BODY, headers=[(b"x-request-id", "é".encode())])
    assert found.status_code == 200 and seen[0].headers["x-request-id"] == found.headers["x-request-id"]
    raw = json.dumps(BODY | {"guided_json": {"minimum": float("nan")}})
    refused = api.http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_json" and len(seen) == 1


def test_address_must_not_contain_password() -> None:
    with pytest.raises(SpecError, match="LMWORKS_UPSTREAM_KEY") as caught:
        Upstream("http://me:password@there/v1")
    assert "password" not in str(caught.value)


def test_unicode_line_separators_are_kept(house: House) -> None:
    """In server-sent events a line ends in CR or LF alone, however the bytes are cut."""
    said = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg"
    chunk = {"id": "1", "choices": [{"index": 0, "text": said, "finish_reason": None}]}
    raw = f"data: {json.dumps(chunk, ensure_ascii=False)}\r\n\r\ndata: [DONE]\r\n\r\n".encode()

    async def bit_by_bit() -> AsyncIterator[bytes]:
        for place in range(0, len(raw), 3):
            yield raw[place : place + 3]

    there = fake(house, lambda _: httpx.Response(200, content=bit_by_bit()))
    found = there.post("/v1/completions", BODY | {"stream": True})
    lines = found.text.splitlines()  # as strict a client as there is
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["text"] == said
    assert lines[1:] == ["", "data: [DONE]", ""]


def test_unbounded_event_is_aborted(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "LONGEST_LINE", 1000)
    found = fake(house, lambda _: sse("x" * 2000)).post("/v1/completions", BODY | {"stream": True})
    assert found.status_code == 502 and found.json()["error"]["code"] == "upstream_invalid"


def test_both_max_tokens_fields_are_capped(house: House, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        return httpx.Response(200, json={"usage": {"prompt_tokens": 1, "completion_tokens": 1}})

    path = tmp_path / "keys.toml"
    path.write_text('[[keys]]\nname = "a"\nsecret = "alices-secret"\nmax_tokens = 30\n')
    api = fake(house, answer, path)
    headers, body = {"authorization": "Bearer alices-secret"}, {"model": MODEL, "messages": MESSAGES}
    for given in ({"max_completion_tokens": 5, "max_tokens": 90}, {"max_completion_tokens": 5}, {"max_tokens": 5}):
        assert api.post("/v1/chat/completions", body | given, headers=headers).status_code == 200
        assert {name: value for name, value in seen[-1].items() if name.startswith("max_")} == dict.fromkeys(given, 5)
    refused = api.post("/v1/chat/completions", body | {"max_completion_tokens": 90, "max_tokens": 5}, headers=headers)
    assert refused.status_code == 400 and len(seen) == 3


# --- several of one name ----------------------------------------------------------------------------------


class Behind:
    """A server that can be told to fail."""

    def __init__(self, name: str, *served: str) -> None:
        self.served, self.asked = served or (MODEL,), 0
        self.answer: Handler = lambda _: httpx.Response(200, json={"id": name, "usage": {"prompt_tokens": 1}})
        self.upstream = Upstream(f"http://{name}/v1", None, httpx.MockTransport(self.handle))

    def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return down(request) if self.answer is down else httpx.Response(200, json=self.models())
        self.asked += 1
        return self.answer(request)

    def models(self) -> dict[str, Any]:
        return {"data": [{"id": name} for name in self.served]}


@pytest.mark.parametrize("stream", [False, True])
def test_failover_to_next_upstream(house: House, stream: bool) -> None:
    one, other = Behind("one"), Behind("other")
    api = house.open(upstream=[one.upstream, other.upstream])
    chunk = {"id": "other", "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}
    if stream:
        other.answer = lambda _: sse(chunk, "[DONE]")
    for failing in (
        down,
        lambda _: httpx.Response(500),
        lambda _: httpx.Response(503),
        lambda _: httpx.Response(429, headers={"retry-after": "9"}),
    ):
        one.answer, one.asked, other.asked, one.upstream.up = failing, 0, 0, True
        found = api.post("/v1/completions", BODY | {"stream": stream})
        assert found.status_code == 200 and "other" in found.text
        assert (one.asked, other.asked) == (1, 1)
    one.answer = lambda _: httpx.Response(400, json={"error": {"message": "no", "code": "wrong"}})
    one.upstream.up, other.asked = True, 0
    assert api.post("/v1/completions", BODY | {"stream": stream}).json()["error"]["code"] == "wrong"
    assert other.asked == 0, "what is wrong with the request is wrong everywhere"
    until(lambda: one.upstream.open == other.upstream.open == 0)


def test_down_upstream_is_last_and_first_error_is_reported(house: House) -> None:
    one, other = Behind("one"), Behind("other")
    api = house.open(upstream=[one.upstream, other.upstream])
    one.answer = down
    for _ in range(3):
        assert api.post("/v1/completions", BODY).json()["id"] == "other"
    assert (one.asked, other.asked) == (1, 3), "once is enough to know"
    other.answer = lambda _: httpx.Response(503, headers={"retry-after": "7"})
    found = api.post("/v1/completions", BODY)
    assert (found.status_code, found.json()["error"]["code"]) == (502, "upstream_failed")
    assert found.headers["retry-after"] == "7" and one.asked == 2


def test_readiness_per_model(house: House) -> None:
    one, other = Behind("one", "a", "both"), Behind("other", "b", "both")
    api = house.open(upstream=[one.upstream, other.upstream])
    assert api.http.get("/ready").status_code == 200
    one.answer = down
    house.run(one.upstream.refresh_models())
    statuses = {name: api.http.get("/ready", params={"model": name}).status_code for name in ("a", "b", "both", "c")}
    assert statuses == {"a": 503, "b": 200, "both": 200, "c": 404}
    assert api.http.get("/ready").status_code == 503 and api.http.get("/health").status_code == 503
    other.served = ("a", "b", "both")
    house.run(other.upstream.refresh_models())
    assert api.http.get("/ready").status_code == 200, "each model has one that answers"


def test_upstream_addresses_need_key(house: House) -> None:
    api = house.open(keys=["a-key-of-ours"], upstream=Behind("secret-place").upstream)
    for path in ("/health", "/ready", "/metrics"):
        for shown in ({}, {"authorization": "Bearer wrong-wrong"}):
            found = api.http.get(path, headers=shown)
            assert found.status_code == 200 and "secret-place" not in found.text
    known = api.http.get("/health", headers={"authorization": "Bearer a-key-of-ours"})
    assert list(known.json()["models"]) == ["http://secret-place/v1"]
    assert list(api.http.get("/health").json()["models"]) == ["upstream-1"]
