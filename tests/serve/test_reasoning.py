"""Reasoning, tool calls and structures through the real `openai` client, of a model that writes what it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from api_server import MODEL, Api, House, say
from openai import OpenAI

from lmworks.data.tokenizer import ByteTokenizer
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.grammars.delayed import DelayedGrammar
from lmworks.engine.grammars.grammar import Grammars
from lmworks.serve.backend import PromptTokenizer
from lmworks.serve.parsers.names import ParserNames
from lmworks.serve.parsers.registry import choose

ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
OSLO = '{"name": "weather", "arguments": {"city": "Oslo"}}'
CALLS = f"<think>\nBoth.\n</think>\n\nI look.\n<tool_call>\n{ROME}\n</tool_call>\n<tool_call>\n{OSLO}\n</tool_call>"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY}}


WEATHER = tool("weather")


@pytest.fixture(scope="module")
def api(scripted: House) -> Iterator[Api]:
    yield scripted.open()


@pytest.fixture(scope="module")
def client(api: Api) -> OpenAI:
    return api.client()


def ask(client: OpenAI, text: str, **wishes: Any) -> Any:
    messages = [{"role": "user", "content": say(text)}]
    return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=400, temperature=0, **wishes)  # type: ignore


def streamed(client: OpenAI, text: str, **wishes: Any) -> tuple[str, str, list[dict[str, str]], str]:
    """Reasoning, text, calls and the end of a stream."""
    reasoning, content, calls, end = "", "", list[dict[str, str]](), ""
    for chunk in ask(client, text, stream=True, **wishes):
        (choice,) = chunk.choices
        extra = choice.delta.model_extra
        assert extra.get("reasoning") == extra.get("reasoning_content")
        reasoning += extra.get("reasoning", "")
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.id:
                assert call.index == len(calls) and call.function.name
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments
        end = choice.finish_reason or end
    return reasoning, content, calls, end


def test_reasoning_is_a_field_of_its_own(client: OpenAI) -> None:
    (choice,) = ask(client, "<think>\nHm.\n</think>\n\nRome.").choices
    assert choice.message.content == "Rome." and choice.message.model_extra["reasoning_content"] == "Hm."
    assert choice.message.model_extra["reasoning"] == "Hm." and choice.finish_reason == "stop"
    assert streamed(client, "<think>\nHm.\n</think>\n\nRome.") == ("Hm.", "Rome.", [], "stop")


def test_parallel_calls_after_reasoning(client: OpenAI) -> None:
    (choice,) = ask(client, CALLS, tools=[WEATHER]).choices
    assert choice.message.content == "I look.\n" and choice.finish_reason == "tool_calls"
    said = [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls]
    assert said == ["Rome", "Oslo"] and len({call.id for call in choice.message.tool_calls}) == 2
    reasoning, content, calls, end = streamed(client, CALLS, tools=[WEATHER])
    assert (reasoning, content, end) == ("Both.", "I look.\n", "tool_calls")
    assert [(call["name"], json.loads(call["arguments"])["city"]) for call in calls] == [
        ("weather", "Rome"),
        ("weather", "Oslo"),
    ]
    *_, calls, _ = streamed(client, CALLS, tools=[WEATHER], parallel_tool_calls=False)
    assert [json.loads(call["arguments"])["city"] for call in calls] == ["Rome"]


@pytest.mark.parametrize("stream", [False, True])
def test_structure_begins_after_the_reasoning(client: OpenAI, stream: bool) -> None:
    """The script ends with the reasoning; what follows is the grammar's, on a prompt that opens the reasoning."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": {"city": "Rome"}}}}
    for wishes in ({"response_format": schema}, {"extra_body": {"guided_choice": ['{"city":"Rome"}']}}):
        if stream:
            reasoning, content, _, end = streamed(client, "{} is easy</think>", **wishes)
        else:
            (choice,) = ask(client, "{} is easy</think>", **wishes).choices
            reasoning, content, end = (
                choice.message.model_extra["reasoning"],
                choice.message.content,
                choice.finish_reason,
            )
        assert reasoning == "{} is easy" and json.loads(content) == {"city": "Rome"} and end == "stop"
    whole = ask(client, "", response_format=schema, reasoning_effort="none").choices[0].message
    assert json.loads(whole.content) == {"city": "Rome"} and "reasoning" not in whole.model_extra


def test_required_call_after_the_reasoning(client: OpenAI) -> None:
    """Of two tools, of which one may be called; its arguments follow its schema."""
    named = {"type": "function", "function": {"name": "g"}}
    subset = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    blanks = {str(byte): -100 for byte in b" \t\r\n"}
    for choice in (named, subset):
        found = ask(client, "g it is</think>", tools=[WEATHER, tool("g")], tool_choice=choice, logit_bias=blanks)
        message = found.choices[0].message
        assert message.model_extra["reasoning"] == "g it is" and message.content is None
        assert [call.function.name for call in message.tool_calls] == ["g"]


