"""`/tokenize`, `/detokenize`, `/tokenizer_info`: the model's tokenizer for clients without one, lm-eval among them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..data.tokenizer import ByteTokenizer
from ..engine.chat_template import find_template, read_config, token_text
from .body import read_body
from .limits import APIError
from .openai_answers import TokenizerInfo
from .openai_types import DetokenizeRequest, TokenizeRequest
from .prompts import chat_size, decode, encode_json, render_chat_json, tokenize_prompt
from .serving import Caller, LocalModel, Serving
from .sse import encode
from .upstream import Upstream


def local_model(serving: Serving, caller: Caller, name: str | None) -> LocalModel:
    model, _ = serving.find(caller, name)
    if isinstance(model, Upstream):
        raise APIError(404, "not_supported", "this model is behind another server, which has its tokenizer", "model")
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
    """The name of that token alone is the token: so clients learn its id. Within a text it is text."""
    return local.token_texts.text(local.backend.prompt_tokenizer.require_tokenizer().eot)


async def detokenize(serving: Serving, request: Request) -> Response:
    caller = serving.authenticate(request)
    body, _ = await read_body(serving, request, caller, DetokenizeRequest)
    local = local_model(serving, caller, body.model)
    known = local.backend.card.vocab
    text = await tokenize_prompt(serving, caller, local, len(body.tokens), decode, body.tokens, known)
    caller.meter.charge_prompt(len(body.tokens))
    return Response(encode({"prompt": text}), media_type="application/json")


def tokenizer_info(serving: Serving, request: Request, model: str | None) -> TokenizerInfo:
    local = local_model(serving, serving.authenticate(request), model)
    prompt_tokenizer = local.backend.prompt_tokenizer
    tokenizer = prompt_tokenizer.require_tokenizer()
    config = read_config(prompt_tokenizer.folder) if prompt_tokenizer.folder else {}
    names = {name: token_text(config[name]) if config.get(name) else None for name in ("bos_token", "pad_token")}
    return {
        "tokenizer_class": "bytes" if isinstance(tokenizer, ByteTokenizer) else "tokenizer.json",
        "vocab_size": tokenizer.vocab_size,
        "eos_token": local.token_texts.text(tokenizer.eot),
        "bos_token": names["bos_token"],
        "pad_token": names["pad_token"],
        "chat_template": prompt_tokenizer.chat_template
        or (find_template(prompt_tokenizer.folder, config) if prompt_tokenizer.folder else None),
    }
