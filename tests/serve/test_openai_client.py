"""The real `openai` client, which refuses whatever its types do not allow, for every endpoint."""

from __future__ import annotations

import json

import jinja2
import openai
import pytest
import torch
from api_server import MODEL, TEMPLATE, Api, twin
from openai import BaseModel, OpenAI, Stream
from openai.types import Completion, CompletionChoice

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NO_BLANKS = {str(byte): -100 for byte in b" \t\r\n"}  # of which a model that knows nothing may write any number


class ChunkChoice(CompletionChoice):
    """The client's own type has no place for a choice that has not ended, which every stream but its last chunk has."""

    finish_reason: str | None = None  # type: ignore[assignment]


class Chunk(BaseModel):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: openai.types.CompletionUsage | None = None


@pytest.fixture(scope="module")
def client(api: Api) -> OpenAI:
    return api.client()


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "lmworks"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("tinny")
    assert error.value.code == "model_not_found" and "tiny" in str(error.value)


def test_completion_equals_greedy_continuation(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=8, temperature=0)
    ids = list(b"Hello")
    with torch.no_grad():
        for _ in range(8):
            ids.append(int(twin()(torch.tensor([ids]))[0, -1, :257].argmax()))
    expected = bytes(token for token in ids[5:] if token < 256).decode(errors="replace")
    assert answer.choices[0].text == expected and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8, 13)


def test_streamed_completion_equals_unstreamed(client: OpenAI) -> None:
    wishes = {"model": MODEL, "prompt": ["Hello", "World"], "n": 2, "max_tokens": 12, "seed": 5}
    whole = client.post("/completions", cast_to=Completion, body=wishes)
    body = {**wishes, "stream": True, "stream_options": {"include_usage": True}}
    stream = client.post("/completions", cast_to=Chunk, body=body, stream=True, stream_cls=Stream[Chunk])
    chunks = list(stream)
    texts = dict.fromkeys(range(4), "")
    ends = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert texts[0] != texts[1] and texts[2] != texts[3], "two answers to one prompt are different ones"


def test_logprobs_of_a_completion(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=list(b"Hello"), max_tokens=3, temperature=0, logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None and found.token_logprobs and found.top_logprobs and found.tokens
    with torch.no_grad():
        logits = twin()(torch.tensor([list(b"Hello")]))[0, -1, :257].float()
    values, ids = logits.log_softmax(-1).topk(2)
    assert found.token_logprobs[0] == pytest.approx(float(values[0]), abs=1e-4)
    assert sorted(found.top_logprobs[0].values(), reverse=True) == pytest.approx(values.tolist(), abs=1e-4)
    assert found.text_offset is not None and found.text_offset[0] == 0
    assert int(ids[0]) >= 128 or found.tokens[0] == chr(int(ids[0]))


def test_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        ],
        max_completion_tokens=6,
        n=2,
        logprobs=True,
        top_logprobs=3,
        seed=-4,
        user="somebody",
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.message.role == "assistant" and choice.finish_reason == "length" for choice in answer.choices)
    first = answer.choices[0].logprobs
    assert first is not None and first.content is not None and len(first.content) == 6
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in first.content)
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    said = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)
    assert answer.usage.prompt_tokens == len(template.render(messages=said, add_generation_prompt=True))


def test_streamed_chat_equals_unstreamed(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    wishes = {"model": MODEL, "messages": messages, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**wishes)  # type: ignore[call-overload]
    chunks = list(
        client.chat.completions.create(**wishes, stream=True, stream_options={"include_usage": True})  # type: ignore
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert said == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_structured_output(client: OpenAI) -> None:
    schema = TOOL["function"]["parameters"]  # type: ignore[index]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Where?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}},
        max_tokens=120,
        temperature=0,
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert found["city"] in ("Rome", "Oslo") and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_required_tool(client: OpenAI, choice: object) -> None:
    wishes = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Where?"}],
        "tools": [TOOL],
        "tool_choice": choice,
        "max_tokens": 200,
        "temperature": 0,
        "logit_bias": NO_BLANKS,
    }
    answer = client.chat.completions.create(**wishes)  # type: ignore[call-overload]
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather" and '"city"' in call.function.arguments
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
    chunks = list(client.chat.completions.create(**wishes, stream=True))  # type: ignore[call-overload]
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert {call.index for call in calls} == {0} and len(calls) > 2, "arguments come as they are written"
    assert "".join(call.function.arguments for call in calls) == answer_arguments(answer)
    assert [call.function.name for call in calls if call.id] == ["weather"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def answer_arguments(answer: openai.types.chat.ChatCompletion) -> str:
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    return call.function.arguments


def test_errors_map_to_client_exceptions(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert error.value.param == "temperature" and error.value.code == "invalid_request"
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 600}])
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="x")
