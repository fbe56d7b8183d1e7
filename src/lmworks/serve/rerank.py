"""`/score`, `/rerank` and `/classify`: how well texts go together, with bodies of vLLM, Jina and Cohere.

A model with a scalar head (a reranker, a reward model) reads both texts as one prompt, and its head says how well. Of
any other the embeddings are compared, by their cosine.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from starlette.requests import Request

from .backend import Usage
from .body import read_body
from .embeddings import Vectors, embed, embedding_usage, pool, pooling_model, tokenized
from .limits import APIError
from .prompts import Ids, Pair, Prompt, chat_size, render_chat, tokenize_prompt
from .request_bodies import ClassifyRequest, RerankRequest, ScoreRequest, TokenizeRequest
from .response_bodies import ClassifyResponse, RankedDocument, RerankResponse, ScoreResponse
from .serving import Caller, LocalModel, Serving
from .sse import while_connected

LABEL = "LABEL_0"  # as `transformers` calls the only one of a scalar head
Scores = tuple[list[float], Usage]


async def score(serving: Serving, request: Request) -> ScoreResponse:
    """One text with each of several, or pair by pair."""
    caller = serving.authenticate(request)
    body, _ = await read_body(serving, request, caller, ScoreRequest)
    first, second = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    if len(first) not in (1, len(second)):
        message = f"text_1 has {len(first)} texts and text_2 {len(second)}: give one for all, or as many"
        raise APIError(400, "invalid_request", message, "text_1")
    check_texts(len(first) + len(second), caller.limits.prompts, "text_2")
    scores, usage = await while_connected(request.receive, compare(serving, caller, body, first, second))
    return {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model,
        "data": [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)],
        "usage": embedding_usage(usage),
    }


async def rerank(serving: Serving, request: Request) -> RerankResponse:
    """Documents by how well they go with the query, the best first."""
    caller = serving.authenticate(request)
    body, _ = await read_body(serving, request, caller, RerankRequest)
    check_texts(1 + len(body.documents), caller.limits.prompts, "documents")
    compared = compare(serving, caller, body, [body.query], body.documents)
    scores, usage = await while_connected(request.receive, compared)
    best = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n or None]
    results: list[RankedDocument] = [{"index": place, "relevance_score": scores[place]} for place in best]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": body.documents[result["index"]]}
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": body.model,
        "usage": embedding_usage(usage),
        "results": results,
    }


async def classify(serving: Serving, request: Request) -> ClassifyResponse:
    """The scalar head's value of each text, or of a conversation."""
    caller = serving.authenticate(request)
    body, _ = await read_body(serving, request, caller, ClassifyRequest)
    if (body.input is None) == (body.messages is None):
        raise APIError(400, "invalid_request", "give either input or messages", "input")
    local, adapter = pooling_model(serving, caller, body.model)
    if not local.backend.card.scalar_head:
        message = f"{body.model!r} has no scalar head: /v1/score compares texts by its embeddings"
        raise APIError(400, "not_supported", message, "model")
    if body.messages is not None:
        prompts = [await conversation(serving, caller, local, body)]
    else:
        given = cast("Any", body.input)
        texts = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
        prompts = await tokenized(serving, caller, local, body, texts)
    headed = pool(serving, caller, local, adapter, body, prompts, "score", 1)
    scores, usage = head_scores(body, await while_connected(request.receive, headed))
    return {
        "id": f"classify-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model,
        "data": [
            {"index": index, "label": LABEL, "probs": [value], "num_classes": 1} for index, value in enumerate(scores)
        ],
        "usage": embedding_usage(usage),
    }


async def conversation(serving: Serving, caller: Caller, local: LocalModel, body: ClassifyRequest) -> Ids:
    same = body.model_dump(include={"model", "messages", "chat_template_kwargs", "add_special_tokens"})
    chat = TokenizeRequest(**same | {"add_generation_prompt": bool(body.add_generation_prompt)})
    ids, _ = await tokenize_prompt(serving, caller, local, chat_size(chat), render_chat, chat)
    caller.meter.charge_prompt(len(ids))
    return ids


async def compare(
    serving: Serving, caller: Caller, body: ScoreRequest | RerankRequest, first: Sequence[str], second: Sequence[str]
) -> Scores:
    """Of the only first text with each of the second ones, or pair by pair."""
    local, adapter = pooling_model(serving, caller, body.model)
    if local.backend.card.scalar_head:
        pairs: list[Prompt] = [
            Pair(one, other) for one, other in zip(list(first) * (len(second) // len(first)), second, strict=True)
        ]
        prompts = await tokenized(serving, caller, local, body, pairs)
        return head_scores(body, await pool(serving, caller, local, adapter, body, prompts, "score", 1))
    if body.use_activation is not None:
        message = f"use_activation is for models with a scalar head; of {body.model!r} embeddings are compared"
        raise APIError(400, "invalid_request", message, "use_activation")
    vectors = await embed(serving, caller, local, adapter, body, [*first, *second])
    return cosines(vectors.values[: len(first)], vectors.values[len(first) :]), vectors.usage


def head_scores(body: ScoreRequest | RerankRequest | ClassifyRequest, found: Vectors) -> Scores:
    values = found.values[:, 0].astype(np.float64)
    return (1 / (1 + np.exp(-values)) if body.use_activation else values).tolist(), found.usage


def check_texts(count: int, limit: int, param: str) -> None:
    if count > limit:
        raise APIError(400, "limit_exceeded", f"{count} texts: at most {limit} are compared in one request", param)


def cosines(first: np.ndarray, second: np.ndarray) -> list[float]:
    """Row by row; one row is compared with all. Rows have length 1."""
    scores: list[float] = (first * second).sum(axis=1).clip(-1, 1).tolist()
    return scores
