"""Parts of the OpenAPI document that routes share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from .errors import ErrorBody

ERRORS = {
    400: "invalid request",
    401: "missing or invalid API key",
    404: "model not found",
    409: "conflict: see the message",
    429: "rate limit exceeded: see retry-after",
    503: "unavailable: see retry-after",
}
GENERATION_ERRORS = (400, 401, 404, 429, 503)
STREAM: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}  # the other content of a 200


def error_responses(*statuses: int, body: Any = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's responses of these statuses, by default of all that generation has."""
    return {status: {"model": body, "description": ERRORS[status]} for status in statuses or GENERATION_ERRORS}


def request_body(body: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI's requestBody: bodies are read within limits by `serve.body`, not by FastAPI."""
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
