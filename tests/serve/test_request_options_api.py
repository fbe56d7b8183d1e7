"""The options of requests beyond OpenAI's, over HTTP and through the official client (extra_body): what a request asks
for arrives at the engine and comes back under vLLM's names. The engine's side: tests/engine/test_request_options.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
from api_server import MODEL, Api, House, twin

from lmworks.serve.backend import PromptTokenizer
from lmworks.serve.serving import LocalModel
from lmworks.spec import SpecError

LETTERS = {"allowed_token_ids": [*b"abc"]}


def chat(api: Api, **wishes: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 8}
    answer = api.post("/v1/chat/completions", body | wishes)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def chunks(api: Api, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = api.post(path, body | {"model": MODEL, "stream": True}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_tokens_and_words_are_ruled_out(api: Api) -> None:
    wishes = {"max_tokens": 30, "temperature": 2.0, "seed": 1, **LETTERS}
    text = api.complete(**wishes)["choices"][0]["text"]
    assert set(text) == set("abc")
    text = api.complete(**wishes, bad_words=["ab", "c"])["choices"][0]["text"]
    assert set(text) == set("ab") and "ab" not in text
    assert set(chat(api, **wishes)["choices"][0]["message"]["content"]) == set("abc")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids_come_with_the_text(api: Api, path: str) -> None:
    """Whole and streamed: the same ids, and they decode to the text."""
    body: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "return_token_ids": True, **LETTERS}
    body |= {"prompt": "Hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    whole = api.post(path, body | {"model": MODEL}).json()
    choice = whole["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert bytes(choice["token_ids"]).decode() == text and len(text) == 6
    prompt = whole.get("prompt_token_ids") or choice["prompt_token_ids"]
    assert bytes(prompt).decode() == ("Hello" if "prompt" in body else "<user>Hi<assistant>")
    parts = chunks(api, path, body)
    assert [t for part in parts for t in part["choices"][0]["token_ids"]] == choice["token_ids"]
    firsts = [part.get("prompt_token_ids") or part["choices"][0].get("prompt_token_ids") for part in parts]
    assert firsts == [prompt] + [None] * (len(parts) - 1)
    del body["return_token_ids"]
    assert "token_ids" not in api.post(path, body | {"model": MODEL}).json()["choices"][0]


def test_tokens_are_written_as_ids(api: Api) -> None:
    choice = api.complete(max_tokens=3, logprobs=2, return_tokens_as_token_ids=True, return_token_ids=True)["choices"][
        0
    ]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(re.fullmatch("token_id:[0-9]+", name) for top in choice["logprobs"]["top_logprobs"] for name in top)
    found = chat(api, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)["choices"][
        0
    ]
    assert [one["token"] for one in found["logprobs"]["content"]] == [f"token_id:{i}" for i in found["token_ids"]]


def test_prompt_logprobs_are_the_models(api: Api) -> None:
    """Twice, as the prefix cache must not hide them; for texts, token ids and conversations."""
    prompt = [*b"A prompt that fills more than one block."]
    expected = torch.log_softmax(twin()(torch.tensor([prompt]))[0].double(), dim=-1)
    for _ in range(2):
        found = api.complete(prompt=[prompt, prompt[:5]], prompt_logprobs=2, max_tokens=1)["choices"]
        assert found[0]["prompt_logprobs"][0] is None and len(found[1]["prompt_logprobs"]) == 5
        for place, table in enumerate(found[0]["prompt_logprobs"][1:]):
            best = expected[place].topk(2).indices.tolist()
            assert {int(token) for token in table} == {*best, prompt[place + 1]}
            for token, one in table.items():
                assert one["logprob"] == pytest.approx(expected[place, int(token)].item(), abs=1e-4)
                assert one["rank"] == (best.index(int(token)) + 1 if int(token) in best else None)
            assert table[str(prompt[place + 1])]["decoded_token"] == chr(prompt[place + 1])
    conversation = chat(api, prompt_logprobs=0, return_token_ids=True)
    assert len(conversation["prompt_logprobs"]) == len(conversation["prompt_token_ids"])


def test_long_prompts_are_truncated(api: Api) -> None:
    prompt = "0123456789" * 100
    for most, kept in ((7, 7), (-1, 512 - 6)):
        found = api.complete(prompt=prompt, truncate_prompt_tokens=most, max_tokens=6, echo=True, return_token_ids=True)
        assert found["usage"]["prompt_tokens"] == kept
        assert found["choices"][0]["text"].startswith(prompt[-kept:])
        assert found["choices"][0]["prompt_token_ids"] == [*prompt[-kept:].encode()]
    found = chat(api, truncate_prompt_tokens=4, return_token_ids=True)
    assert bytes(found["prompt_token_ids"]) == b"ant>"


def test_a_salt_separates_cached_prefixes(api: Api) -> None:
    prompt = "This prompt is for the salt alone. " * 4
    asked = [{"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {}]
    details = [api.complete(prompt=prompt, **each)["usage"]["prompt_tokens_details"] for each in asked]
    assert [one["cached_tokens"] > 0 for one in details] == [False, False, True, False]


def test_special_tokens_in_the_text(api: Api) -> None:
    wishes = {"allowed_token_ids": [256, 97], "ignore_eos": True, "temperature": 1.0, "seed": 3, "max_tokens": 40}
    plain = api.complete(**wishes)["choices"][0]["text"]
    whole = api.complete(**wishes, skip_special_tokens=False)["choices"][0]["text"]
    assert "<|endoftext|>" in whole and whole.replace("<|endoftext|>", "") == plain
    streamed = chunks(api, "/v1/completions", {"prompt": "Hello", "skip_special_tokens": False, **wishes})
    assert "".join(part["choices"][0]["text"] for part in streamed) == whole


SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
TAG = {"type": "structural_tag", "triggers": ["<n>"], "structures": [{"begin": "<n>", "schema": SCHEMA, "end": "</n>"}]}
SHAPES: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"grammar": 'root ::= "(" root ")" | "x"'}}, r"\(*x\)*"),
    ({"guided_grammar": 'start: "p" | "q"'}, "p|q"),
    ({"structured_outputs": {"json": SCHEMA}}, r"\{[ \n]?\"n\"[ \n]?:[ \n]?[12][ \n]?\}"),
]


@pytest.mark.parametrize(("wish", "pattern"), SHAPES, ids=[str(wish) for wish, _ in SHAPES])
def test_structured_outputs_through_the_client(api: Api, wish: dict[str, Any], pattern: str) -> None:
    more = {"seed": 5, "extra_body": wish, "max_tokens": 60}
    message: Any = [{"role": "user", "content": "Hi"}]
    completion = api.client().completions.create(model=MODEL, prompt="Hi", **more)
    conversation = api.client().chat.completions.create(model=MODEL, messages=message, **more)
    for text in (completion.choices[0].text, conversation.choices[0].message.content):
        assert re.fullmatch(pattern, text or ""), text


def test_any_object_and_tags(api: Api) -> None:
    text = api.complete(structured_outputs={"json_object": True}, max_tokens=400, temperature=1.0, seed=2, min_p=0.2)
    assert text["choices"][0]["text"].startswith("{")
    wishes = {
        "structured_outputs": {"structural_tag": TAG},
        "bad_words": [chr(i) for i in range(128) if chr(i) not in '<n>/{}":12' and chr(i).strip()][:64],
    }
    found = api.complete(**wishes, max_tokens=60, temperature=1.0, seed=2)["choices"][0]["text"]
    for inner in re.findall("<n>(.*?)</n>", found):
        jsonschema.validate(json.loads(inner), SCHEMA)


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_outputs": {}}, "structured_outputs", "holds nothing"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex", "cannot be combined"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "there is no such field"),
    ({"structured_outputs": {"json": {"oneOf": [{}, {}]}}}, "structured_outputs.json", "oneOf may both match"),
    ({"structured_outputs": {"json": {"type": "number", "minimum": "a"}}}, "structured_outputs.json", "invalid"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "grammar is invalid"),
    ({"structured_outputs": {"regex": "[^\\s\\S]"}}, "structured_outputs.regex", "no answer can match"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "none of them empty"),
    ({"structured_outputs": {"grammar": "((("}}, "structured_outputs.grammar", "neither Lark nor EBNF"),
    ({"structured_outputs": {"grammar": "x" * 70_000}}, "structured_outputs.grammar", "characters"),
    ({"structured_outputs": {"structural_tag": {"triggers": []}}}, "structured_outputs.structural_tag", "structures"),
    (
        {"structured_outputs": {"structural_tag": TAG | {"structures": [{"begin": "<n>", "schema": "{", "end": ""}]}}},
        "structured_outputs.structural_tag",
        "not JSON",
    ),
    ({"guided_json": {"oneOf": [{}, {}]}}, "guided_json", "oneOf may both match"),
    ({"guided_regex": "("}, "guided_regex", "grammar is invalid"),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"guided_grammar": "((("}, "guided_grammar", "neither Lark nor EBNF"),
    ({"bad_words": [" "]}, "bad_words", "empty text"),
    ({"bad_words": ["a"] * 65}, "bad_words", "at most 64"),
    ({"bad_words": ["a" * 300]}, "bad_words", "at most 256"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
    ({"allowed_token_ids": [300]}, "allowed_token_ids", "tokens are 0 to 256"),
    ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs", "stream"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "nothing of the prompt"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens", "blanks"),
    ({"cache_salt": ""}, "cache_salt", "at least 1"),
    ({"cache_salt": "a" * 300}, "cache_salt", "at most 256"),
    ({"priority": -1}, "priority", "this key's requests have 0 or more"),
    ({"priority": 2000}, "priority", "less than or equal to 1000"),
]


@pytest.mark.parametrize(("wish", "param", "message"), BAD, ids=[message for *_, message in BAD])
def test_one_clear_400_for_each_bad_input(api: Api, wish: dict[str, Any], param: str, message: str) -> None:
    answer = api.post("/v1/completions", {"model": MODEL, "prompt": "Hi", "max_tokens": 2} | wish)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"] and (error["param"] or "") == param, error


WRONG: dict[str, Any] = {"oneOf": [{}, {}]}
TURN: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
FORMAT: dict[str, Any] = {"type": "json_schema", "name": "n", "schema": WRONG}
FUNCTION = {"name": "f", "parameters": WRONG}
SCHEMAS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"structured_outputs": {"json": WRONG}}, "structured_outputs.json"),
    (
        "/v1/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": WRONG}}},
        "response_format.json_schema.schema",
    ),
    (
        "/v1/chat/completions",
        {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
        "tools",
    ),
    ("/v1/responses", {"input": "Hi", "text": {"format": FORMAT}}, "text.format.schema"),
    (
        "/v1/messages",
        {"max_tokens": 2, "output_config": {"format": {"type": "json_schema", "schema": WRONG}}},
        "output_config.format.schema",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "wish", "field"), SCHEMAS, ids=[f"{path} {field}" for path, _, field in SCHEMAS])
def test_an_invalid_schema_is_named_as_the_client_did(
    api: Api, path: str, wish: dict[str, Any], field: str, stream: bool
) -> None:
    prompt = {} if "input" in wish else {"messages": TURN}
    answer = api.post(path, {"model": MODEL, "stream": stream, **prompt, **wish})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith(f"{field}: ") and "oneOf" in error["message"], error
    assert error.get("param", field) == field  # Anthropic's errors have none


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
NO_TOOLS = "there are no tools to choose from"
NAMED_TOOL = {"type": "function", "function": {"name": "f"}}
ANY_OF_NONE = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED_TOOL]}}
NAMED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": 5}}},
        "response_format.json_schema.schema",
        "valid dictionary",
    ),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "required"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", NO_TOOLS),
    (CHAT, {"tool_choice": ANY_OF_NONE}, "tool_choice", NO_TOOLS),
    (RESPONSES, {"tool_choice": "required"}, "tool_choice", NO_TOOLS),
    (MESSAGES, {"max_tokens": 2, "tool_choice": {"type": "any"}}, "tool_choice", NO_TOOLS),
    (
        MESSAGES,
        {"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages.0.content.0.text",
        "required",
    ),
]


@pytest.mark.parametrize(
    ("path", "wish", "param", "message"), NAMED, ids=[f"{path} {param}" for path, _, param, _ in NAMED]
)
def test_errors_name_the_clients_field(api: Api, path: str, wish: dict[str, Any], param: str, message: str) -> None:
    prompt = {"input": "Hi"} if path == RESPONSES else {"messages": TURN}
    answer = api.post(path, {"model": MODEL, **prompt, **wish})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"], error
    if path == MESSAGES:  # Anthropic's errors have no param
        assert error["message"].startswith(param)
    else:
        assert (error["param"] or "") == param, error


def test_a_tenant_cannot_jump_the_queue(house: House, tmp_path: Path) -> None:
    """Priorities are bounded by the key's own."""
    config = tmp_path / "serve.toml"
    keys = [("early", -5), ("late", 3)]
    config.write_text(
        "\n".join(f'[[keys]]\nname = "{n}"\nsecret = "secret-{n}-12345"\npriority = {p}\n' for n, p in keys)
    )
    server = house.open(config=config)
    statuses = {}
    for name, _ in keys:
        for priority in (-6, -5, 0, 3, 9):
            body = {"model": MODEL, "prompt": "Hi", "max_tokens": 1, "priority": priority}
            answer = server.post("/v1/completions", body, headers={"authorization": f"Bearer secret-{name}-12345"})
            statuses[name, priority] = answer.status_code
    assert [statuses["early", p] for p in (-6, -5, 0, 3, 9)] == [400, 200, 200, 200, 200]
    assert [statuses["late", p] for p in (-6, -5, 0, 3, 9)] == [400, 400, 400, 200, 200]


