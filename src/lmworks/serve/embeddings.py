"""`/v1/embeddings`: texts as vectors: hidden states behind the model's last norm, pooled, of length 1.

`/score` and `/rerank` compare texts by the cosine of their vectors (`serve.rerank`).
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ..engine.core.sampling_params import SamplingParams
from .backend import Usage
from .body import read_body
from .generation_request import GenerationRequest, add_usage, resolve_max_tokens, resolve_priority, truncation
from .limits import APIError, check_params
from .prompts import Ids, Pair, Prompt, encode, tokenize_prompt
from .request_bodies import EmbeddingRequest, Pooled
from .response_bodies import EmbeddingUsage
from .serving import Caller, LocalModel, Serving, Upstream
from .sse import encode as encode_json
from .sse import while_connected

NUMBER_BYTES = 24  # of one number of a vector, as JSON


@dataclass(frozen=True)
class Vectors:
    values: np.ndarray  # (texts, numbers) float32
    usage: Usage


async def create_embeddings(serving: Serving, request: Request) -> Response:
    caller = serving.authenticate(request)
    body, _ = await read_body(serving, request, caller, EmbeddingRequest)
    local, adapter = pooling_model(serving, caller, body.model)
    hidden, dimensions = local.backend.card.hidden, body.dimensions
    if dimensions is not None and dimensions > hidden:
        message = f"dimensions = {dimensions}: the vectors of {body.model!r} have {hidden}"
        raise APIError(400, "invalid_request", message, "dimensions")
    given = cast("Any", body.input)
    texts = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
    found = await while_connected(request.receive, embed(serving, caller, local, adapter, body, texts))
    values = found.values if dimensions is None else normalised(found.values[:, :dimensions])
    content = await asyncio.to_thread(embedding_list, body, values, found.usage)
    return Response(content, media_type="application/json")


def pooling_model(serving: Serving, caller: Caller, name: str) -> tuple[LocalModel, str | None]:
    model, adapter = serving.find(caller, name)
    if isinstance(model, Upstream):
        raise APIError(404, "not_supported", "this model is on an upstream server: ask that for its vectors", "model")
    return model, adapter


async def embed(
    serving: Serving,
    caller: Caller,
    local: LocalModel,
    adapter: str | None,
    body: Pooled,
    texts: Sequence[str | Ids],
) -> Vectors:
    """A vector of length 1 for each text, in order."""
    pooling, width = serving.pooling or local.stored_pooling, local.backend.card.hidden
    found = await pool(
        serving, caller, local, adapter, body, await tokenized(serving, caller, local, body, texts), pooling, width
    )
    return Vectors(normalised(found.values), found.usage)


async def tokenized(
    serving: Serving, caller: Caller, local: LocalModel, body: Pooled, texts: Sequence[Prompt]
) -> list[Ids]:
    card = local.backend.card
    size = sum(len(text) for text in texts if isinstance(text, str | Pair))
    special = (body.add_special_tokens, False)
    most = truncation(body, local, 1)
    _, prompts, made = await tokenize_prompt(
        serving, caller, local, size, encode, list(texts), card.vocab, False, special, most
    )
    caller.meter.charge_prompt(made)
    return prompts


async def pool(
    serving: Serving,
    caller: Caller,
    local: LocalModel,
    adapter: str | None,
    body: Pooled,
    prompts: list[Ids],
    pooling: str,
    width: int,
) -> Vectors:
    """So many numbers for each prompt, in order, as the engine gives them."""
    resolve_max_tokens(caller, local, prompts, 1, 1)  # every text fits the context
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, adapter=adapter, cache_salt=body.cache_salt)
    check_params(caller.limits, caller.key, params)
    generation = GenerationRequest(
        serving,
        caller,
        local,
        params,
        prompts,
        stream=False,
        echoed=NUMBER_BYTES * width * len(prompts),
        priority=resolve_priority(body, caller),
        pooling=pooling,
    )
    values, usage = np.zeros((len(prompts), width), np.float32), Usage(0, 0, 0)
    async with aclosing(generation.events()) as events:
        async for place, event in events:
            if event.embedding is not None:
                values[place] = np.frombuffer(event.embedding, np.float32)
            usage = usage if event.final is None else add_usage(usage, event.final)
    if not np.isfinite(values).all():
        raise APIError(500, "answer_failed", "the model's states of this text are not finite (NaN or infinity)")
    return Vectors(values, usage)


def normalised(values: np.ndarray) -> np.ndarray:
    """Rows of length 1; one of zeros stays."""
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    return values / np.where(lengths > 0, lengths, 1.0).astype(np.float32)


def embedding_list(body: EmbeddingRequest, values: np.ndarray, usage: Usage) -> str:
    if body.encoding_format == "base64":
        shown: list[Any] = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in values]
    else:
        shown = values.tolist()
    around = encode_json({"object": "list", "model": body.model, "usage": embedding_usage(usage)})
    # One by one: the encoder holds the GIL.
    rows = (encode_json({"object": "embedding", "index": at, "embedding": row}) for at, row in enumerate(shown))
    return f'{around[:-1]},"data":[{",".join(rows)}]}}'


def embedding_usage(usage: Usage) -> EmbeddingUsage:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
