"""One request from its first byte to the last of its answer: all that policies, metrics, limits and logs know of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .config import ModelRule
from .http_server import ClientConnection, Headers, HTTPRequest
from .request_body import RequestBody
from .servers import Server
from .tenants.identity import ANYONE, Tenant

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from .tenants.fair_queue import Ticket
    from .tenants.tenancy import Meter


@dataclass
class Usage:
    """Tokens, as the server that finished the answer counted them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(eq=False)
class Exchange:
    request: HTTPRequest
    connection: ClientConnection
    body: RequestBody
    rule: ModelRule  # of the model that was asked for
    id: str
    began: float = field(default_factory=time.perf_counter)
    first_token: float | None = None  # seconds after `began`
    seconds: float = 0.0  # in all
    server: Server | None = None  # that answers
    answering: str = ""  # the model that answers: another where it fell back
    tries: int = 0
    hedge: str = ""  # where two servers were asked: which began to answer, first, second or none
    migrations: int = 0
    status: int = 0
    failed: str | None = None  # code of the error that ended it
    chunks: int = 0  # events with content
    usage: Usage | None = None
    usage_counts: bool = False  # `usage` has the generated tokens, not only the prompt's
    prompt_tokens: int | None = None  # as a server of ours said before its first token
    generated: int = 0  # tokens that were read so far; where a server does not name them, events with content
    unnamed: int = 0  # such events
    headers: Headers = field(default_factory=list)  # of the answer, whoever gives it
    meter: Meter | None = None  # counts tokens for the tenant, where there are tenants
    ticket: Ticket | None = None  # its place in a pool with max_open
    tenant: Tenant = ANYONE
    weight: float = 1.0  # of the tenant's tier
    text: str | None = None  # of its answer, where a copy of the request is compared with it
    priority: int = 0  # the smallest goes first
    key: str = ""  # that it came with, as it is shown: its prefix
    trace_id: str | None = None
    span: Span | None = None  # where it is traced

    @property
    def seconds_per_token(self) -> float | None:
        """Of a streamed answer: the mean time between its tokens."""
        if self.usage is None or self.usage.completion_tokens < 2 or self.first_token is None or not self.body.stream:
            return None
        return (self.seconds - self.first_token) / (self.usage.completion_tokens - 1)

    def __post_init__(self) -> None:
        self.headers.append((b"x-request-id", self.id.encode()))

    def count(self) -> None:
        """What is known of its tokens has changed: before its client sees them they are in the journal."""
        if self.meter is not None:
            self.meter.count(self)

    @property
    def path(self) -> str:
        return self.request.path
