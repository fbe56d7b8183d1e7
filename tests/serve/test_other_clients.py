"""LangChain, litellm and instructor, as their users call them (make test-clients)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from api_server import MODEL, Api, House, say
from pydantic import BaseModel, ConfigDict
from test_reasoning import CALLS, CITY

pytestmark = pytest.mark.clients
HM = "<think>\nHm.\n</think>\n\nRome."
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.fixture(scope="module")
def api(scripted: House) -> Iterator[Api]:
    yield scripted.open()


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a model that knows nothing would never end others

    city: Literal["Rome"]


def langchain_models(api: Api) -> dict[str, Any]:
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    openai_options: dict[str, Any] = {"model": MODEL, "base_url": f"{api.url}/v1", "api_key": "none", "max_retries": 0}
    return {
        "chat": ChatOpenAI(**openai_options, max_tokens=300),
        "responses": ChatOpenAI(**openai_options, use_responses_api=True, max_tokens=300),
        "messages": ChatAnthropic(model=MODEL, base_url=api.url, api_key="none", max_retries=0, max_tokens=300),
    }


@pytest.mark.parametrize("kind", ["chat", "responses", "messages"])
def test_langchain(api: Api, kind: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def weather(city: str) -> str:
        """The weather."""
        return f"20 degrees in {city}"

    model = langchain_models(api)[kind]
    assert "Rome." in str(model.invoke(say(HM)).text)
    parts = [chunk.text for chunk in model.stream(say("One, two, three."))]
    assert "".join(parts) == "One, two, three." and len(parts) > 3

    calling = model.bind_tools([weather])
    question = HumanMessage(say(CALLS))
    answer = calling.invoke([question])
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
        ("weather", {"city": "Rome"}),
        ("weather", {"city": "Oslo"}),
    ]
    results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    assert calling.invoke([question, answer, *results, HumanMessage(say("Warm."))]).text == "Warm."
    found = None
    for chunk in calling.stream([question]):
        found = chunk if found is None else found + chunk
    assert found is not None and [call["args"]["city"] for call in found.tool_calls] == ["Rome", "Oslo"]


def test_langchain_structured_output(api: Api) -> None:
    model = langchain_models(api)["chat"].with_structured_output(Place, method="json_schema")
    assert isinstance(model.invoke(f"{say('Which?</think>')} Answer as JSON."), Place)


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm(api: Api, provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no prices from the network
    import litellm

    base = f"{api.url}/v1" if provider == "openai" else api.url
    options: dict[str, Any] = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "max_tokens": 300}
    question = {"role": "user", "content": say(HM)}
    message = litellm.completion(messages=[question], **options).choices[0].message
    assert message.content == "Rome." and message.reasoning_content == "Hm."
    stream = litellm.completion(messages=[question], stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Rome."
    tools = [{"type": "function", "function": {"name": "weather", "description": "It.", "parameters": CITY}}]
    asked = {"role": "user", "content": say(CALL)}
    answer = litellm.completion(messages=[asked], tools=tools, **options).choices[0].message
    (call,) = answer.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}
    last = {"role": "user", "content": say("Warm.")}
    found = litellm.completion(messages=[asked, answer, result, last], tools=tools, **options)
    assert found.choices[0].message.content == "Warm."


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "ANTHROPIC_TOOLS"])
def test_instructor(api: Api, mode: str) -> None:
    """A pydantic model out of an answer: by a tool that must be called, or by a schema."""
    import instructor
    from anthropic import Anthropic
    from openai import OpenAI

    client: Any
    if mode.startswith("ANTHROPIC"):
        client = instructor.from_anthropic(Anthropic(base_url=api.url, api_key="none"), mode=instructor.Mode[mode])
    else:
        client = instructor.from_openai(OpenAI(base_url=f"{api.url}/v1", api_key="none"), mode=instructor.Mode[mode])
    script = say("Which?</think>")
    found = client.create(
        model=MODEL,
        messages=[{"role": "user", "content": script}],
        response_model=Place,
        max_tokens=400,
        max_retries=1,
    )
    assert isinstance(found, Place) and found.city == "Rome"
