"""`/score` and `/rerank`: how similar texts are: the cosine of their embeddings; bodies of vLLM, Jina and Cohere."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import numpy as np
from starlette.requests import Request

from .body import read_body
from .embeddings import embed, embedding_usage, pooling_model
from .limits import APIError
from .request_bodies import RerankRequest, ScoreRequest
from .response_bodies import RankedDocument, RerankResponse, ScoreResponse
from .serving import Serving
from .sse import while_connected


async def score(serving: Serving, request: Request) -> ScoreResponse:
    """One text with each of several, or pair by pair."""
    caller = serving.authenticate(request)
    body, _ = await read_body(serving, request, caller, ScoreRequest)
    first, second = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    if len(first) not in (1, len(second)):
        message = f"text_1 has {len(first)} texts and text_2 {len(second)}: give one for all, or as many"
        raise APIError(400, "invalid_request", message, "text_1")
    check_texts(len(first) + len(second), caller.limits.prompts, "text_2")
    local, adapter = pooling_model(serving, caller, body.model)
    vectors = await while_connected(request.receive, embed(serving, caller, local, adapter, body, [*first, *second]))
    scores = cosines(vectors.values[: len(first)], vectors.values[len(first) :])
    return {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model,
        "data": [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)],
        "usage": embedding_usage(vectors.usage),
    }


async def rerank(serving: Serving, request: Request) -> RerankResponse:
    """Documents by their similarity to the query, the most similar first."""
    caller = serving.authenticate(request)
    body, _ = await read_body(serving, request, caller, RerankRequest)
    check_texts(1 + len(body.documents), caller.limits.prompts, "documents")
    local, adapter = pooling_model(serving, caller, body.model)
    texts = [body.query, *body.documents]
    vectors = await while_connected(request.receive, embed(serving, caller, local, adapter, body, texts))
    scores = cosines(vectors.values[:1], vectors.values[1:])
    best = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n or None]
    results: list[RankedDocument] = [{"index": place, "relevance_score": scores[place]} for place in best]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": body.documents[result["index"]]}
    usage = embedding_usage(vectors.usage)
    return {"id": f"rerank-{uuid.uuid4().hex}", "model": body.model, "usage": usage, "results": results}


def check_texts(count: int, limit: int, param: str) -> None:
    if count > limit:
        raise APIError(400, "limit_exceeded", f"{count} texts: at most {limit} are compared in one request", param)


def cosines(first: np.ndarray, second: np.ndarray) -> Sequence[float]:
    """Row by row; one row is compared with all. Rows have length 1."""
    scores: list[float] = (first * second).sum(axis=1).tolist()
    return scores
