"""A request of the Messages API as a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...limits import APIError
from ...request_bodies import ChatRequest
from .bodies import (
    AnyBlock,
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

SCHEMA_FIELD = "output_config.format.schema"
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(body: CountTokensRequest) -> ChatRequest:
    system = body.system if isinstance(body.system, str) else "\n".join(block.text for block in body.system or ())
    messages = [{"role": "system", "content": system}] if system else []
    for message in body.messages:
        messages += chat_messages(message)
    choice = body.tool_choice
    wanted: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "tools": [chat_tool(tool.name, tool.description, tool.input_schema) for tool in body.tools or ()] or None,
        "tool_choice": tool_choice(body),
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "reasoning_effort": effort(body),
        "response_format": response_format(body),
        "continue_final_message": body.messages[-1].role == "assistant" or None,
    }
    if isinstance(body, MessagesRequest):
        wanted |= {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "continuation": body.continuation,
            "cache_salt": body.cache_salt,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    return ChatRequest.model_validate({name: value for name, value in wanted.items() if value is not None})


def chat_messages(message: MessageParam) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before the text that came with them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    blocks = message.content
    if message.role == "assistant":
        return [assistant_message(blocks)]
    wrong = next((block for block in blocks if not isinstance(block, TextBlock | ToolResultBlock)), None)
    if wrong is not None:
        raise APIError(400, "invalid_request", f"a user's message holds a block of type {wrong.type}", "messages")
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": result_text(block)}
        for block in blocks
        if isinstance(block, ToolResultBlock)
    ]
    text = [block.text for block in blocks if isinstance(block, TextBlock)]
    return results + ([{"role": "user", "content": "".join(text)}] if text or not results else [])


def assistant_message(blocks: Sequence[AnyBlock]) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant"}
    text: list[str] = []
    thinking: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            text.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thinking.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            found.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
        else:
            raise APIError(400, "invalid_request", "an assistant's message holds a tool_result", "messages")
    return found | {"content": "".join(text)} | ({"reasoning_content": "".join(thinking)} if thinking else {})


def result_text(block: ToolResultBlock) -> str:
    content = block.content or ""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def chat_tool(name: str, description: str | None, schema: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "parameters": schema} | ({"description": description} if description else {})
    return {"type": "function", "function": function}


def tool_choice(body: CountTokensRequest) -> Any:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return CHOICES[choice.type]
    if choice.name is None:
        raise APIError(400, "invalid_request", "tool_choice of type tool needs a name", "tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def effort(body: CountTokensRequest) -> str | None:
    if body.thinking is not None and body.thinking.type == "disabled":
        return "none"
    return body.output_config.effort if body.output_config else None


def response_format(body: CountTokensRequest) -> dict[str, Any] | None:
    wanted = body.output_config.format if body.output_config else None
    schema = {"name": "output", "schema": wanted.schema_} if wanted else None
    return {"type": "json_schema", "json_schema": schema} if schema else None
