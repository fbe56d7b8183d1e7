"""Shadow traffic: copies of requests to a candidate. Its answers are compared and thrown away.

Nobody waits for a copy, it counts for no tenant, and at most MOST are under way. Texts are compared where they should
be the same: greedy ones, and seeded ones.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from .attempt import Attempt
from .exchange import Exchange
from .http_client import UpstreamError
from .server_request import USAGE_PATHS, ServerRequests
from .stream_events import Choice, EventSplitter

if TYPE_CHECKING:
    from .rollouts import Rollout
    from .servers import Server

MOST = 64
SECONDS = 600.0


class Message(msgspec.Struct):
    content: str | None = None


class WholeChoice(msgspec.Struct):
    message: Message | None = None
    text: str | None = None


class WholeText(msgspec.Struct):
    choices: list[WholeChoice] = []


WHOLE = msgspec.json.Decoder(WholeText)


def text_of(choices: Sequence[Choice]) -> str:
    return "".join((one.delta.content if one.delta is not None else one.text) or "" for one in choices)


def whole_text(content: bytes) -> str:
    found = WHOLE.decode(content).choices
    return "".join((one.message.content if one.message is not None else one.text) or "" for one in found)


class Shadows:
    def __init__(self, requests: ServerRequests) -> None:
        self.requests = requests
        self.tasks: set[asyncio.Task[None]] = set()

    def wanted(self, rollout: Rollout) -> bool:
        return len(self.tasks) < MOST and random.random() < rollout.rule.shadow

    def start(self, exchange: Exchange, rollout: Rollout, servers: Sequence[Server]) -> None:
        """After the request has ended; `exchange.text` is what its client got. `servers`: those of the candidate."""
        if not servers:
            return
        task = asyncio.create_task(self.copy(exchange, rollout, min(servers, key=lambda one: one.queue)))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def copy(self, exchange: Exchange, rollout: Rollout, server: Server) -> None:
        attempt, outcome = Attempt(server), "failed"
        try:
            headers = self.requests.headers(exchange, server)
            body = exchange.body.with_changes(self.requests.changes(exchange, server, exchange.rule))
            async with asyncio.timeout(SECONDS):
                await attempt.start("POST", server.path_of(exchange.path), headers, body)
                await attempt.ended
            if attempt.status == 200:
                outcome = "answered"
                if comparable(exchange):
                    outcome = "same" if answer_text(attempt) == exchange.text else "different"
        except (UpstreamError, TimeoutError, msgspec.MsgspecError):
            pass
        finally:
            attempt.close()
            rollout.shadowed[outcome] += 1


def comparable(exchange: Exchange) -> bool:
    exact = exchange.body.get("temperature") == 0 or exchange.body.get("seed") is not None
    return exact and exchange.path in USAGE_PATHS


def answer_text(attempt: Attempt) -> str:
    if not attempt.streams:
        return whole_text(attempt.content)
    events = EventSplitter().feed(attempt.content)
    return "".join(text_of(event.fields.choices) for event in events if event.fields is not None)
