"""What nobody should send: each is answered with an error object of its own, and the next good request is served."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest
from api_server import MODEL, Api, until

from lmworks.serve import connection, sse
from lmworks.serve.limits import Admission

GOOD = {"model": MODEL, "prompt": "Hi", "max_tokens": 2, "ignore_eos": True}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def shaped(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def good_still(api: Api) -> None:
    answer = api.post(COMPLETIONS, GOOD)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2, answer.text


def refused(status: int, content: bytes) -> dict[str, Any]:
    assert 400 <= status < 500, content
    error = json.loads(content)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["code"], str)
    assert "Traceback" not in error["message"] and ".py" not in error["message"]
    return error  # type: ignore[no-any-return]


# --- fields -----------------------------------------------------------------------------------------------

BODIES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "no model": (COMPLETIONS, {"model": None}, "model"),
    "unknown model": (COMPLETIONS, {"model": "gpt-9"}, "model"),
    "model of a million letters": (COMPLETIONS, {"model": "m" * 10**6}, "model"),
    "model as a number": (COMPLETIONS, {"model": 5}, "model"),
    "no prompt": (COMPLETIONS, {"prompt": None}, "prompt"),
    "empty prompt": (COMPLETIONS, {"prompt": ""}, None),
    "no prompts": (COMPLETIONS, {"prompt": []}, "prompt"),
    "prompt as an object": (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    "mixed prompt": (COMPLETIONS, {"prompt": ["a", 1]}, None),
    "negative token": (COMPLETIONS, {"prompt": [-1]}, None),
    "token beyond the vocabulary": (COMPLETIONS, {"prompt": [257]}, None),
    "token of a hundred digits": (COMPLETIONS, {"prompt": [10**100]}, None),
    "token that is true": (COMPLETIONS, {"prompt": [True]}, None),
    "token that is a fraction": (COMPLETIONS, {"prompt": [1.5]}, None),
    "prompt beyond the context": (COMPLETIONS, {"prompt": [1] * 100_000}, "prompt"),
    "257 prompts": (COMPLETIONS, {"prompt": ["a"] * 257}, "prompt"),
    "negative max_tokens": (COMPLETIONS, {"max_tokens": -1}, "max_tokens"),
    "max_tokens = 0": (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    "max_tokens beyond the context": (COMPLETIONS, {"max_tokens": 10**6}, "prompt"),
    "max_tokens of a hundred digits": (COMPLETIONS, {"max_tokens": 10**100}, "max_tokens"),
    "max_tokens as text": (COMPLETIONS, {"max_tokens": "5"}, "max_tokens"),
    "n = 10⁶": (COMPLETIONS, {"n": 10**6}, "n"),
    "n = 0": (COMPLETIONS, {"n": 0}, "n"),
    "best_of below n": (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of"),
    "best_of = 10⁶": (COMPLETIONS, {"best_of": 10**6}, "best_of"),
    "negative temperature": (COMPLETIONS, {"temperature": -0.1}, "temperature"),
    "endless temperature": (COMPLETIONS, {"temperature": 1e999}, "temperature"),
    "top_p above 1": (COMPLETIONS, {"top_p": 1.1}, "top_p"),
    "top_k of -2": (COMPLETIONS, {"top_k": -2}, "top_k"),
    "penalty of 3": (COMPLETIONS, {"presence_penalty": 3}, "presence_penalty"),
    "a thousand logprobs": (COMPLETIONS, {"logprobs": 1000}, "logprobs"),
    "logprobs that are true": (COMPLETIONS, {"logprobs": True}, "logprobs"),
    "a thousand stop strings": (COMPLETIONS, {"stop": [f"s{i}" for i in range(1000)]}, "stop"),
    "empty stop string": (COMPLETIONS, {"stop": [""]}, "stop"),
    "stop string of 10⁵ letters": (COMPLETIONS, {"stop": "s" * 10**5}, "stop"),
    "bias of no token": (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias"),
    "bias of a token beyond": (COMPLETIONS, {"logit_bias": {"99999": 1}}, "logit_bias"),
    "bias of ten thousand tokens": (COMPLETIONS, {"logit_bias": {str(i): 1 for i in range(10_000)}}, "logit_bias"),
    "seed of a hundred digits": (COMPLETIONS, {"seed": 10**100}, "seed"),
    "unknown field": (COMPLETIONS, {"tempreature": 1}, "tempreature"),
    "stream as text": (COMPLETIONS, {"stream": "yes"}, "stream"),
    "stream_options without a stream": (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
    "two shapes": (COMPLETIONS, {"guided_regex": "a", "guided_choice": ["b"]}, None),
    "regex that is none": (COMPLETIONS, {"guided_regex": "((("}, None),
    "regex that explodes": (COMPLETIONS, {"guided_regex": "((a{100}){100}){100}"}, None),
    "schema as text that is no JSON": (COMPLETIONS, {"guided_json": "{"}, None),
    "no messages": (CHATS, {"messages": []}, "messages"),
    "messages as text": (CHATS, {"messages": "Hi"}, "messages"),
    "message without a role": (CHATS, {"messages": [{"content": "Hi"}]}, "messages.0.role"),
    "unknown role": (CHATS, {"messages": [{"role": "king", "content": "Hi"}]}, "messages.0.role"),
    "message without content": (CHATS, {"messages": [{"role": "user"}]}, "messages"),
    "an image": (
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        None,
    ),
    "arguments that are no JSON": (
        CHATS,
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]},
            ]
        },
        "messages",
    ),
    "a tool that is not there": (CHATS, {"tool_choice": "required"}, "tool_choice"),
    "a tool with a strange name": (CHATS, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, None),
    "top_logprobs alone": (CHATS, {"top_logprobs": 2}, "top_logprobs"),
    "schema of 60 levels": (CHATS, shaped(nested(60)), None),
    "schema of 180 levels": (CHATS, shaped(nested(45) | {"x": json.loads("[" * 180 + "]" * 180)}), None),
    "schema that nothing fits": (CHATS, shaped({"type": "string", "enum": []}), None),
    "schema with a wrong type": (CHATS, shaped({"type": "sandwich"}), None),
    "schema of 1,000 optional properties": (
        CHATS,
        shaped({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}),
        None,
    ),
    "schema whose definitions are a list": (CHATS, shaped({"type": "object", "$defs": [1]}), None),
    "tool whose definitions are a number": (
        CHATS,
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$defs": 5}}}],
            "tool_choice": "required",
        },
        None,
    ),
    "schema as a list": (CHATS, shaped([1]), None),
    "unknown format": (CHATS, {"response_format": {"type": "yaml"}}, "response_format"),
    "token to detokenize beyond": ("/detokenize", {"tokens": [10**6]}, "tokens"),
    "both prompt and messages": ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
}


def test_invalid_body_is_not_read_to_end(api: Api) -> None:
    """Telling 300,000 mistakes apart took seconds, in which nobody else was served."""
    found = api.post(COMPLETIONS, GOOD | {f"x{i}": 1 for i in range(2000)})
    assert "2000 places" in refused(found.status_code, found.content)["message"]
    calls = {"messages": [{"role": "assistant", "tool_calls": [1] * 2000}]}
    found = api.post(CHATS, CHAT | calls)
    assert refused(found.status_code, found.content)["param"] == "messages.0.tool_calls.0"


@pytest.mark.parametrize("name", BODIES)
def test_invalid_bodies(api: Api, name: str) -> None:
    path, change, param = BODIES[name]
    base = {COMPLETIONS: GOOD, CHATS: CHAT}.get(path, {"model": MODEL})
    body = {key: value for key, value in (base | change).items() if value is not None}
    answer = api.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    error = refused(answer.status_code, answer.content)
    if param is not None:
        assert error["param"] == param, error
    good_still(api)


# --- bodies that are none ---------------------------------------------------------------------------------

CONTENTS = {
    "nothing": b"",
    "half of it": b'{"model": "tiny", "prompt": ',
    "no JSON": b"model=tiny",
    "a list": b"[1, 2]",
    "a number": b"1",
    "invalid UTF-8": b'{"model": "tiny", "prompt": "\xff\xfe"}',
    "half a surrogate pair": b'{"model": "tiny", "prompt": "\\ud800"}',
    "NaN": b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
    "100,000 brackets": b'{"model": "tiny", "prompt": ' + b"[" * 100_000,
    "100,000 braces": b'{"a":' * 100_000,
    "a number of 10⁵ digits": b'{"model": "tiny", "prompt": [' + b"9" * 100_000 + b"]}",
    "zero bytes": b"\0" * 100,
    "UTF-16": json.dumps(GOOD).encode("utf-16"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_invalid_content(api: Api, name: str) -> None:
    answer = api.http.post(COMPLETIONS, content=CONTENTS[name], headers={"content-type": "application/json"})
    assert refused(answer.status_code, answer.content)["type"] == "invalid_request_error"
    good_still(api)


def test_body_too_large(api: Api) -> None:
    large = b'{"model": "tiny", "prompt": "' + b"x" * (5 * 2**20) + b'"}'
    answer = api.http.post(COMPLETIONS, content=large, headers={"content-type": "application/json"})
    assert answer.status_code == 413 and refused(413, answer.content)["code"] == "body_too_large"

    def pieces() -> Any:
        for _ in range(6):
            yield b"x" * 2**20

    answer = api.http.post(COMPLETIONS, content=pieces(), headers={"content-type": "application/json"})
    assert answer.status_code == 413, "its length was not told beforehand"
    good_still(api)


def test_unsupported_content_type(api: Api) -> None:
    answer = api.http.post(COMPLETIONS, content=b"x", headers={"content-type": "text/plain"})
    assert answer.status_code == 415 and refused(415, answer.content)
    answer = api.http.post(COMPLETIONS, files={"file": b"x"})
    assert answer.status_code == 415 and refused(415, answer.content)


# --- HTTP that is none ------------------------------------------------------------------------------------

REQUESTS = {
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 200 + b"\r\n\r\n",
    "no such path": b"GET /etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n",
    "a path that climbs": b"GET /v1/../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n",
    "a path with a zero byte": b"GET /v1/models/%00 HTTP/1.1\r\nhost: x\r\n\r\n",
    "a path that is no UTF-8": b"GET /v1/models/%ff HTTP/1.1\r\nhost: x\r\n\r\n",
    "a wrong method": b"DELETE /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n",
    "an invented method": b"FROBNICATE /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "a negative length": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcde",
    "a bad chunk": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
    "one endless header": b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 10**6 + b"\r\n\r\n",
    "ten thousand headers": b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"x-many: 1\r\n" * 10_000 + b"\r\n",
    "40 KiB of headers at once": b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 40_000 + b"\r\n\r\n",
    "a zero byte in a header": b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-bad: a\0b\r\n\r\n",
    "an endless line": b"GET /" + b"a" * 10**6 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
}


@pytest.mark.parametrize("name", REQUESTS)
def test_invalid_http(api: Api, name: str) -> None:
    found = api.raw(REQUESTS[name])
    if found:  # where the server closed before all was sent, the answer may be lost on the way
        head, _, content = found.partition(b"\r\n\r\n")
        refused(int(head.split(b" ")[1]), content)
    else:
        assert len(REQUESTS[name]) > 65_536, "nothing was answered"
    good_still(api)


def test_missing_body_times_out(api: Api) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", api.port)) as waiting:
        waiting.sendall(head)
        good_still(api)
    until(api.house.idle)


def test_slow_headers_time_out(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one who says nothing nor one who says a letter now and then."""
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.4)
    for drip in (b"", b"x"):
        with socket.create_connection(("127.0.0.1", api.port)) as slow:
            words = b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: "
            began = time.monotonic()
            slow.settimeout(0.1)
            while time.monotonic() - began < 20:
                try:
                    slow.sendall(words)
                    words = drip
                    if slow.recv(1) == b"":
                        break
                except TimeoutError:
                    continue
                except ConnectionError:
                    break
            assert time.monotonic() - began < 15  # less than without the change above
    monkeypatch.undo()  # we may be slow ourselves, on a busy machine
    good_still(api)


