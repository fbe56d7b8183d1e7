"""Conversations, tools, and streams that break off."""

from __future__ import annotations

import functools
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from api_server import MODEL, Api, until
from tiny_engine import HELD

from lmworks.data.tokenizer import ByteTokenizer
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.grammars.grammar import Grammars
from lmworks.serve.request_bodies import ChatRequest
from lmworks.serve.tool_choice import call_schema

MESSAGES = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def chat(api: Api, **wishes: Any) -> dict[str, Any]:
    answer = api.post("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "temperature": 0} | wishes)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_automatic_tool_call(api: Api) -> None:
    """The grammar writes for the model, which knows nothing."""
    tools = [{"type": "function", "function": {"name": "f", "description": "Does it."}}]
    shape = {"guided_choice": [f"Well. {CALL}"], "max_tokens": 100, "tools": tools}
    (choice,) = chat(api, **shape)["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Well. "
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    body = {"model": MODEL, "messages": MESSAGES, "stream": True, **shape}
    with api.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    deltas = [line["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content", "") for delta in deltas) == "Well. "
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [(call["index"], call["function"]["name"]) for call in calls if "id" in call] == [(0, "f")]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"x": 1}'
    (plain,) = chat(api, **shape, tool_choice="none")["choices"]
    assert plain["message"]["content"] == f"Well. {CALL}", "nobody asked for calls"


def test_template_gets_conversation(api: Api) -> None:
    """Tools, calls and their results all are in the prompt: it has as many tokens as the text has bytes."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    said = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    found = api.post("/tokenize", {"messages": said}).json()
    text = bytes(found["tokens"]).decode()
    assert 'f({"x": 1})' in text and "<tool>2" in text and text.endswith("<assistant>")
    assert chat(api, messages=said, max_tokens=1)["usage"]["prompt_tokens"] == found["count"]


def test_variables_for_the_chat_template(api: Api) -> None:
    def written(**more: Any) -> str:
        return bytes(api.post("/tokenize", {"messages": MESSAGES} | more).json()["tokens"]).decode()

    assert written(chat_template_kwargs={"mood": "glad"}) == f"[glad]{written()}"
    assert written(chat_template_kwargs={"add_generation_prompt": False}) == written().removesuffix("<assistant>")
    assert '"name": "f"' in written(tools=tools_of(f={}))
    usual, moody = (chat(api, max_tokens=1, **more) for more in ({}, {"chat_template_kwargs": {"mood": "glad"}}))
    assert moody["usage"]["prompt_tokens"] == usual["usage"]["prompt_tokens"] + len("[glad]")
    taken = api.post(
        "/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "chat_template_kwargs": {"tools": 1}}
    )
    assert taken.status_code == 400 and "tools is a field of the request" in taken.json()["error"]["message"]


def tools_of(**schemas: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in schemas.items()]


def referring(value: Any, **more: Any) -> dict[str, Any]:
    """A schema whose definition `P` is this value alone."""
    properties = {"p": {"$ref": "#/$defs/P"}}
    return {"$defs": {"P": {"const": value}}, "type": "object", "properties": properties, "required": ["p"]} | more


@functools.cache
def byte_grammars() -> Grammars:
    """One for all schemas: each has sandboxes, which are processes, of its own."""
    return Grammars(ByteTokenizer(), 257)


def allows(schema: dict[str, Any], answer: Any) -> bool:
    """Whether the grammar lets a model write this, byte by byte."""
    matcher = byte_grammars().matcher(SamplingParams(json_schema=schema))
    assert matcher is not None
    for byte in json.dumps(answer).encode():
        matcher.accept(byte)
    return matcher.done


def test_tool_definitions_are_separate(api: Api) -> None:
    tools = tools_of(f=referring("mine", additionalProperties=False), g=referring(7, additionalProperties=False))
    for name, value in (("f", "mine"), ("g", 7)):
        wanted = {"type": "function", "function": {"name": name}}
        for choice in (wanted, "required"):
            (answer,) = chat(api, tools=tools, tool_choice=choice)["choices"]
            (call,) = answer["message"]["tool_calls"]
            own = {"f": "mine", "g": 7}[call["function"]["name"]]
            assert json.loads(call["function"]["arguments"]) == {"p": own} and (choice == "required" or own == value)


@pytest.mark.parametrize(
    "more",
    [{}, {"$id": "https://example.com/same"}, {"$schema": "http://json-schema.org/draft-04/schema#"}, {"$id": 5}],
    ids=["plain", "one id", "draft 4", "no id"],
)
def test_tool_references_stay_in_schema(more: dict[str, Any]) -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}
    tools = tools_of(f=referring("mine", **more), g=referring(7, **more), tree=tree | more)
    body = ChatRequest.model_validate({"model": "m", "messages": MESSAGES, "tools": tools})
    schema = call_schema(body.tools or [])
    for name, value in (("f", "mine"), ("g", 7)):
        for said in ("mine", 7):
            assert allows(schema, {"name": name, "arguments": {"p": said}}) == (said == value), (name, said)
    assert allows(schema, {"name": "tree", "arguments": {"child": {"child": {}}}})
    assert not allows(schema, {"name": "tree", "arguments": {"child": {"name": "f", "arguments": {"p": "mine"}}}})


def test_line_separators_are_escaped_in_streams(api: Api) -> None:
    """Clients that split lines as Python or JavaScript's regexes do would else cut an event in two."""
    said = "a\u2028b\u2029c\u0085d"
    body = {"model": MODEL, "messages": MESSAGES, "stream": True, "guided_choice": [said], "max_tokens": 50}
    lines = [one for one in api.post("/v1/chat/completions", body).text.splitlines() if one]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(one.removeprefix("data: ")) for one in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == said


@pytest.mark.usefixtures("forked_python")
def test_engine_death_ends_streams_with_error(api: Api) -> None:
    backend = api.house.backend
    restarts = backend.restarts
    wishes = {"max_tokens": 400, "extra_body": {"ignore_eos": True}, "stream": True, "seed": HELD}
    stream = api.client().chat.completions.create(model=MODEL, messages=MESSAGES, **wishes)  # type: ignore
    next(iter(stream))
    assert backend.handle is not None
    os.kill(backend.handle.process.pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="engine stopped"):
        for _ in stream:
            pass
    until(lambda: backend.restarts > restarts)
    until(lambda: api.http.get("/ready").status_code == 200, 60)
    assert chat(api, max_tokens=2)["usage"]["completion_tokens"] == 2
    assert f'engine_restarts_total{{model_name="tiny"}} {backend.restarts}' in api.http.get("/metrics").text


def test_health_reports_stuck_engine(api: Api) -> None:
    """It lives, its process is there, and it takes no step."""
    backend = api.house.backend
    assert api.http.get("/health").json()["status"] == "ok" and backend.handle is not None
    pid = backend.handle.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as one:
            waiting = one.submit(chat, api, max_tokens=3)
            until(lambda: api.http.get("/health").status_code == 503)
            found = api.http.get("/ready")
            os.kill(pid, signal.SIGCONT)
            assert waiting.result(60)["usage"]["completion_tokens"] == 3
    finally:
        os.kill(pid, signal.SIGCONT)
    assert found.status_code == 503 and found.json()["status"] == "unhealthy"
    assert found.json()["models"]["tiny"]["alive"] and found.json()["models"]["tiny"]["stalled_seconds"] > 0.5
    until(lambda: api.http.get("/health").status_code == 200)
