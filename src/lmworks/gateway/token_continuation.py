"""Streams between servers of ours: one names its tokens, another goes on with them."""

from __future__ import annotations

from .exchange import Exchange
from .request_body import RequestBody
from .server_request import USAGE_PATHS
from .servers import Server

CONTINUED = {*USAGE_PATHS, "/v1/responses", "/v1/messages"}
MOST_ANSWERS = 4096  # of a stream that can be continued


def names_tokens(server: Server, exchange: Exchange) -> bool:
    """Whether a stream of this server can be one that names its tokens."""
    ours = server.pool.kind == "lmworks" and exchange.body.stream and exchange.path in CONTINUED
    return ours and answers_of(exchange.body) <= MOST_ANSWERS


def can_continue(server: Server, exchange: Exchange) -> bool:
    """Whether another one's stream can be continued there. Earlier responses are stored where they were made."""
    return names_tokens(server, exchange) and exchange.body.get("previous_response_id") is None


def answers_of(body: RequestBody) -> int:
    """How many answers a request has: n to each of its prompts."""
    prompt, n = body.get("prompt"), body.get("n")
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return (len(prompt) if several else 1) * (n if isinstance(n, int) else 1)
