"""Tool calls in the text of a turn: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Qwen and Hermes models
write them, and as the server reads them."""

from __future__ import annotations

import json
from typing import Any

from ...data.chat_template import TOOL_CALL, Message, Tools
from .environment import ToolCall, Turn

OPEN, CLOSE = TOOL_CALL
HOW = f"""You may call these functions:
{{tools}}
A call is a JSON object between tags, one for each call:
{OPEN}{{{{"name": <name of the function>, "arguments": <object>}}}}{CLOSE}"""


def read_turn(text: str, cut: bool = False) -> Turn:
    said, calls, malformed = "", [], False
    rest = text
    while OPEN in rest:
        before, _, rest = rest.partition(OPEN)
        inner, _, rest = rest.partition(CLOSE)  # a call that is not closed ends with the text
        said += before
        call = read_call(inner)
        malformed |= call is None
        calls += [call] if call else []
    return Turn(said + rest, tuple(calls), malformed, cut)


def read_call(text: str) -> ToolCall | None:
    try:
        found = json.loads(text)
        arguments = found.get("arguments", {}) if isinstance(found, dict) else None
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict) or not isinstance(found.get("name"), str):
        return None
    return ToolCall(found["name"], arguments)


def assistant_message(turn: Turn) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if turn.tool_calls:
        called = [{"name": call.name, "arguments": call.arguments} for call in turn.tool_calls]
        message["tool_calls"] = [{"type": "function", "function": function} for function in called]
    return message


def tool_instructions(tools: Tools) -> str:
    """For models whose chat template does not show tools."""
    return HOW.format(tools="\n".join(json.dumps(tool) for tool in tools))


def function_tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """A function in OpenAI's format with required parameters, all of them texts."""
    properties = {one: {"type": "string", "description": what} for one, what in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
