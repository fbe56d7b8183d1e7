"""What is not known is told with what was probably meant: fields of requests, and endpoints."""

from __future__ import annotations

from typing import Any

import pytest
from api_server import MODEL, Api

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": MODEL, "prompt": "Hi"}
FIELDS: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", CHAT | {"max_token": 3}, "max_token", "did you mean 'max_tokens'?"),
    ("/v1/chat/completions", CHAT | {"temprature": 3}, "temprature", "did you mean 'temperature'?"),
    ("/v1/chat/completions", CHAT | {"functions": []}, "functions", "did you mean 'tools'?"),
    ("/v1/chat/completions", CHAT | {"best_of": 2}, "best_of", "/v1/completions has it"),
    ("/v1/completions", TEXT | {"max_completion_tokens": 2}, "max_completion_tokens", "did you mean 'max_tokens'?"),
    ("/v1/completions", CHAT, "messages", "/v1/chat/completions has it"),
    ("/v1/completions", {"modle": MODEL, "prompt": "Hi"}, "modle", "did you mean 'model'?"),
    ("/tokenize", {"promt": "Hi"}, "promt", "did you mean 'prompt'?"),
    (
        "/v1/chat/completions",
        CHAT | {"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
        "tools.0.function.paramters",
        "did you mean 'parameters'?",
    ),
    (
        "/v1/chat/completions",
        CHAT | {"tool_choice": {"type": "function", "function": {"nam": "f"}}},
        "tool_choice.function.nam",
        "did you mean 'name'?",
    ),
    ("/v1/chat/completions", CHAT | {"x" * 100_000: 1}, "x" * 100_000, "no such field"),
]


@pytest.mark.parametrize(("path", "body", "param", "said"), FIELDS, ids=[param[:30] for _, _, param, _ in FIELDS])
def test_unknown_field_suggests_nearest(api: Api, path: str, body: dict[str, Any], param: str, said: str) -> None:
    found = api.post(path, body)
    error = found.json()["error"]
    assert (found.status_code, error["code"], error["param"]) == (400, "invalid_request", param)
    assert error["message"].endswith(said) and error["message"].startswith(f"{param[:80]}: there is no such field")


def test_missing_fields_are_reported(api: Api) -> None:
    assert api.post("/v1/completions", {"model": MODEL}).json()["error"]["message"] == "prompt: Field required"


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/embeddings", {"input": []}, "input", "input: List should have at least 1 item after validation, not 0"),
    ("/v1/completions", {"prompt": 5}, "prompt", "prompt: Input should be a valid string or a valid list"),
    ("/v1/completions", {"prompt": "a", "n": "2"}, "n", "n: Input should be a valid integer"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "messages.0.content.0.type",
        "messages.0.content.0.type: Input should be 'text'",
    ),
    ("/v1/chat/completions", CHAT | {"tool_choice": "required"}, "tool_choice", "tool_choice: there are no tools to"),
]


@pytest.mark.parametrize(("path", "body", "param", "said"), WRONG, ids=[said[:30] for *_, said in WRONG])
def test_wrong_values_say_what_would_do(api: Api, path: str, body: dict[str, Any], param: str, said: str) -> None:
    found = api.post(path, {"model": MODEL} | body)
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(said)


def test_unknown_path_lists_endpoints(api: Api) -> None:
    found = api.post("/chat/completions", CHAT)
    error = found.json()["error"]
    assert (found.status_code, error["code"], error["type"]) == (404, "not_found", "not_found_error")
    assert error["message"].startswith("there is no POST /chat/completions (did you mean /v1/chat/completions?)")
    served = "GET /v1/models, GET /v1/models/{model}, POST /v1/completions, POST /v1/chat/completions, POST /v1/"
    assert served in error["message"] and "all are in /openapi.json" in error["message"]
    other = api.post("/v1/moderations", {}).json()["error"]["message"]
    assert "did you mean" not in other and served in other
    long = api.http.get("/" + "a" * 5000).json()["error"]["message"]
    assert len(long) <= 501 and served in long


def test_wrong_method_lists_allowed(api: Api) -> None:
    found = api.http.get("/v1/chat/completions")
    assert (found.status_code, found.json()["error"]["code"]) == (405, "method_not_allowed")
    assert found.json()["error"]["message"] == "/v1/chat/completions takes POST, not GET"
    assert found.headers["allow"] == "POST"
