"""Prompts as token ids: texts through the tokenizer, conversations through the chat template.

Short inputs are processed here, long ones in a worker process (`serve.workers`): `tokenize_prompt` decides.

`/tokenize`, `/detokenize`, `/tokenizer_info`: the model's tokenizer for clients without one, lm-eval among them.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ..data.chat_template import Message as TemplateMessage
from ..data.chat_template import find_template, read_config, template_folder, token_text
from ..data.tokenizer import FILE_TOKENS, ByteTokenizer
from . import sse
from .body import read_body
from .limits import APIError
from .request_bodies import ChatRequest, DetokenizeRequest, Message, TokenizeRequest
from .response_bodies import TokenizerInfo
from .serving import Caller, LocalModel, Serving, Upstream
from .workers import PromptProcessor

MAX_INLINE = 8192  # characters or tokens that are encoded in a few milliseconds
MAX_INLINE_MESSAGES = 64
ROLES = {"developer": "system"}  # newer names of roles → the names in chat templates

Found = TypeVar("Found")
Ids = Sequence[int]
Special = tuple[bool | None, bool]  # add_special_tokens, parse_special
Conversation = ChatRequest | TokenizeRequest


async def tokenize_prompt(
    serving: Serving, caller: Caller, local: LocalModel, size: int, work: Callable[..., Found], *arguments: Any
) -> Found:
    """`work(processor, *arguments)`, in a worker process where `size` (characters or tokens) is large."""
    if size <= MAX_INLINE:
        return work(local.processor, *arguments)
    return await serving.workers.run(caller.key.name, local.processor, work, *arguments)


# --- texts ------------------------------------------------------------------------------------------------


def encode(
    processor: PromptProcessor, prompts: list[str | Ids], known: int, echo: bool, special: Special
) -> tuple[list[str], list[Ids], int]:
    """Prompts as texts (if they are echoed) and as ids, and how many ids were tokenized here."""
    ids: list[Ids] = [
        array("i", processor.prompt_tokenizer.encode(one, *special)) if isinstance(one, str) else one for one in prompts
    ]
    made = sum(len(found) for one, found in zip(prompts, ids, strict=True) if isinstance(one, str))
    if not echo:
        return [], ids, made
    check_tokens(ids, known, "prompt")
    return [one if isinstance(one, str) else processor.prompt_tokenizer.decode(list(one)) for one in prompts], ids, made


def encode_infilling(
    processor: PromptProcessor, prompts: list[str | Ids], suffix: str, special: Special
) -> tuple[list[Ids], int]:
    """Prompts for the text between each of these and the suffix, and how many ids were tokenized here.

    Other files of a repository, up to the last token that begins a file, stay before the sentinels, as in training.
    """
    tokenizer, sentinels = processor.prompt_tokenizer, processor.prompt_tokenizer.sentinels
    if sentinels is None:
        message = f"{processor.name} has no tokens that mark a prefix and a suffix: it was not trained to infill"
        raise APIError(400, "invalid_request", message, "suffix")
    add, parse = special
    before = tokenizer.encode("", add)
    after = tokenizer.encode(suffix, False, parse)
    given: list[Ids] = [tokenizer.encode(one, False, parse) if isinstance(one, str) else one for one in prompts]
    made = sum(len(ids) for one, ids in zip(prompts, given, strict=True) if isinstance(one, str))
    marks = {tokenizer.require_tokenizer().token_id(name) for name in FILE_TOKENS}
    ids: list[Ids] = []
    for one in given:
        begin = next((at for at in range(len(one), 0, -1) if one[at - 1] in marks), 0)
        ids.append(array("i", [*before, *one[:begin], *sentinels.prompt(list(one[begin:]), after)]))
    return ids, made + len(after)


def check_tokens(prompts: list[Ids], known: int, param: str) -> None:
    if any(one and max(one) >= known for one in prompts):
        raise APIError(400, "invalid_request", f"{param} holds a token that is not below {known}", param)


def encode_json(processor: PromptProcessor, text: str, special: Special) -> tuple[int, bytes]:
    """The number of ids, and the ids as JSON: for a million, encoding JSON takes as long as tokenizing."""
    ids = processor.prompt_tokenizer.encode(text, *special)
    return len(ids), json.dumps(ids).encode()


def decode(processor: PromptProcessor, tokens: Ids, known: int) -> str:
    check_tokens([tokens], known, "tokens")
    return processor.prompt_tokenizer.decode(list(tokens))


# --- conversations ----------------------------------------------------------------------------------------


def chat_size(body: Conversation) -> int:
    """Characters of a conversation. Tool calls and many messages count as long."""
    if len(body.messages or ()) > MAX_INLINE_MESSAGES or any(message.tool_calls for message in body.messages or ()):
        return MAX_INLINE + 1
    others = [*(body.tools or ())[:MAX_INLINE_MESSAGES], body.chat_template_kwargs or ""]
    return sum(map(text_length, body.messages or ())) + sum(len(str(one)) for one in others)


def text_length(message: Message) -> int:
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(len(part.text) for part in content)


def render_chat(processor: PromptProcessor, body: Conversation) -> Ids:
    messages = [template_message(message) for message in body.messages or ()]
    unwanted = isinstance(body, ChatRequest) and body.tool_choice == "none"
    tools = [] if unwanted else [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    text = processor.chat.render(messages, tools, body.chat_template_kwargs or {})
    if body.add_special_tokens is None:
        return array("i", processor.chat.encode(text))
    return array(
        "i", processor.prompt_tokenizer.encode(text, body.add_special_tokens, parse_special=processor.chat.templated)
    )


def render_chat_json(processor: PromptProcessor, body: Conversation) -> tuple[int, bytes]:
    ids = list(render_chat(processor, body))
    return len(ids), json.dumps(ids).encode()


def template_message(message: Message) -> TemplateMessage:
    """In the form that chat templates expect."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None and not message.tool_calls:
        raise APIError(400, "invalid_request", f"a message of the role {message.role!r} has no content", "messages")
    messages: dict[str, Any] = {"role": ROLES.get(message.role, message.role), "content": content or ""}
    if message.tool_calls:
        messages["tool_calls"] = [
            call.model_dump() | {"function": function_call(call.function)} for call in message.tool_calls
        ]
    return messages | {
        name: value for name in ("name", "tool_call_id") if (value := getattr(message, name)) is not None
    }