def test_allowed_tools_limit_what_the_model_is_told(api: Api, client: OpenAI) -> None:
    named = {"type": "function", "function": {"name": "g"}}
    subset = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    fewer = ask(client, "x", tools=[WEATHER, tool("g")], tool_choice=subset).usage.prompt_tokens
    assert fewer == ask(client, "x", tools=[tool("g")]).usage.prompt_tokens
    subset["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "h"}}]  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match="not in tools"):
        ask(client, "x", tools=[WEATHER], tool_choice=subset)


def test_reasoning_effort_reaches_the_template(client: OpenAI) -> None:
    usual = ask(client, "x").usage.prompt_tokens
    assert ask(client, "x", reasoning_effort="low").usage.prompt_tokens == usual + len("[low]")
    off = ask(client, "x", reasoning_effort="none").usage.prompt_tokens
    assert off == usual + len("[none]<think>\n\n</think>\n\n")
    kept = ask(client, "x", reasoning_effort="none", extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert kept.usage.prompt_tokens == usual + len("[none]"), "what is set by name counts"


def test_the_last_message_is_continued(api: Api, client: OpenAI) -> None:
    said = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": f"It{say('self')} is "}]
    body = {"messages": said, "continue_final_message": True}
    text = bytes(api.post("/tokenize", body).json()["tokens"]).decode()
    assert text.endswith(f"<assistant>It{say('self')} is ")
    found = client.chat.completions.create(
        model=MODEL, messages=said, extra_body={"continue_final_message": True}, max_tokens=20
    )
    assert found.choices[0].message.content == "self"
    both = body | {"model": MODEL, "add_generation_prompt": True}
    assert api.post("/v1/chat/completions", both).json()["error"]["param"] == "add_generation_prompt"
    half = [{"role": "user", "content": say("ly.</think>Yes.")}, {"role": "assistant", "content": "<think>\nSure"}]
    (choice,) = api.post("/v1/chat/completions", body | {"model": MODEL, "messages": half}).json()["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("ly.", "Yes.")


def test_reasoning_of_earlier_answers_reaches_the_template(api: Api) -> None:
    for name in ("reasoning_content", "reasoning"):
        said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", name: "because"}]
        text = bytes(api.post("/tokenize", {"messages": said}).json()["tokens"]).decode()
        assert "<assistant><think>\nbecause\n</think>\n\ny<end>" in text


def test_a_grammar_begins_within_a_token() -> None:
    """What the token that ends the reasoning has after its end is the beginning of the structure."""

    grammars = Grammars(ByteTokenizer(), 257)
    matcher = grammars.matcher(SamplingParams(regex=r"\[1\]", structure_after="</think>"))
    assert matcher is not None
    delayed = DelayedGrammar(matcher, ByteTokenizer(), "</think>")
    assert [delayed.push(token) for token in b"[1]</think"] == [None] * 10, "free before"
    delayed.text.held += "> ["  # one token that is more than the end of the marker
    assert delayed.push(ord("1")) is matcher
    matcher.accept(ord("]"))
    assert matcher.done


TEMPLATES = {
    "<|start|>assistant<|channel|>final<|message|>": ("openai", "openai_gptoss"),
    "<tool_call> enable_thinking </think>": ("hermes", "qwen3"),
    "<tool_call><function=x><parameter=y>": ("qwen3_coder", "none"),
    "[TOOL_CALLS] [THINK]": ("mistral", "mistral"),
    "<|start_header_id|> {\"name\": function name, \"parameters\": dictionary": ("llama3_json", "none"),
    "<｜tool▁calls▁begin｜> function ```json </think>": ("deepseek_v3", "deepseek_r1"),
    "<｜tool▁calls▁begin｜> </think>": ("deepseek_v31", "deepseek_r1"),
    "<|python_start|>": ("pythonic", "none"),
    "<tool_call><arg_key>": ("none", "none"),
    "nothing known": ("hermes", "none"),
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_parsers_are_told_by_the_template(template: str) -> None:
    assert choose(template, ParserNames()) == ParserNames(*TEMPLATES[template])
    assert choose(template, ParserNames("none", "mistral")) == ParserNames("none", "mistral")


def test_named_parsers(scripted: House) -> None:
    template = scripted.backend.prompt_tokenizer.template_source()
    prompt_tokenizer = PromptTokenizer(ByteTokenizer(), chat_template=template, parsers=ParserNames("mistral", "none"))
    client = scripted.open(prompt_tokenizer=prompt_tokenizer).client()
    (choice,) = ask(client, f"<think>x[TOOL_CALLS][{ROME}]", tools=[WEATHER]).choices
    assert choice.message.content == "<think>x" and len(choice.message.tool_calls[0].id) == 9
