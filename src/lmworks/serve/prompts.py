"""Prompts as token ids: texts through the tokenizer, conversations through the chat template.

Short inputs are processed here, long ones in a worker process (`serve.workers`): `tokenize_prompt` decides.

`/tokenize`, `/detokenize`, `/tokenizer_info`: the model's tokenizer for clients without one, lm-eval among them.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ..data.chat_template import GENERATED, Chat, read_config, template_folder, token_text
from ..data.chat_template import Message as TemplateMessage
from ..data.tokenizer import FILE_TOKENS, ByteTokenizer
from . import sse
from .backend import PromptTokenizer
from .body import read_body
from .limits import APIError
from .request_bodies import ChatRequest, DetokenizeRequest, Message, TokenizeRequest
from .response_bodies import TokenizerInfo
from .serving import Caller, LocalModel, Serving, Upstream
from .tool_choice import allowed_tools
from .workers import PromptProcessor

MAX_INLINE = 8192  # characters or tokens that are encoded in a few milliseconds
MAX_INLINE_MESSAGES = 64
MAX_PROMPT_END = 64  # characters
THINKING = ("enable_thinking", "thinking")  # what templates call the switch
KEPT = ("name", "tool_call_id", "reasoning_content", "reasoning")  # fields of a message that templates read
ROLES = {"developer": "system"}  # newer names of roles → the names in chat templates

Found = TypeVar("Found")
Ids = Sequence[int]


@dataclass(frozen=True)
class Pair:
    """Two texts that are scored together."""

    first: str
    second: str

    def __len__(self) -> int:
        return len(self.first) + len(self.second)


Prompt = str | Pair | Ids
Special = tuple[bool | None, bool]  # add_special_tokens, parse_special
Markers = tuple[str | None, str | None]  # before and after the reasoning
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
    processor: PromptProcessor, prompts: Sequence[Prompt], known: int, echo: bool, special: Special, most: int | None
) -> tuple[list[str], list[Ids], int]:
    """Prompts as texts (if they are echoed) and as ids, and how many ids were tokenized here. `most`: of the ids, so
    many of the last are kept."""
    ids = [token_ids(processor.prompt_tokenizer, one, special) for one in prompts]
    made = sum(len(found) for one, found in zip(prompts, ids, strict=True) if isinstance(one, str | Pair))
    whole = [most is None or len(found) <= most for found in ids]
    ids = [found if complete else found[-(most or 0) :] for found, complete in zip(ids, whole, strict=True)]
    if not echo:
        return [], ids, made
    check_tokens(ids, known, "prompt")
    texts = [
        one if isinstance(one, str) and complete else processor.prompt_tokenizer.decode(list(found))
        for one, found, complete in zip(prompts, ids, whole, strict=True)
    ]
    return texts, ids, made


def token_ids(tokenizer: PromptTokenizer, prompt: Prompt, special: Special) -> Ids:
    if isinstance(prompt, Pair):
        return array("i", tokenizer.encode_pair(prompt.first, prompt.second, special[0]))
    return array("i", tokenizer.encode(prompt, *special)) if isinstance(prompt, str) else prompt


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
    """Characters of all that a template may write. Tool calls and many messages count as long."""
    if len(body.messages or ()) > MAX_INLINE_MESSAGES or any(message.tool_calls for message in body.messages or ()):
        return MAX_INLINE + 1
    return characters([body.messages, body.tools, body.chat_template_kwargs], MAX_INLINE)


def characters(found: Any, most: int) -> int:
    """Characters and values in it. Not counted on beyond `most`: a schema may hold a million values."""
    size, waiting = 0, [found]
    while waiting and size <= most:
        one = waiting.pop()
        if isinstance(one, BaseModel):
            one = list(one.__dict__.values())
        size += len(one) if isinstance(one, str | list | dict) else 1
        if size <= most and isinstance(one, list | dict):
            waiting += [*one, *one.values()] if isinstance(one, dict) else one
    return size


def render_chat(
    processor: PromptProcessor, body: Conversation, markers: Markers = (None, None), structured: bool = False
) -> tuple[Ids, str]:
    """The prompt, and its end, which tells whether the answer begins with reasoning (between these markers).

    `structured`: the answer has a structure, which begins after the reasoning. Where the template leaves it to the
    model whether to reason, the prompt asks it to.
    """
    messages = [template_message(message) for message in body.messages or ()]
    offered = allowed_tools(body) if isinstance(body, ChatRequest) else body.tools or []
    tools = [tool.model_dump(exclude_none=True) for tool in offered]
    variables, (opening, closing) = template_variables(body, processor.chat.templated), markers
    if body.continue_final_message:
        text = continued(processor.chat, messages, tools, variables)
        said = messages[-1]["content"]
        inside = opening is not None and said.rfind(opening) > said.rfind(closing or opening)
        end = (opening if inside else closing) or ""
    else:
        text = processor.chat.render(messages, tools, variables)
        if structured and opening and not text.rstrip().endswith((opening, closing or opening)):
            text += opening
        end = text[-MAX_PROMPT_END:]
    if body.add_special_tokens is None:
        ids = array("i", processor.chat.encode(text))
    else:
        parse = processor.chat.templated
        ids = array("i", processor.prompt_tokenizer.encode(text, body.add_special_tokens, parse_special=parse))
    return ids, end


def render_chat_json(processor: PromptProcessor, body: Conversation) -> tuple[int, bytes]:
    ids = list(render_chat(processor, body)[0])
    return len(ids), json.dumps(ids).encode()


def template_variables(body: Conversation, templated: bool) -> dict[str, Any]:
    """What the caller sets by name goes before what a field of the request implies."""
    found: dict[str, Any] = {}
    effort = body.reasoning_effort if isinstance(body, ChatRequest) and templated else None
    if effort is not None:
        found |= {"reasoning_effort": effort}
    if effort == "none":
        found |= dict.fromkeys(THINKING, False)
    generation = body.add_generation_prompt
    if body.continue_final_message:
        if generation:
            message = "continue_final_message goes on with the last message: add_generation_prompt must be false"
            raise APIError(400, "invalid_request", message, "add_generation_prompt")
        generation = False
    if generation is not None:
        found |= {"add_generation_prompt": generation}
    return found | (body.chat_template_kwargs or {})


def continued(chat: Chat, messages: list[TemplateMessage], tools: list[Any], variables: dict[str, Any]) -> str:
    """A prompt that ends in the last message. A mark behind it shows where that is: templates add what ends a turn."""
    last, mark = dict(messages[-1]), GENERATED[0]
    if not chat.templated:
        message = "this model has no chat template, and no form of a message that is open"
        raise APIError(400, "invalid_request", message, "continue_final_message")
    if last.get("tool_calls") or not last["content"]:
        message = "the last message has tool calls, or no content, to go on with"
        raise APIError(400, "invalid_request", message, "continue_final_message")
    marked = [*messages[:-1], last | {"content": last["content"] + mark}]
    text, found, _ = chat.render(marked, tools, variables).rpartition(mark)
    if not found:
        message = "the chat template does not write the last message as it is"
        raise APIError(400, "invalid_request", message, "continue_final_message")
    return text


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
    return messages | {name: value for name in KEPT if (value := getattr(message, name)) is not None}


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
        "chat_template": prompt_tokenizer.template_source(),
    }
