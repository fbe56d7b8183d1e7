"""Prompts as token ids: texts through the tokenizer, conversations through the chat template.

Each function runs in this process where there is little to do, and in a worker process (`serve.workers`) where there is
much: `prompted` decides.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..engine.chat_template import Message as Said
from .limits import Refusal
from .openai_types import ChatRequest, Message, TokenizeRequest
from .serving import Caller, Local, Serving
from .workers import Speech

SHORT = 8192  # characters or tokens that are encoded in a few milliseconds
FEW = 64  # messages
ROLES = {"developer": "system"}  # newer names of older roles, which templates know

Found = TypeVar("Found")
Ids = Sequence[int]
Special = tuple[bool | None, bool]  # add_special_tokens, parse_special
Conversation = ChatRequest | TokenizeRequest


async def prompted(
    serving: Serving, caller: Caller, local: Local, size: int, work: Callable[..., Found], *given: Any
) -> Found:
    """`work(speech, *given)`, where it does not hold up others. `size`: characters, or tokens."""
    if size <= SHORT:
        return work(local.speech, *given)
    return await serving.workers.run(caller.key.name, local.speech, work, *given)


# --- texts ------------------------------------------------------------------------------------------------


def encode(
    speech: Speech, prompts: list[str | Ids], known: int, echo: bool, special: Special
) -> tuple[list[str], list[Ids], int]:
    """Prompts as texts (where they are to be echoed) and as ids, and how many of those were made here."""
    ids: list[Ids] = [
        array("i", speech.words.encode(one, *special)) if isinstance(one, str) else one for one in prompts
    ]
    made = sum(len(found) for one, found in zip(prompts, ids, strict=True) if isinstance(one, str))
    if not echo:
        return [], ids, made
    check_tokens(ids, known, "prompt")
    return [one if isinstance(one, str) else speech.words.decode(list(one)) for one in prompts], ids, made


def check_tokens(prompts: list[Ids], known: int, param: str) -> None:
    if any(one and max(one) >= known for one in prompts):
        raise Refusal(400, "invalid_request", f"{param} holds a token that is not below {known}", param)


def encoded_text(speech: Speech, text: str, special: Special) -> tuple[int, bytes]:
    """How many ids, and the ids as JSON: to make that of a million takes as long as to encode them."""
    ids = speech.words.encode(text, *special)
    return len(ids), json.dumps(ids).encode()


def decode(speech: Speech, tokens: Ids, known: int) -> str:
    check_tokens([tokens], known, "tokens")
    return speech.words.decode(list(tokens))


# --- conversations ----------------------------------------------------------------------------------------


def size_of_chat(body: Conversation) -> int:
    """What `prompted` goes by. Tools, calls and many messages go to another process."""
    if len(body.messages or ()) > FEW or any(message.tool_calls for message in body.messages or ()):
        return SHORT + 1
    others = [*(body.tools or ())[:FEW], body.chat_template_kwargs or ""]
    return sum(map(length, body.messages or ())) + sum(len(str(one)) for one in others)


def length(message: Message) -> int:
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(len(part.text) for part in content)


def converse(speech: Speech, body: Conversation) -> Ids:
    said = [spoken(message) for message in body.messages or ()]
    unwanted = isinstance(body, ChatRequest) and body.tool_choice == "none"
    tools = [] if unwanted else [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    text = speech.chat.render(said, tools, body.chat_template_kwargs or {})
    if body.add_special_tokens is None:
        return array("i", speech.chat.encode(text))
    return array("i", speech.words.encode(text, body.add_special_tokens, parse_special=speech.chat.templated))


def conversed_text(speech: Speech, body: Conversation) -> tuple[int, bytes]:
    ids = list(converse(speech, body))
    return len(ids), json.dumps(ids).encode()


def spoken(message: Message) -> Said:
    """As chat templates know it."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None and not message.tool_calls:
        raise Refusal(400, "invalid_request", f"a message of the role {message.role!r} has no content", "messages")
    said: dict[str, Any] = {"role": ROLES.get(message.role, message.role), "content": content or ""}
    if message.tool_calls:
        said["tool_calls"] = [call.model_dump() | {"function": called(call.function)} for call in message.tool_calls]
    return said | {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name)) is not None}


def called(function: Any) -> dict[str, Any]:
    """Templates write arguments as JSON: they want them as values, not as text."""
    try:
        arguments = json.loads(function.arguments)
    except (ValueError, RecursionError):
        raise Refusal(400, "invalid_request", "arguments of an earlier tool call are not JSON", "messages") from None
    return {"name": function.name, "arguments": arguments}
