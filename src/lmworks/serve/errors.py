"""Every error as OpenAI's error object: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import dataclasses
import json
import math
import re

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from typing_extensions import TypedDict

from ..engine.core.sampling_params import SamplingParams
from ..spec import LMWorksError
from . import unknown_fields
from .backend import BackendError, Kind
from .limits import APIError

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
CODES = {404: "not_found", 405: "method_not_allowed"}
STATUS: dict[tuple[Kind, bool], tuple[int, str]] = {  # by kind, and whether the engine had begun to compute it
    ("refused", False): (400, "invalid_request"),
    ("refused", True): (400, "invalid_request"),
    ("busy", False): (429, "busy"),
    ("busy", True): (429, "busy"),
    ("timeout", False): (503, "queue_timeout"),
    ("timeout", True): (504, "request_timeout"),
    ("dead", False): (503, "engine_unavailable"),
    ("dead", True): (500, "engine_lost"),
}
PARAM_NAMES = {field.name for field in dataclasses.fields(SamplingParams)}
FORM = re.compile(r"^str$|^[A-Z]|[\[( ]")  # what pydantic calls the forms of a field, between the names of fields
MANY = 100  # validation errors that are looked at: more would block the event loop
SHOWN = 500  # characters of a message: some quote the request


class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorObject


def to_api_error(error: Exception) -> APIError:
    """Any exception as an APIError. Internal errors reveal nothing."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, BackendError):
        status, code = STATUS[error.kind, error.started]
        return APIError(status, code, str(error), named(str(error)), error.retry_after)
    if isinstance(error, ValidationError):
        return invalid(error)
    if isinstance(error, HTTPException):
        return APIError(error.status_code, CODES.get(error.status_code, "http_error"), str(error.detail))
    if isinstance(error, LMWorksError):
        return APIError(400, "invalid_request", str(error), named(str(error)))
    return APIError(500, "internal_error", "the server failed on this request; its log says where")


def named(message: str) -> str | None:
    """The parameter that a message begins with: "top_p = 2 is out of range …"."""
    found = re.match(r"\w+", message)
    return found[0] if found and found[0] in PARAM_NAMES else None


def invalid(error: ValidationError) -> APIError:
    """The deepest validation error of a body: in unions, of the variant that matched furthest."""
    if error.error_count() > MANY:
        return APIError(400, "invalid_request", f"the body is wrong in {error.error_count()} places")
    found = error.errors(include_url=False, include_context=False, include_input=False)
    lacking = [1] if (found[0]["type"], len(found[0]["loc"])) == ("missing", 1) else []  # may be there, misspelt
    same = [one for one in found if one["loc"][:1] == found[0]["loc"][:1] or len(one["loc"]) in lacking]
    first = max(same, key=lambda one: (len(one["loc"]), one["type"] == "extra_forbidden"))
    where = ".".join(str(part) for part in first["loc"] if not FORM.search(str(part)))
    if first["type"] == "extra_forbidden":
        message = f"{where[:80]}: there is no such field{unknown_fields.hint(error.title, first['loc'])}"
        return APIError(400, "invalid_request", message, where)
    code = "invalid_json" if first["type"] == "json_invalid" else "invalid_request"
    return APIError(400, code, f"{where}: {first['msg']}" if where else first["msg"], where or None)


def error_body(error: APIError) -> ErrorBody:
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    message = str(error)
    shown = message if len(message) <= SHOWN else f"{message[:SHOWN]}…"
    return {"error": {"message": shown, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: Exception) -> Response:
    api_error = to_api_error(error)
    headers = {} if api_error.retry_after is None else {"retry-after": str(math.ceil(api_error.retry_after))}
    if api_error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, HTTPException) and error.headers:
        headers |= error.headers  # which methods are allowed
    # As JSON escapes: what was sent may hold text that cannot be written as UTF-8.
    content = json.dumps(error_body(api_error))
    return Response(content, api_error.status, headers, media_type="application/json")