def test_a_folders_sampling_defaults(house: House, tmp_path: Path) -> None:
    """Of generation_config.json, for requests that say nothing; shown by /v1/models."""
    stored = {"temperature": 0.0, "repetition_penalty": 1.9, "do_sample": True, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    server = house.open()
    backend: Any = SimpleNamespace(prompt_tokenizer=PromptTokenizer(None, folder=tmp_path))
    server.serving.local_models[0].stored_sampling = LocalModel(backend).stored_sampling
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 40}
    plain = server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert plain == server.complete(repetition_penalty=1.9, max_tokens=40)["choices"][0]["text"]
    assert plain != server.complete(repetition_penalty=1.0, max_tokens=40)["choices"][0]["text"]
    listed = server.http.get("/v1/models").json()["data"][0]
    assert listed["sampling_defaults"] == {"temperature": 0.0, "repetition_penalty": 1.9}
    server.serving.generation_config = False
    assert "sampling_defaults" not in server.http.get("/v1/models").json()["data"][0]


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ({"min_p": None}, {}),
        (None, {}),
        ({"temperature": -1}, "temperature = -1 is out of range"),
        ([], "generation_config.json"),
    ],
)
def test_what_is_read_of_a_generation_config(tmp_path: Path, stored: Any, found: Any) -> None:
    if stored is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    backend: Any = SimpleNamespace(prompt_tokenizer=PromptTokenizer(None, folder=tmp_path))
    if isinstance(found, str):
        with pytest.raises(SpecError, match=found):
            _ = LocalModel(backend).stored_sampling
    else:
        assert LocalModel(backend).stored_sampling == found
