"""Anthropic's Messages API through the real `anthropic` client, which refuses whatever its types do not allow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from api_server import MODEL, Api, House, say
from test_reasoning import CALLS, CITY

if TYPE_CHECKING:  # two seconds of imports, for the worker that runs these tests alone
    from anthropic import Anthropic
    from anthropic.types import MessageParam

WEATHER = {"name": "weather", "description": "The weather.", "input_schema": CITY}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 3}
HM = "<think>\nHm.\n</think>\n\nRome."


def client_of(api: Api, key: str = "none needed") -> Anthropic:
    import anthropic

    http = anthropic.DefaultHttpxClient(verify=False)
    return anthropic.Anthropic(
        base_url=api.url, api_key=key, max_retries=0, http_client=http, _strict_response_validation=True
    )


@pytest.fixture(scope="module")
def api(scripted: House) -> Iterator[Api]:
    yield scripted.open()


@pytest.fixture(scope="module")
def client(api: Api) -> Anthropic:
    return client_of(api)


def user(text: str) -> MessageParam:
    return {"role": "user", "content": text}


def create(client: Anthropic, said: Any, **wishes: Any) -> Any:
    messages = [user(say(said))] if isinstance(said, str) else said
    return client.messages.create(model=MODEL, messages=messages, **{"max_tokens": 400} | wishes)


def blocks(message: Any) -> list[tuple[str, Any]]:
    """What it says, without ids."""
    values = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block.type, getattr(block, values[block.type])) for block in message.content]


def test_thinking_and_text(client: Anthropic) -> None:
    found = create(client, HM, system="Be kind.", metadata={"user_id": "u"}, extra_body=SAMPLING)
    assert blocks(found) == [("thinking", "Hm."), ("text", "Rome.")]
    assert (found.stop_reason, found.role, found.model) == ("end_turn", "assistant", MODEL)
    assert found.usage.output_tokens == len(HM) + 1
    assert found.usage.output_tokens_details.thinking_tokens == HM.index("Rome.") - 2
    off = create(client, "Rome.", thinking={"type": "disabled"})
    assert blocks(off) == [("text", "Rome.")]
    assert off.usage.input_tokens + off.usage.cache_read_input_tokens > len("<user>Rome.<assistant><think></think>")


def test_stop_reasons(client: Anthropic) -> None:
    cut = create(client, "A long answer", max_tokens=6)
    assert blocks(cut) == [("text", "A long")] and cut.stop_reason == "max_tokens"
    stopped = create(client, "One, two, three", stop_sequences=["two"])
    assert blocks(stopped) == [("text", "One, ")]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")


@pytest.mark.parametrize(
    ("text", "wishes"),
    [(HM, {}), (CALLS, {"tools": [WEATHER]}), ("Cut off", {"max_tokens": 3}), ("1, 2", {"stop_sequences": [","]})],
    ids=["text", "calls", "max tokens", "stop"],
)
def test_stream_equals_whole(client: Anthropic, text: str, wishes: dict[str, Any]) -> None:
    """By the client's own accumulator, and in Anthropic's order of events."""
    whole = create(client, text, **wishes)
    with client.messages.stream(model=MODEL, messages=[user(say(text))], **{"max_tokens": 400} | wishes) as stream:
        names = [event.type for event in stream if event.type.startswith(("message", "content"))]
        final = stream.get_final_message()
    assert blocks(final) == blocks(whole)
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    begun = [name for name in names if name != "content_block_delta"]
    expected = ["content_block_start", "content_block_stop"] * len(whole.content)
    assert begun == ["message_start", *expected, "message_delta", "message_stop"]


def test_tools_round_trip(client: Anthropic) -> None:
    first = create(client, CALLS, tools=[WEATHER])
    assert blocks(first) == [
        ("thinking", "Both."),
        ("text", "I look.\n"),
        ("tool_use", {"city": "Rome"}),
        ("tool_use", {"city": "Oslo"}),
    ]
    assert first.stop_reason == "tool_use"
    uses = [block for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": uses[0].id, "content": "20 degrees"},
        {"type": "tool_result", "tool_use_id": uses[1].id, "content": [{"type": "text", "text": "5 degrees"}]},
        {"type": "text", "text": say("Rome is warmer."), "cache_control": {"type": "ephemeral"}},
    ]
    said = [user(say(CALLS)), {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = create(client, said, tools=[WEATHER])
    assert blocks(second) == [("text", "Rome is warmer.")]
    one = create(client, CALLS, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert blocks(one)[2:] == [("tool_use", {"city": "Rome"})]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=["any", "tool"])
def test_required_tool(client: Anthropic, choice: Any) -> None:
    tools = [WEATHER | {"input_schema": {"enum": [{"city": "Oslo"}]}}]
    found = create(client, "That.</think>", tools=tools, tool_choice=choice)
    assert blocks(found) == [("thinking", "That."), ("tool_use", {"city": "Oslo"})]
    assert found.stop_reason == "tool_use"


def test_structured_output(client: Anthropic) -> None:
    wanted = {"format": {"type": "json_schema", "schema": {"const": {"city": "Rome"}}}}
    found = create(client, "Which?</think>", extra_body={"output_config": wanted})
    (thought, text) = blocks(found)
    assert thought == ("thinking", "Which?") and json.loads(text[1]) == {"city": "Rome"}


def test_broken_call_is_text(client: Anthropic) -> None:
    found = create(client, '<tool_call>{"name": "weather", "arguments": {"city": Rome}}</tool_call>', tools=[WEATHER])
    assert blocks(found) == [("text", 'weather{"city": Rome}')]


def test_prefill_is_continued(client: Anthropic) -> None:
    said = [user(say("self.")), {"role": "assistant", "content": "It "}]
    assert blocks(create(client, said)) == [("text", "self.")]


def test_count_tokens(client: Anthropic) -> None:
    wishes: dict[str, Any] = {"system": "Be kind.", "tools": [WEATHER]}
    count = client.messages.count_tokens(model=MODEL, messages=[user(say("Hi"))], **wishes).input_tokens
    usage = create(client, "Hi", **wishes).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens > len("Be kind.")


def test_errors_are_anthropics(scripted: House, api: Api, client: Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as refused:
        create(client, "x", max_tokens=0)
    assert refused.value.body["type"] == "error"  # type: ignore[index]
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", messages=[user("x")], max_tokens=1)
    keyed = scripted.open(keys=["a secret of many letters"])
    with pytest.raises(anthropic.AuthenticationError):
        create(client_of(keyed, "another"), "x")
    assert blocks(create(client_of(keyed, "a secret of many letters"), "Rome.")) == [("text", "Rome.")]
    wrong = api.post("/v1/messages", {}, headers={"anthropic-version": "latest"})
    assert wrong.status_code == 400 and "2023-06-01" in wrong.json()["error"]["message"]
    assert api.http.get("/v1/messages").json()["type"] == "error"
    image = [{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x"}}]
    many = [{"type": "text", "text": "x"}] * 3000
    for message in (image, many, [{"type": "tool_result", "tool_use_id": "1", "content": many}]):
        answer = api.post(
            "/v1/messages", {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": message}]}
        )
        assert answer.status_code == 400 and "messages" in answer.json()["error"]["message"], answer.text
