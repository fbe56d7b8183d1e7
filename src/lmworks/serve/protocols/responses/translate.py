"""A request of the Responses API as a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...limits import APIError, Limits
from ...request_bodies import ChatRequest
from .bodies import (
    AllowedFunctions,
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    MessageItem,
    NamedFunction,
    Parts,
    ReasoningItem,
    ResponsesRequest,
    TextSchema,
)

SCHEMA_FIELD = "text.format.schema"


def chat_request(body: ResponsesRequest, items: Sequence[InputItem], limits: Limits) -> ChatRequest:
    """`items`: of earlier responses, and of this one."""
    if len(items) > limits.messages:
        message = f"input and earlier responses have {len(items)} items: at most {limits.messages} are allowed"
        raise APIError(400, "limit_exceeded", message, "input")
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    wanted: dict[str, Any] = {
        "model": body.model,
        "messages": system + chat_messages(items),
        "max_completion_tokens": body.max_output_tokens,
        "cache_salt": body.cache_salt,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": [function_tool({name: value for name, value in tool if name != "type"}) for tool in body.tools or ()]
        or None,
        "tool_choice": tool_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": response_format(body),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "chat_template_kwargs": {"verbosity": body.text.verbosity} if body.text and body.text.verbosity else None,
        "stream": body.stream,
        "continuation": body.continuation,
    }
    return ChatRequest.model_validate({name: value for name, value in wanted.items() if value is not None})


def chat_messages(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Reasoning, text and calls of one turn are one message."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for item in items:
        is_answer = isinstance(item, ReasoningItem | FunctionCallItem) or (
            isinstance(item, MessageItem) and item.role == "assistant"
        )
        if not is_answer:
            turn = None
        elif turn is None or (isinstance(item, ReasoningItem) and ("content" in turn or "tool_calls" in turn)):
            turn = {"role": "assistant"}
            messages.append(turn)
        if isinstance(item, FunctionOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        elif turn is None:
            assert isinstance(item, MessageItem)
            messages.append({"role": item.role, "content": text_of(item.content)})
        elif isinstance(item, ReasoningItem):
            turn.setdefault("reasoning_content", []).append(text_of(item.content or item.summary or []))
        elif isinstance(item, FunctionCallItem):
            function = {"name": item.name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        else:
            turn.setdefault("content", []).append(text_of(item.content))
    return [one if "content" in one or "tool_calls" in one else one | {"content": ""} for one in map(joined, messages)]


def joined(message: dict[str, Any]) -> dict[str, Any]:
    """Texts that came in pieces. All at once: to add each to those before would copy these again and again."""
    pieces = {name: found for name in ("content", "reasoning_content") if isinstance(found := message.get(name), list)}
    return message | {name: "".join(found) for name, found in pieces.items()}


def text_of(content: str | Parts) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if part.type == "refusal" else part.text for part in content)


def function_tool(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def tool_choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    if isinstance(choice, NamedFunction):
        return function_tool({"name": choice.name})
    if isinstance(choice, AllowedFunctions):
        tools = [function_tool({"name": tool.name}) for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    wanted = body.text.format if body.text else None
    if wanted is None:
        return None
    if not isinstance(wanted, TextSchema):
        return {"type": wanted.type}
    schema = {"name": wanted.name, "schema": wanted.schema_}
    return {"type": "json_schema", "json_schema": schema}
