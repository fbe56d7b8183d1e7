"""Errors in Anthropic's form: `{"type": "error", "error": {type, message}}`."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from ...limits import APIError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
PATH = "/v1/messages"  # and below


class AnthropicError(TypedDict):
    type: str
    message: str


class AnthropicErrorBody(TypedDict):
    type: Literal["error"]
    error: AnthropicError


def anthropic_error(error: APIError, message: str | None = None) -> AnthropicErrorBody:
    kind = TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message or str(error)}}