def function_call(function: Any) -> dict[str, Any]:
    """Templates write arguments as JSON: they want them as values, not as text."""
    try:
        arguments = json.loads(function.arguments)
    except (ValueError, RecursionError):
        raise APIError(400, "invalid_request", "arguments of an earlier tool call are not JSON", "messages") from None
    return {"name": function.name, "arguments": arguments}


# --- tokenize --------------------------------------------------------------------------------------------


def local_model(serving: Serving, caller: Caller, name: str | None) -> LocalModel:
    model, _ = serving.find(caller, name)
    if isinstance(model, Upstream):
        raise APIError(404, "not_supported", "the tokenizer of this model is on an upstream server", "model")
    return model


async def tokenize(serving: Serving, request: Request) -> Response:
    caller = serving.authenticate(request)
    body, _ = await read_body(serving, request, caller, TokenizeRequest)
    local = local_model(serving, caller, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "invalid_request", "give either prompt or messages", "prompt")
    if body.messages is not None:
        count, ids = await tokenize_prompt(serving, caller, local, chat_size(body), render_chat_json, body)
    elif (text := body.prompt or "") == end_of_text(local):
        count, ids = 1, f"[{local.backend.prompt_tokenizer.require_tokenizer().eot}]".encode()
    else:
        special = (body.add_special_tokens, bool(body.parse_special))
        count, ids = await tokenize_prompt(serving, caller, local, len(text), encode_json, text, special)
    caller.meter.charge_prompt(count)
    head = f'{{"count":{count},"max_model_len":{local.backend.card.context},"tokens":'.encode()
    return Response(head + ids + b"}", media_type="application/json")


def end_of_text(local: LocalModel) -> str:
    """A prompt that is just this token's name is the token: clients learn its id. Within a text it is text."""
    return local.token_texts.text(local.backend.prompt_tokenizer.require_tokenizer().eot)


async def detokenize(serving: Serving, request: Request) -> Response:
    caller = serving.authenticate(request)
    body, _ = await read_body(serving, request, caller, DetokenizeRequest)
    local = local_model(serving, caller, body.model)
    known = local.backend.card.vocab
    text = await tokenize_prompt(serving, caller, local, len(body.tokens), decode, body.tokens, known)
    caller.meter.charge_prompt(len(body.tokens))
    return Response(sse.encode({"prompt": text}), media_type="application/json")


def tokenizer_info(serving: Serving, request: Request, model: str | None) -> TokenizerInfo:
    local = local_model(serving, serving.authenticate(request), model)
    prompt_tokenizer = local.backend.prompt_tokenizer
    tokenizer = prompt_tokenizer.require_tokenizer()
    folder = template_folder(prompt_tokenizer.folder) if prompt_tokenizer.folder else None
    config = read_config(folder) if folder else {}
    names = {name: token_text(config[name]) if config.get(name) else None for name in ("bos_token", "pad_token")}
    return {
        "tokenizer_class": "bytes" if isinstance(tokenizer, ByteTokenizer) else "tokenizer.json",
        "vocab_size": tokenizer.vocab_size,
        "eos_token": local.token_texts.text(tokenizer.eot),
        "bos_token": names["bos_token"],
        "pad_token": names["pad_token"],
        "chat_template": prompt_tokenizer.chat_template or (find_template(folder, config) if folder else None),
    }
