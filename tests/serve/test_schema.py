"""The OpenAPI document: whatever it allows, and much that it does not, is answered, and never with a 5xx."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from api_server import MODEL, Api
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis")
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance  # noqa: E402

from variations import with_slow  # noqa: E402

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]


@pytest.mark.parametrize("examples", with_slow([4, 12], [12]))
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_fuzzed_requests_never_fail_with_500(api: Api, mode: GenerationMode, examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{api.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    if mode is GenerationMode.NEGATIVE:  # without a body there is nothing that could be wrong
        operations = [operation for operation in operations if operation.body]
    elif examples < 12:  # to find one body of a chat that is allowed takes 10 s
        operations = [operation for operation in operations if operation.label != "POST /v1/chat/completions"]
    seen = {operation.label: exercise(operation, mode, examples) for operation in operations}
    if mode is GenerationMode.POSITIVE:
        assert all(seen[path][200] for path in ("POST /detokenize", "GET /health", "GET /metrics", "GET /v1/models"))
    else:
        assert all(set(seen[path]) <= {400, 415} for path in ("POST /v1/completions", "POST /v1/chat/completions"))


def exercise(operation: Any, mode: GenerationMode, examples: int) -> Counter[int]:
    """Bodies as the document has them (for the model that there is), or as it does not; how often which status came."""
    statuses = Counter[int]()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
    )
    def check(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body |= {"model": MODEL} | ({"max_tokens": 2} if "max_tokens" in case.body else {})
        answer = case.call(timeout=20)
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    check()
    return statuses


def test_openapi_lists_every_route(api: Api) -> None:
    found = api.http.get("/openapi.json").json()
    assert set(found["paths"]) == {
        "/v1/models", "/v1/models/{model}", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize",
        "/tokenizer_info", "/health", "/ready", "/metrics",
    }  # fmt: skip
    assert {"CompletionRequest", "ChatRequest", "ErrorBody"} <= set(found["components"]["schemas"])
    # Clients are generated from these: they stay, whatever the handlers are called.
    assert {method["operationId"] for path in found["paths"].values() for method in path.values()} == {
        "models_v1_models_get", "model_v1_models__model__get", "completions_v1_completions_post",
        "chat_completions_v1_chat_completions_post", "encode_tokenize_post", "decode_detokenize_post",
        "info_tokenizer_info_get", "healthy_health_get", "ready_ready_get", "metrics_metrics_get",
    }  # fmt: skip
