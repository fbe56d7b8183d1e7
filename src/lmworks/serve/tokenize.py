"""`/tokenize`, `/detokenize`, `/tokenizer_info`: the model's tokenizer for clients without one, lm-eval among them."""

from __future__ import annotations

from starlette.requests import Request

from ..data.tokenizer import ByteTokenizer
from ..engine.chat import find_template, read_config, token_text
from .chat import spoken
from .jobs import read_body
from .limits import Refusal
from .openai_answers import Detokenized, Tokenized, TokenizerInfo
from .openai_types import DetokenizeRequest, TokenizeRequest
from .serving import Caller, Local, Serving, aside
from .upstream import Upstream


def ours(serving: Serving, caller: Caller, name: str | None) -> Local:
    model, _ = serving.find(caller, name)
    if isinstance(model, Upstream):
        raise Refusal(404, "not_supported", "this model is behind another server, which has its tokenizer", "model")
    return model


async def tokenize(serving: Serving, request: Request) -> Tokenized:
    caller = serving.admit(request)
    body, _ = await read_body(request, caller, TokenizeRequest)
    local = ours(serving, caller, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise Refusal(400, "invalid_request", "give either prompt or messages", "prompt")
    if body.messages is not None:
        said = [spoken(message) for message in body.messages]
        size = sum(len(one["content"]) for one in said)
        ids = await aside(size, lambda: local.chat.encode(local.chat.render(said)))
    else:
        words, text = local.backend.words, body.prompt or ""
        encode = words.encode if body.add_special_tokens else words.known().encode
        ids = special(local, text) or await aside(len(text), lambda: encode(text))
    return {"count": len(ids), "max_model_len": local.backend.card.context, "tokens": ids}


def special(local: Local, text: str) -> list[int]:
    """The name of the end-of-text token alone is that token: so clients learn its id. Within a text it is text."""
    tokenizer = local.backend.words.known()
    return [tokenizer.eot] if text == local.token_texts.text(tokenizer.eot) else []


async def detokenize(serving: Serving, request: Request) -> Detokenized:
    caller = serving.admit(request)
    body, _ = await read_body(request, caller, DetokenizeRequest)
    local = ours(serving, caller, body.model)
    known = local.backend.card.vocab
    if any(token >= known for token in body.tokens):
        raise Refusal(400, "invalid_request", f"the model's tokens are 0 to {known - 1}", "tokens")
    return {"prompt": await aside(len(body.tokens), lambda: local.backend.words.decode(body.tokens))}


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
        "chat_template": find_template(words.folder, config) if words.folder else None,
    }
