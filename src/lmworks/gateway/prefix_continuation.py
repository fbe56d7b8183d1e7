"""Streams of servers that do not name their tokens, continued on one that takes the text so far as a prefix.

Only where the text says all that was sent: one answer of plain text. The next server is given the prompt and the text,
or the conversation with an unfinished last message, and at most as many tokens as are left, counted by events.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .exchange import Exchange
from .servers import Server
from .stream_events import EventFields

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
# Fields with which the text is not all that a server must know, or not all that its client was sent.
BEYOND_TEXT = {
    *("tools", "functions", "response_format", "structured_outputs", "logprobs", "top_logprobs", "echo", "suffix"),
    *("best_of", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "return_token_ids", "min_tokens"),
}
# How servers are told to go on with the last message; vLLM, SGLang and ours take these fields, llama.cpp does unasked.
PREFILL: dict[str, dict[str, Any]] = {
    "lmworks": {"continue_final_message": True, "add_generation_prompt": False},
    "vllm": {"continue_final_message": True, "add_generation_prompt": False},
    "sglang": {"continue_final_message": True},
    "llamacpp": {},
}
LIMITS = ("max_completion_tokens", "max_tokens")


def takes_prefix(server: Server, exchange: Exchange) -> bool:
    body = exchange.body
    if BEYOND_TEXT & body.fields.keys() or body.get("n") not in (None, 1):
        return False
    if exchange.path == COMPLETIONS:
        return isinstance(body.get("prompt"), str)
    return exchange.path == CHATS and server.pool.kind in PREFILL and isinstance(body.get("messages"), list)


def continued(server: Server, exchange: Exchange, text: str, events: int) -> dict[str, Any]:
    """Fields of the request that are different."""
    body = exchange.body
    found: dict[str, Any] = {
        name: max(1, limit - events)
        for name in LIMITS
        if name in body.fields and isinstance(limit := body.get(name), int)
    }
    if not text:
        return found
    if exchange.path == COMPLETIONS:
        return found | {"prompt": body.get("prompt") + text}
    messages = [*body.get("messages"), {"role": "assistant", "content": text}]
    return found | {"messages": messages} | PREFILL[server.pool.kind]


def is_text(fields: EventFields) -> bool:
    """Whether an event's text is all that it says."""
    return all(
        one.index == 0 and (one.delta is None or not (one.delta.tool_calls or one.delta.reasoning_content))
        for one in fields.choices
    )


def rewritten(raw: bytes, identity: dict[str, Any], events: int) -> bytes:
    """An event of the second server under the first one's name, its usage as if one had answered it all."""
    event = msgspec.json.decode(raw.partition(b"data:")[2])
    event |= identity
    usage = event.get("usage")
    if usage:
        usage["completion_tokens"] += events
        usage["prompt_tokens"] -= events
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
