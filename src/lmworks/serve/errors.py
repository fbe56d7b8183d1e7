"""Every error as OpenAI's error object: `{"error": {message, type, param, code}}`; suggestions for unknown fields."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.responses import Response
from typing_extensions import TypedDict

from ..engine.core.sampling_params import SamplingParams
from ..spec import LMWorksError
from ..spec.errors import near_names, suggestion
from .backend import BackendError, Kind
from .batches.bodies import BatchRequest
from .limits import APIError
from .protocols.messages import errors as messages
from .protocols.messages.bodies import CountTokensRequest, MessagesRequest
from .protocols.responses.bodies import ResponsesRequest
from .request_bodies import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)

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
FORM = re.compile(r"^str$|^[A-Z]|[\[( ]")  # names of union variants in pydantic's locations, between names of fields
SHOULD_BE = "Input should be "
MAX_VALIDATION_ERRORS = 100  # more would block the event loop
MAX_MESSAGE_CHARS = 500  # some messages quote the request


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
        return APIError(status, code, str(error), param_of(str(error)), error.retry_after)
    if isinstance(error, ValidationError):
        return validation_api_error(error)
    if isinstance(error, HTTPException):
        return APIError(error.status_code, CODES.get(error.status_code, "http_error"), str(error.detail))
    if isinstance(error, LMWorksError):
        return APIError(400, "invalid_request", str(error), param_of(str(error)))
    return APIError(500, "internal_error", "the server failed on this request; see its log")


def param_of(message: str) -> str | None:
    """The parameter that a message begins with: "top_p = 2 is out of range …"."""
    found = re.match(r"\w+", message)
    return found[0] if found and found[0] in PARAM_NAMES else None


def validation_api_error(error: ValidationError) -> APIError:
    """The deepest validation error of a body: in unions, of the variant that matched furthest."""
    if error.error_count() > MAX_VALIDATION_ERRORS:
        return APIError(400, "invalid_request", f"the body is wrong in {error.error_count()} places")
    found = error.errors(include_url=False, include_context=False, include_input=False)
    found = [one | {"loc": without_tags(error.title, one["loc"])} for one in found]
    lacking = [1] if (found[0]["type"], len(found[0]["loc"])) == ("missing", 1) else []  # may be there, misspelt
    same = [one for one in found if one["loc"][:1] == found[0]["loc"][:1] or len(one["loc"]) in lacking]
    # What does not belong to a kind of object that the body did not mean is no error of it.
    other_kind = {one["loc"][:-1] for one in same if one["type"] == "literal_error" and one["loc"][-1] == "type"}
    meant = [one for one in same if one["type"] != "extra_forbidden" or one["loc"][:-1] not in other_kind]
    first = max(meant, key=lambda one: (len(one["loc"]), one["type"] == "extra_forbidden", not of_other_type(one)))
    where = field_of(first)
    if first["type"] == "extra_forbidden":
        message = f"{where[:80]}: there is no such field{hint(error.title, first['loc'])}"
        return APIError(400, "invalid_request", message, where)
    code = "invalid_json" if first["type"] == "json_invalid" else "invalid_request"
    message = first["msg"]
    if of_other_type(first):  # of several that would do
        there = dict.fromkeys(one["msg"] for one in meant if field_of(one) == where and of_other_type(one))
        message = " or ".join([message, *(other.removeprefix(SHOULD_BE) for other in there if other != message)])
    return APIError(400, code, f"{where}: {message}" if where else message, where or None)


def field_of(error: ErrorDetails) -> str:
    return ".".join(str(part) for part in error["loc"] if not FORM.search(str(part)))


def of_other_type(error: ErrorDetails) -> bool:
    return error["type"].endswith("_type")


def error_body(error: APIError) -> ErrorBody:
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    message = str(error)
    shown = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}…"
    return {"error": {"message": shown, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: Exception, path: str = "") -> Response:
    """In the form of the API that the path is of."""
    api_error = to_api_error(error)
    headers = {} if api_error.retry_after is None else {"retry-after": str(math.ceil(api_error.retry_after))}
    if api_error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, HTTPException) and error.headers:
        headers |= error.headers  # which methods are allowed
    return Response(error_json(api_error, path), api_error.status, headers, media_type="application/json")


def error_json(error: APIError, path: str) -> str:
    """ASCII: a message may quote text that cannot be encoded as UTF-8."""
    body = error_body(error)
    return json.dumps(messages.anthropic_error(error, body["error"]["message"]) if of_messages(path) else body)


def error_event(error: APIError, path: str) -> bytes:
    """In a stream that has begun."""
    name = b"event: error\n" if of_messages(path) else b""
    return name + f"data: {error_json(error, path)}\n\n".encode()


def of_messages(path: str) -> bool:
    return path == messages.PATH or path.startswith(f"{messages.PATH}/")


# --- unknown fields --------------------------------------------------------------------------------------


PATHS: dict[type[BaseModel], str] = {
    ChatRequest: "/v1/chat/completions",
    CompletionRequest: "/v1/completions",
    ResponsesRequest: "/v1/responses",
    MessagesRequest: messages.PATH,
    CountTokensRequest: f"{messages.PATH}/count_tokens",
    TokenizeRequest: "/tokenize",
    DetokenizeRequest: "/detokenize",
    EmbeddingRequest: "/v1/embeddings",
    ScoreRequest: "/score",
    RerankRequest: "/rerank",
    ClassifyRequest: "/classify",
    BatchRequest: "/v1/batches",
}
MAX_NAME_CHARS = 80  # of an unknown name that is compared with others
# Names in older versions of the API, in other servers and in templates.
OTHER_NAMES = {
    "max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "max_length": "max_tokens",
    "functions": "tools", "function_call": "tool_choice",
    "json_schema": "response_format", "enable_thinking": "chat_template_kwargs", "num_return_sequences": "n",
    "random_seed": "seed",
}  # fmt: skip


def hint(title: str, place: Sequence[int | str]) -> str:
    """A suggestion for an unknown field at `place` of the body with this title (pydantic's)."""
    body = next((each for each in PATHS if each.__name__ == title), None)
    if body is None or not place or len(str(place[-1])) > MAX_NAME_CHARS:
        return ""
    name, known = str(place[-1]), sorted({field for model in models_at(body, place) for field in field_names(model)})
    if OTHER_NAMES.get(name) in known:
        return suggestion([OTHER_NAMES[name]])
    elsewhere = [path for other, path in PATHS.items() if len(place) == 1 and name in field_names(other)]
    return f"; {elsewhere[0]} has it" if elsewhere else suggestion(near_names(name, known)[:2])


def models_at(body: type[BaseModel], place: Sequence[int | str]) -> set[type[BaseModel]]:
    """The models that may stand at `place`. A part that is no field's name is the name of a union variant."""
    found = {body}
    for part in place[:-1]:
        inside = {inner for model in found if part in field_names(model) for inner in inner_models(model, str(part))}
        found = inside or {model for model in found if model.__name__ == part} or found
    return found


def field_names(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def inner_models(model: type[BaseModel], name: str) -> Iterator[type[BaseModel]]:
    field = next(field for key, field in model.model_fields.items() if (field.alias or key) == name)
    yield from models_in(field.annotation)


def without_tags(title: str, place: Sequence[int | str]) -> tuple[int | str, ...]:
    """A place in the body with this title, without the `type` that pydantic writes after the field of a union."""
    models, kept, tagged = {body for body in PATHS if body.__name__ == title}, list[int | str](), False
    for part in place:
        if tagged and isinstance(part, str) and not FORM.search(part):
            tagged = False
            continue
        kept.append(part)
        fields = [one for model in models for name, one in model.model_fields.items() if (one.alias or name) == part]
        if fields:
            models = {model for one in fields for model in models_in(one.annotation)}
            tagged = any(has_tags(each) for one in fields for each in (one, one.annotation))
    return tuple(kept)


def has_tags(annotation: Any) -> bool:
    """Whether the kind of an object is chosen by one of its fields."""
    if isinstance(annotation, FieldInfo):
        return annotation.discriminator is not None
    given = (*typing.get_args(annotation), *getattr(annotation, "__metadata__", ()))
    return any(has_tags(each) for each in given)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """All models in a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from models_in(part)