def test_client_that_does_not_read_is_disconnected(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "STALLED_S", 0.3)
    rate_limiter, admitted = api.serving.rate_limiter, list[Admission]()
    admit = rate_limiter.admit
    monkeypatch.setattr(rate_limiter, "admit", lambda *given: admitted.append(admit(*given)) or admitted[-1])
    body = GOOD | {"max_tokens": 400, "ignore_eos": True, "n": 16, "logprobs": 20, "stream": True}
    content = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    with socket.socket() as staring:
        staring.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        staring.connect(("127.0.0.1", api.port))
        staring.sendall(head + content)
        until(lambda: admitted and rate_limiter.open[MODEL] == 0, 60)
        assert not api.house.backend.queues
        staring.settimeout(60)
        assert b"[DONE]" not in staring.recv(10_000_000)
    until(api.house.idle)
    good_still(api)


def test_disconnected_clients_are_cancelled(api: Api) -> None:
    """A hundred streams and whole answers, left in the middle: the engine has nothing to do afterwards."""
    bodies = [GOOD | {"max_tokens": 400, "ignore_eos": True, "stream": number % 2 == 0} for number in range(100)]
    for body in bodies:
        content = json.dumps(body).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", api.port)) as leaving:
            leaving.sendall(head + content)
            if body["stream"]:
                assert leaving.recv(100)
    until(api.house.idle, 60)
    until(lambda: sum(api.serving.rate_limiter.open.values()) == 0)
    good_still(api)
