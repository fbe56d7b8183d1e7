"""The Responses API through the real `openai` client, which refuses whatever its types do not allow."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from api_server import MODEL, Api, House, say
from openai import OpenAI
from openai.types.responses import Response
from test_reasoning import CALLS, CITY

from lmworks.serve.protocols.responses import handler, routes

WEATHER = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}


@pytest.fixture(scope="module")
def api(scripted: House) -> Iterator[Api]:
    yield scripted.open()


@pytest.fixture(scope="module")
def client(api: Api) -> OpenAI:
    return api.client()


def create(client: OpenAI, said: Any, **wishes: Any) -> Any:
    return client.responses.create(
        model=MODEL, input=say(said) if isinstance(said, str) else said, **{"max_output_tokens": 400} | wishes
    )


def test_text(client: OpenAI) -> None:
    found = create(client, "<think>\nHm.\n</think>\n\nRome.", metadata={"a": "b"}, temperature=0.5)
    assert found.output_text == "Rome." and found.status == "completed" and found.metadata == {"a": "b"}
    reasoning, message = found.output
    assert reasoning.content[0].text == "Hm." and message.type == "message" and message.status == "completed"
    assert found.usage.output_tokens_details.reasoning_tokens == len("<think>\nHm.\n</think>")
    assert found.usage.output_tokens == len("<think>\nHm.\n</think>\n\nRome.") + 1, "and the end of text"
    assert found.temperature == 0.5


def test_incomplete(client: OpenAI) -> None:
    found = create(client, "A long answer", max_output_tokens=6)
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert found.output_text == "A long" and found.output[0].status == "incomplete"


def shape(response: Response) -> list[tuple[Any, ...]]:
    """What it says, without ids."""
    found: list[tuple[Any, ...]] = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, item.status, item.name, item.arguments))
        else:
            found.append((item.type, item.status, item.content[0].text))  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize(
    ("text", "wishes"),
    [("<think>\nHm.\n</think>\n\nRome.", {}), (CALLS, {"tools": [WEATHER]}), ("Cut off", {"max_output_tokens": 3})],
    ids=["text", "calls", "incomplete"],
)
def test_stream(client: OpenAI, text: str, wishes: dict[str, Any]) -> None:
    """Events in OpenAI's order, which the client's own accumulator of streams follows too."""
    events = list(create(client, text, stream=True, **wishes))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1].response
    assert events[-1].type == f"response.{last.status}" and shape(last) == shape(create(client, text, **wishes))
    order = [event.type for event in events if "delta" not in event.type][2:-1]
    expected = []
    for item in last.output:
        call = item.type == "function_call"
        names = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
        expected += ["response.output_item.added", *([] if call else ["response.content_part.added"])]
        expected += [f"response.{names[item.type]}.done", *([] if call else ["response.content_part.done"])]
        expected += ["response.output_item.done"]
    assert order == expected
    for place, item in enumerate(last.output):
        deltas = "".join(e.delta for e in events if "delta" in e.type and e.output_index == place)
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
    with client.responses.stream(model=MODEL, input=say(text), **{"max_output_tokens": 400} | wishes) as stream:
        seen = [event.type for event in stream]
        assert "response.output_item.done" in seen
        if last.status == "completed":
            assert shape(stream.get_final_response()) == shape(last)  # type: ignore[arg-type]


def test_conversation_with_calls(api: Api, client: OpenAI) -> None:
    """Three turns by previous_response_id; the same by items, sent whole: prompts of one length."""
    first = create(client, CALLS, tools=[WEATHER], instructions="Be kind.")
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Rome", "Oslo"]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"{degrees} degrees"}
        for call, degrees in zip(calls, (20, 5), strict=True)
    ]
    more = [*results, {"role": "user", "content": say("Rome is warmer.")}]
    second = create(client, more, previous_response_id=first.id, tools=[WEATHER])
    assert second.output_text == "Rome is warmer." and second.previous_response_id == first.id
    third = create(client, "Goodbye.", previous_response_id=second.id, tools=[WEATHER])
    assert third.output_text == "Goodbye." and third.usage.input_tokens > second.usage.input_tokens
    whole = [{"role": "user", "content": say(CALLS)}, *(item.to_dict() for item in first.output), *more]
    same = create(client, whole, tools=[WEATHER])
    assert same.usage.input_tokens == second.usage.input_tokens, "instructions are of one response alone"


def test_structured_output(client: OpenAI) -> None:
    wanted = {"type": "json_schema", "name": "place", "schema": {"const": {"city": "Rome"}}, "strict": True}
    found = create(client, "Which?</think>", text={"format": wanted})
    assert json.loads(found.output_text) == {"city": "Rome"}
    assert found.text.format.type == "json_schema" and found.output[0].type == "reasoning"


def test_required_function(client: OpenAI) -> None:
    blanks = {"enum": [{"city": "Oslo"}]}
    tools = [WEATHER | {"parameters": blanks}, WEATHER | {"name": "other"}]
    for choice in (
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    ):
        found = create(client, "That.</think>", tools=tools, tool_choice=choice)
        assert [(item.type, getattr(item, "name", "")) for item in found.output] == [
            ("reasoning", ""),
            ("function_call", "weather"),
        ]
        assert found.tool_choice.to_dict() == choice


def test_retrieve_and_delete(client: OpenAI) -> None:
    kept, dropped = create(client, "Kept."), create(client, "Not kept.", store=False)
    assert shape(client.responses.retrieve(kept.id)) == shape(kept) and dropped.store is False
    for response_id in (dropped.id, "resp_unknown"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)
    with pytest.raises(openai.BadRequestError) as error:
        create(client, "x", previous_response_id=kept.id)
    assert error.value.param == "previous_response_id" and error.value.code == "response_not_found"


def test_tenants_do_not_see_each_others_responses(scripted: House, tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    keys = [("alice", "a" * 8, "one"), ("bob", "b" * 8, "one"), ("eve", "e" * 8, "two")]
    config.write_text(
        "[limits]\nstored_responses = 2\n"
        + "".join(f'[[keys]]\nname = "{name}"\nsecret = "{key}"\ntenant = "{tenant}"\n' for name, key, tenant in keys)
    )
    api = scripted.open(config)
    alice, bob, eve = (api.client(letter * 8) for letter in "abe")
    mine = create(alice, "Mine.")
    assert bob.responses.retrieve(mine.id).output_text == "Mine.", "of the same tenant"
    for attempt in (
        lambda: eve.responses.retrieve(mine.id),
        lambda: eve.responses.delete(mine.id),
    ):
        with pytest.raises(openai.NotFoundError):
            attempt()
    with pytest.raises(openai.BadRequestError, match="no response"):
        create(eve, "x", previous_response_id=mine.id)
    create(alice, "Second.")
    create(bob, "Third.")
    with pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(mine.id)  # two are kept
    assert api.serving.responses.bytes["one"] == sum(
        kept.bytes for kept in api.serving.responses.tenants["one"].values()
    )


@pytest.mark.parametrize(
    ("wishes", "param"),
    [
        ({"background": True}, "background"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": "x"}] * 3000}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": "x" * 70000}}}}, "text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_by_name(api: Api, wishes: dict[str, Any], param: str) -> None:
    answer = api.post("/v1/responses", {"model": MODEL, "input": "x"} | wishes)
    assert answer.status_code == 400 and answer.json()["error"]["param"].split(".")[0] == param, answer.text


def test_large_responses_are_encoded_off_the_event_loop(scripted: House, api: Api, monkeypatch: Any) -> None:
    """A whole response repeats instructions and tools: a client that sends much of them holds nobody up."""
    threads: list[int | None] = []
    plain = handler.encode_in_slices

    def noted(value: Any) -> str:
        threads.append(threading.get_ident())
        return plain(value)

    for module in (handler, routes):
        monkeypatch.setattr(module, "encode_in_slices", noted)
    body = {"model": MODEL, "input": say("<think>\nHm.\n</think>\n\nRome."), "max_output_tokens": 200, "temperature": 0}
    text = json.dumps(body | {"stream": True}) + " " * 70_000
    answer = api.http.post("/v1/responses", content=text, headers={"content-type": "application/json"})
    last = json.loads(answer.text.split("data: ")[-1])
    assert last["type"] == "response.completed" and len(threads) >= 4, "three whole responses, and one that is stored"
    assert scripted.thread.ident not in threads
    found = api.post("/v1/responses", body).json()
    assert found["output"][-1]["content"] == last["response"]["output"][-1]["content"]
    assert api.http.get(f"/v1/responses/{found['id']}").json() == found
    assert scripted.thread.ident not in threads
