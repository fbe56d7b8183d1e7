"""Quality checks: prompts whose answers are known, asked of every server again and again.

A server may be up and fast and answer nonsense: a wrong adapter, a damaged cache, a bad quantization. Only its answers
show that. A check that got no answer says nothing: that is what probes and errors are for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import msgspec

from ..spec import SpecError
from ..spec.schema import Section, opt
from .http_client import UpstreamError, fetch

if TYPE_CHECKING:  # their settings have this module's
    from .servers import Server, Servers

log = logging.getLogger("lmworks.gateway")

TICK_S = 0.5
PATH = "/v1/completions"


@dataclass(frozen=True)
class QualityCheck(Section):
    section: ClassVar[str] = "quality_checks"

    model: str = opt("", "as servers call it, an adapter's name for instance")
    prompt: str = opt("", "what is to be completed, greedily")
    expect: str = opt("", "regular expression that is to be found in the answer")
    max_tokens: int = opt(16, "of the answer", ge=1, le=1024)
    every: float = opt(60.0, "seconds between two rounds", gt=0)
    timeout: float = opt(30.0, "seconds for an answer", gt=0)

    def check(self) -> None:
        if not (self.model and self.prompt and self.expect):
            raise SpecError("quality_checks: each needs model, prompt and expect")
        try:
            re.compile(self.expect)
        except re.error as error:
            raise SpecError(f"quality_checks: expect = {self.expect!r} is not a regular expression: {error}") from None

    @cached_property
    def body(self) -> bytes:
        asked = {"model": self.model, "prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0}
        return json.dumps(asked).encode()


class Choice(msgspec.Struct):
    text: str


class Completion(msgspec.Struct):
    choices: list[Choice]


COMPLETION = msgspec.json.Decoder(Completion)


class QualityChecks:
    """The last result of each check at each server that has its model."""

    def __init__(self, checks: Callable[[], list[QualityCheck]], servers: Servers) -> None:
        self.checks, self.servers = checks, servers
        self.results: dict[tuple[QualityCheck, Server], bool] = {}
        self.asked: dict[QualityCheck, float] = {}  # when, by the monotonic clock

    async def run(self) -> None:
        while True:
            now = time.monotonic()
            due = [one for one in self.checks() if now - self.asked.get(one, -one.every) >= one.every]
            self.asked |= dict.fromkeys(due, now)
            await asyncio.gather(*(self.ask(one, server) for one in due for server in self.servers.up(one.model, [])))
            await asyncio.sleep(TICK_S)

    async def ask(self, check: QualityCheck, server: Server) -> None:
        headers = [(b"content-type", b"application/json"), *server.headers()]
        try:
            answer = await fetch(server.connections, "POST", server.path_of(PATH), headers, check.timeout, check.body)
            if answer.status != 200:
                return
            passed = re.search(check.expect, COMPLETION.decode(answer.body).choices[0].text) is not None
        except (UpstreamError, msgspec.MsgspecError, IndexError):
            return
        if not passed and self.results.get((check, server), True):
            log.warning("a quality check failed", extra={"server": server.url, "model": check.model})
        self.results[check, server] = passed

    def scores(self) -> dict[tuple[str, ...], float]:
        """Share of the checks that were passed, by model and server; of models that a server has now."""
        checks, found = self.checks(), dict[tuple[str, ...], list[bool]]()
        for (check, server), passed in list(self.results.items()):
            if check not in checks or server.draining:
                del self.results[check, server]
            elif check.model in server.models:
                found.setdefault((check.model, server.url), []).append(passed)
        return {place: sum(results) / len(results) for place, results in found.items()}
