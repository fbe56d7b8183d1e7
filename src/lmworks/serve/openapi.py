"""Parts of the OpenAPI document that routes share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter

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
Schema = tuple[Any, Literal["validation", "serialization"], TypeAdapter[Any]]
REFERENCE = "#/components/schemas/{model}"
STREAM: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}  # the other content of a 200


def error_responses(*statuses: int, body: Any = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's responses of these statuses, by default of all that generation has.

    Of a `model` FastAPI would make a validator for each status of each route: a quarter of a second of every start.
    """
    return {
        status: {"description": ERRORS[status], "content": json_content(body)}
        for status in statuses or GENERATION_ERRORS
    }


def request_body(body: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI's requestBody: bodies are read within limits by `serve.body`, not by FastAPI."""
    return {"requestBody": {"required": True, "content": json_content(body)}}


def json_content(body: Any) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REFERENCE.format(model=body.__name__)}}}


def component_schemas(requests: Iterable[type[BaseModel]], errors: Iterable[Any]) -> dict[str, Any]:
    """Schemas of the bodies above, by name."""
    inputs: list[Schema] = [((body, "in"), "validation", TypeAdapter(body)) for body in requests]
    outputs: list[Schema] = [((body, "out"), "serialization", TypeAdapter(body)) for body in errors]
    _, schemas = TypeAdapter.json_schemas([*inputs, *outputs], ref_template=REFERENCE)
    definitions: dict[str, Any] = schemas["$defs"]
    return definitions
