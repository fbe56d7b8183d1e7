"""`/tokenize`, `/detokenize`, `/tokenizer_info`: the model's tokenizer for clients without one, lm-eval among them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..data.tokenizer import ByteTokenizer
from ..engine.chat_template import find_template, read_config, token_text
from .body import read_body
from .limits import Refusal
from .openai_answers import TokenizerInfo
from .openai_types import DetokenizeRequest, TokenizeRequest
from .prompts import conversed_text, decode, encoded_text, prompted, size_of_chat
from .serving import Caller, Local, Serving
from .sse import encode
from .upstream import Upstream


def ours(serving: Serving, caller: Caller, name: str | None) -> Local:
    model, _ = serving.find(caller, name)
    if isinstance(model, Upstream):
        raise Refusal(404, "not_supported", "this model is behind another server, which has its tokenizer", "model")
    return model


async def tokenize(serving: Serving, request: Request) -> Response:
    caller = serving.admit(request)
    body, _ = await read_body(serving, request, caller, TokenizeRequest)
    local = ours(serving, caller, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise Refusal(400, "invalid_request", "give either prompt or messages", "prompt")
    if body.messages is not None:
        count, ids = await prompted(serving, caller, local, size_of_chat(body), conversed_text, body)
    elif (text := body.prompt or "") == end_of_text(local):
        count, ids = 1, f"[{local.backend.words.known().eot}]".encode()
    else:
        special = (body.add_special_tokens, bool(body.parse_special))
        count, ids = await prompted(serving, caller, local, len(text), encoded_text, text, special)
    caller.visit.work(count)
    told = f'{{"count":{count},"max_model_len":{local.backend.card.context},"tokens":'.encode()
    return Response(told + ids + b"}", media_type="application/json")


def end_of_text(local: Local) -> str:
    """The name of that token alone is the token: so clients learn its id. Within a text it is text."""
    return local.token_texts.text(local.backend.words.known().eot)


async def detokenize(serving: Serving, request: Request) -> Response:
    caller = serving.admit(request)
    body, _ = await read_body(serving, request, caller, DetokenizeRequest)
    local = ours(serving, caller, body.model)
    known = local.backend.card.vocab
    text = await prompted(serving, caller, local, len(body.tokens), decode, body.tokens, known)
    caller.visit.work(len(body.tokens))
    return Response(encode({"prompt": text}), media_type="application/json")


def tokenizer_info(serving: Serving, request: Request, model: str | None) -> TokenizerInfo:
    local = ours(serving, serving.admit(request), model)
    words = local.backend.words
    tokenizer = words.known()
    config = read_config(words.folder) if words.folder else {}
    names = {name: token_text(config[name]) if config.get(name) else None for name in ("bos_token", "pad_token")}
    return {
        "tokenizer_class": "bytes" if isinstance(tokenizer, ByteTokenizer) else "tokenizer.json",
        "vocab_size": tokenizer.vocab_size,
        "eos_token": local.token_texts.text(tokenizer.eot),
        "bos_token": names["bos_token"],
        "pad_token": names["pad_token"],
        "chat_template": words.chat_template or (find_template(words.folder, config) if words.folder else None),
    }
