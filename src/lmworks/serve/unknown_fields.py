"""A field of a request that is not known: which one was probably meant."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from ..spec.errors import near_names, suggestion
from .openai_types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

PATHS: dict[type[BaseModel], str] = {
    ChatRequest: "/v1/chat/completions",
    CompletionRequest: "/v1/completions",
    TokenizeRequest: "/tokenize",
    DetokenizeRequest: "/detokenize",
}
LONGEST = 80  # letters of a name that is compared with others
# What older versions of the API, other servers and templates call it.
OTHER_NAMES = {
    "max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "max_length": "max_tokens",
    "functions": "tools", "function_call": "tool_choice", "structured_outputs": "response_format",
    "json_schema": "response_format", "enable_thinking": "chat_template_kwargs", "num_return_sequences": "n",
    "random_seed": "seed",
}  # fmt: skip


def hint(title: str, place: Sequence[int | str]) -> str:
    """For a body that pydantic knows by its title, and the place of a field in it."""
    body = next((each for each in PATHS if each.__name__ == title), None)
    if body is None or not place or len(str(place[-1])) > LONGEST:
        return ""
    name, known = str(place[-1]), sorted({field for model in models_at(body, place) for field in names(model)})
    if OTHER_NAMES.get(name) in known:
        return suggestion([OTHER_NAMES[name]])
    elsewhere = [path for other, path in PATHS.items() if len(place) == 1 and name in names(other)]
    return f"; {elsewhere[0]} has it" if elsewhere else suggestion(near_names(name, known)[:2])


def models_at(body: type[BaseModel], place: Sequence[int | str]) -> set[type[BaseModel]]:
    """Those that may stand there. Parts of a place that are no field's name say which form of a field was meant."""
    found = {body}
    for part in place[:-1]:
        inside = {inner for model in found if part in names(model) for inner in inner_models(model, str(part))}
        found = inside or {model for model in found if model.__name__ == part} or found
    return found


def names(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def inner_models(model: type[BaseModel], name: str) -> Iterator[type[BaseModel]]:
    field = next(field for key, field in model.model_fields.items() if (field.alias or key) == name)
    yield from within(field.annotation)


def within(annotation: Any) -> Iterator[type[BaseModel]]:
    """All models in a type, however it is put together."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from within(part)
