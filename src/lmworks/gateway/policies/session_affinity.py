"""Requests of one session go to one server, whose cache holds what the session said before.

A session is the header x-session-id, or the body's `prompt_cache_key` or `user`. Each session orders the servers by a
hash, so one that comes or goes moves its own sessions only. Loads are bounded: a server with more than BOUND times the
mean queue passes sessions on to the next in their order (https://arxiv.org/abs/1608.01350).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from ..exchange import Exchange
from ..servers import Server
from . import Policy

BOUND = 1.25
FIELDS = ("prompt_cache_key", "user")


class SessionAffinity(Policy):
    def narrow(self, servers: Sequence[Server], exchange: Exchange) -> Sequence[Server]:
        session = session_of(exchange)
        if session is None:
            return servers
        most = BOUND * (sum(server.queue for server in servers) + 1) / len(servers)
        ring = sorted(servers, key=lambda server: weight(session, server), reverse=True)
        return [next((server for server in ring if server.queue < most), ring[0])]


def session_of(exchange: Exchange) -> str | None:
    header = exchange.request.header("x-session-id")
    given = [header, *(exchange.body.get(name) for name in FIELDS if name in exchange.body.fields)]
    return next((one for one in given if isinstance(one, str) and one), None)


def weight(session: str, server: Server) -> bytes:
    """Rendezvous hashing: each session has an order of the servers of its own."""
    return blake2b(f"{session}\n{server.url}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
