"""Which tools an answer may or must call, and the schema of a call that is required."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .limits import APIError
from .request_bodies import AllowedTools, ChatRequest, ChosenTool, Tool

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def allowed_tools(body: ChatRequest) -> list[Tool]:
    """Tools that the model is told of; those that may be called."""
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        return named(body, [tool.function.name for tool in choice.allowed_tools.tools])
    return [] if choice == "none" else body.tools or []


def named(body: ChatRequest, names: Sequence[str] | None) -> list[Tool]:
    """The tools of these names, or (None) all."""
    tools = body.tools or []
    if not tools:
        raise APIError(400, "invalid_request", "tool_choice: there are no tools to choose from", "tool_choice")
    known = {tool.function.name for tool in tools}
    if names is not None and not (names and known.issuperset(names)):
        raise APIError(400, "invalid_request", "tool_choice names a tool that is not in tools", "tool_choice")
    return tools if names is None else [tool for tool in tools if tool.function.name in names]


def required_tools(body: ChatRequest) -> list[Tool]:
    """Tools of which one must be called; [] if the model may choose, or has none."""
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        return allowed_tools(body) if choice.allowed_tools.mode == "required" else []
    if choice in (None, "none", "auto"):
        return []
    return named(body, [choice.function.name]) if isinstance(choice, ChosenTool) else named(body, None)


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """The JSON schema of a call of one of these tools."""
    calls, ids = [], set[str]()
    for tool in tools:
        arguments = with_own_id(tool.function.parameters or ANY_OBJECT, ids)
        properties = {"name": {"const": tool.function.name}, "arguments": arguments}
        calls.append(ANY_OBJECT | {"properties": properties, "required": [*properties], "additionalProperties": False})
    return {"anyOf": calls}


def with_own_id(schema: dict[str, Any], ids: set[str]) -> dict[str, Any]:
    """A schema inside another, as a resource with an id of its own: `#` in its references is then the schema itself,
    not the whole, and no other schema's definitions are meant. Of two that bring the same id, the second gets another.
    """
    own = schema.get("$id")
    if not isinstance(own, str) or own in ids:
        own = f"urn:lmworks:tool:{len(ids)}"
    ids.add(own)
    found = schema | {"$id": own}
    if "draft-04" in str(found.get("$schema")):  # which knows no $id
        del found["$schema"]
    return found
