"""One request from its first byte to the last of its answer: all that policies, metrics, limits and logs know of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from .config import ModelRule
from .http_server import ClientConnection, HTTPRequest
from .request_body import RequestBody
from .servers import Server
from .tenants.identity import ANYONE, Tenant


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
    migrations: int = 0
    status: int = 0
    failed: str | None = None  # code of the error that ended it
    chunks: int = 0  # events with content
    usage: Usage | None = None
    tenant: Tenant = ANYONE
    priority: int = 0  # the smallest goes first
    key: str = ""  # that it came with, as it is shown: its prefix

    @property
    def path(self) -> str:
        return self.request.path
