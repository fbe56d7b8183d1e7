"""Tool calls: parsed from a model's text, or enforced by a grammar.

A model whose chat template knows tools writes `<tool_call>{"name": …, "arguments": {…}}</tool_call>` when it chooses
to. Where a call is required, the answer is held to a JSON schema instead, and is the call itself.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engine.core.detokenizer import possible_start
from .limits import APIError
from .openai_answers import ToolCall
from .openai_types import ChatRequest, ChosenTool, Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def tool_call(name: str, arguments: str) -> ToolCall:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def parse_call(text: str) -> ToolCall | None:
    """None: not a call."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    return tool_call(
        found["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )


# --- a call that must be made -----------------------------------------------------------------------------


def required_tools(body: ChatRequest) -> list[Tool]:
    """Tools of which one must be called; none: the model chooses, or has none."""
    tools, choice = body.tools or [], body.tool_choice
    if choice in (None, "none", "auto"):
        return []
    if isinstance(choice, ChosenTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    if not tools:
        raise APIError(400, "invalid_request", "tool_choice asks for a tool that tools does not hold", "tool_choice")
    return tools


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """What a call of one of them looks like."""
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


# --- a call that may be made ------------------------------------------------------------------------------


@dataclass
class ToolCallParser:
    """Separates tool calls from text in a stream. An invalid call is passed on as text."""

    required: bool = False  # the answer is a call, and nothing else
    most: int | None = None  # calls that are wanted
    made: int = 0
    waiting: str = ""
    pieces: list[str] = field(default_factory=list)

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Text that may be shown, and calls that are complete."""
        self.waiting += text
        if self.required:
            return "", []
        shown, calls = "", list[ToolCall]()
        while OPEN in self.waiting:
            before, _, rest = self.waiting.partition(OPEN)
            inner, close, after = rest.partition(CLOSE)
            if not close:
                shown += before
                self.waiting = OPEN + rest
                return shown, calls
            call = parse_call(inner)
            shown += before if call else before + OPEN + inner + CLOSE
            calls += self.counted(call)
            self.waiting = after.lstrip("\n") if call else after
        keep = possible_start(self.waiting, (OPEN,))
        shown += self.waiting[: len(self.waiting) - keep]
        self.waiting = self.waiting[len(self.waiting) - keep :]
        return shown, calls

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The answer has ended."""
        rest, self.waiting = self.waiting, ""
        call = parse_call(rest.removeprefix(OPEN)) if self.required or rest.startswith(OPEN) else None
        return ("", self.counted(call)) if call else (rest, [])

    def counted(self, call: ToolCall | None) -> list[ToolCall]:
        if call is None or (self.most is not None and self.made >= self.most):
            return []
        self.made += 1
        return [call]
