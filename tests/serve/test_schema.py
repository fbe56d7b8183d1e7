"""The OpenAPI document: whatever it allows, and much that it does not, is answered, and never with a 5xx."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from api_server import MODEL, Api, House

from variations import with_slow

CHATS = ("POST /v1/chat/completions", "POST /v1/responses", "POST /v1/messages", "POST /v1/messages/count_tokens")


@pytest.mark.parametrize("examples", with_slow([3, 12], [12]))
@pytest.mark.parametrize("valid", [True, False], ids=["positive", "negative"])
def test_fuzzed_requests_never_fail_with_500(house: House, tmp_path: Path, valid: bool, examples: int) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    api = house.open(batch_dir=tmp_path / "batches")
    schema = schemathesis.openapi.from_url(f"{api.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    if examples < 12:  # one path of a handler that has several
        named = {operation.definition.raw["summary"]: operation for operation in operations[::-1]}
        operations = [*named.values()][::-1]
    if not valid:  # without a body there is nothing that could be wrong
        operations = [operation for operation in operations if operation.body]
    elif examples < 12:  # to find one body of a chat that is allowed takes 10 s
        operations = [operation for operation in operations if operation.label not in CHATS]
    seen = {operation.label: exercise(operation, valid, examples) for operation in operations}
    if valid:
        assert all(seen[path][200] for path in ("POST /detokenize", "GET /health", "GET /metrics", "GET /v1/models"))
    else:
        assert all(set(seen[path]) <= {400, 415} for path in ("POST /v1/completions", *CHATS))


def exercise(operation: Any, valid: bool, examples: int) -> Counter[int]:
    """Bodies as the document has them (for the model that there is), or as it does not; how often which status came."""
    # Imported here: every worker that collects this file would pay for them.
    from hypothesis import HealthCheck, given, settings
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

    checks = [not_a_server_error, content_type_conformance, response_schema_conformance]
    statuses = Counter[int]()

    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE if valid else GenerationMode.NEGATIVE))
    @settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
    )
    def check(case: Any) -> None:
        if valid and isinstance(case.body, dict):
            case.body |= {"model": MODEL} | {
                name: 2 for name in ("max_tokens", "max_output_tokens") if name in case.body
            }
        answer = case.call(timeout=20)
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=checks)

    check()
    return statuses


def test_openapi_lists_every_route(api: Api) -> None:
    found = api.http.get("/openapi.json").json()
    assert set(found["paths"]) == {
        "/v1/models", "/v1/models/{model}", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize",
        "/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify", "/v1/classify",
        "/version", "/is_sleeping", "/sleep", "/wake_up", "/reset_prefix_cache", "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/responses", "/v1/responses/{response_id}", "/v1/messages", "/v1/messages/count_tokens",
        "/tokenizer_info", "/health", "/ready", "/metrics", "/v1/files", "/v1/files/{file_id}",
        "/v1/files/{file_id}/content", "/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel",
    }  # fmt: skip
    assert {"CompletionRequest", "ChatRequest", "ErrorBody"} <= set(found["components"]["schemas"])
    named = set(re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', json.dumps(found)))
    assert named <= set(found["components"]["schemas"]) and "AnthropicErrorBody" in named
    # Clients are generated from these: they stay, whatever the handlers are called.
    assert {method["operationId"] for path in found["paths"].values() for method in path.values()} == {
        "models_v1_models_get", "model_v1_models__model__get", "completions_v1_completions_post",
        "chat_completions_v1_chat_completions_post", "encode_tokenize_post", "decode_detokenize_post",
        "info_tokenizer_info_get", "healthy_health_get", "embeddings_v1_embeddings_post", "score_score_post",
        "score_v1_score_post", "rerank_rerank_post", "rerank_v1_rerank_post", "rerank_v2_rerank_post",
        "classify_classify_post", "classify_v1_classify_post",
        "version_version_get", "is_sleeping_is_sleeping_get", "sleep_sleep_post", "wake_up_wake_up_post",
        "reset_prefix_cache_reset_prefix_cache_post", "load_lora_adapter_v1_load_lora_adapter_post",
        "unload_lora_adapter_v1_unload_lora_adapter_post",
        "ready_ready_get", "metrics_metrics_get",
        "create_response_v1_responses_post", "retrieve_response_v1_responses__response_id__get",
        "delete_response_v1_responses__response_id__delete", "create_message_v1_messages_post",
        "count_message_tokens_v1_messages_count_tokens_post", "create_file_v1_files_post", "list_files_v1_files_get",
        "retrieve_file_v1_files__file_id__get", "file_content_v1_files__file_id__content_get",
        "delete_file_v1_files__file_id__delete", "create_batch_v1_batches_post", "list_batches_v1_batches_get",
        "retrieve_batch_v1_batches__batch_id__get", "cancel_batch_v1_batches__batch_id__cancel_post",
    }  # fmt: skip
