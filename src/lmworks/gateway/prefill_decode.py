"""Prefill apart from decode: a prompt is computed by a server of one pool, and answered by one of another.

    client ─▶ gateway ── the request, for one token ─────────▶ prefill server (engine.kv_listen)
                 │                                                   │ KV blocks
                 └────── the request, and whose blocks it takes ─▶ decode server (engine.kv_peers) ─▶ answer

The decode server computes what it does not get, so the answer is the same whatever fails. `tries` sends the requests;
which servers fit together is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from ..serve.limits import APIError
from .exchange import Exchange
from .request_body import RequestBody
from .server_request import USAGE_PATHS
from .servers import Server

ONE_TOKEN = {"max_tokens": 1, "stream": False}
# Of the answer alone: a prefill server is not sent them.
ANSWER_FIELDS = (
    *("stream_options", "max_completion_tokens", "min_tokens", "n", "best_of", "continuation"),
    *("logprobs", "top_logprobs", "use_beam_search", "length_penalty"),
)
COMPARED = ("block", "dtype", "kv_dtype", "context", "tp")
ANY_ADDRESS = ("0.0.0.0", "::")


def can_prefill(exchange: Exchange) -> bool:
    """Whether another server's blocks can be used: log-probabilities of a prompt need all of it computed."""
    body = exchange.body
    return exchange.path in USAGE_PATHS and body.get("prompt_logprobs") is None and not body.get("echo")


def prompt_alone(body: RequestBody, changes: dict[str, object]) -> bytes:
    """The request to a prefill server."""
    return body.with_changes(changes | ONE_TOKEN, without=ANSWER_FIELDS)


def block_address(server: Server, model: str) -> str:
    """Where others reach its blocks; empty: nowhere."""
    settings = (server.transfers or {}).get(model)
    listen = "" if settings is None else settings.listen
    parts = urlsplit(listen)
    if parts.hostname not in ANY_ADDRESS:
        return listen
    host = urlsplit(server.url).hostname or ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}"


def disagreement(prefill: Server, decode: Server, model: str) -> str | None:
    """Why blocks of the one cannot go to the other."""
    from_, to = ((server.transfers or {}).get(model) for server in (prefill, decode))
    address = block_address(prefill, model)
    if from_ is None or not address:
        return f"{prefill.url} hands out no KV blocks of {model!r}: set its engine.kv_listen"
    if to is None:
        return f"{decode.url} takes no KV blocks of {model!r}: set its engine.kv_peers"
    for name in COMPARED:
        one, other = getattr(from_, name), getattr(to, name)
        if one != other:
            return f"engine.{name} is {one} at {prefill.url} and {other} at {decode.url}: they must be the same"
    if from_.fingerprint != to.fingerprint:
        return f"{prefill.url} and {decode.url} have other weights of {model!r}: serve the same model at both"
    if address not in to.peers:
        return f"engine.kv_peers of {decode.url} lacks {address!r}, the blocks of {prefill.url}"
    return None


def check_agreement(decode: Sequence[Server], prefill: Sequence[Server], model: str) -> list[Server]:
    """Decode servers that can take blocks of some prefill server, be it up or not; raises APIError where none can."""
    known = [server for server in prefill if server.transfers is not None]
    if not known or not decode:
        return list(decode)
    found = [
        one
        for one in decode
        if one.transfers is None or any(disagreement(other, one, model) is None for other in known)
    ]
    if not found:
        reason = disagreement(known[0], decode[0], model)
        raise APIError(503, "prefill_disagrees", f"prefill and decode servers do not fit together: {reason}")
    return found
