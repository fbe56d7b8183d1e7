"""How a server holds up under a load: `lmworks bench serve`.

Latency counts from the moment a request was meant to leave. Whatever holds a request up, this client included, is
part of what a user would have waited: a server that stalls cannot hide the requests that would have come meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from ..spec import LMWorksError
from ..spec.slo import parse_slo
from .http_client import Reply, Target, first_model, post
from .serve_workload import Endpoint, Load, Shot

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
REJECTED = (429, 503)  # the server has no room: that is an answer, not a mistake
QUANTILES = {"p50": 50, "p90": 90, "p99": 99}
HEAD_START_S = 0.05  # before the first request, so that none is late from the beginning


@dataclass(frozen=True)
class Slo:
    """What every request was promised, in seconds. `tpot` is the mean time between the tokens of one request."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """ttft=0.5,tpot=0.05,e2e=10; any may be left out."""
        return cls(**parse_slo(text))

    def met(self, one: Outcome) -> bool:
        limits = ((self.ttft, one.ttft), (self.tpot, one.mean_gap), (self.e2e, one.e2e))
        return one.kind == "completed" and all(limit is None or value <= limit for limit, value in limits)

    @property
    def promised(self) -> dict[str, float]:
        kept = {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}
        return kept | ({"itl": self.tpot} if self.tpot is not None else {})  # as readers of older results know it


@dataclass(frozen=True)
class Outcome:
    """What became of one request."""

    meant: float  # when it was to leave, in seconds from the start
    late: float  # how much later it left: this client's own doing
    ended: float  # in seconds from the start, as all that follows
    times: tuple[float, ...]  # when events with tokens arrived
    status: int
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    tokens: int

    @classmethod
    def of(cls, reply: Reply, meant: float, sent: float, start: float) -> Outcome:
        usage = reply.usage or {}
        details = usage.get("prompt_tokens_details") or {}
        return cls(
            meant=meant - start,
            late=sent - meant,
            ended=reply.ended - start,
            times=tuple(at - start for at in reply.times),
            status=reply.status,
            error=reply.error,
            prompt_tokens=usage.get("prompt_tokens") or 0,
            cached_tokens=details.get("cached_tokens") or 0,
            tokens=usage.get("completion_tokens") or len(reply.times),  # of servers that do not count: events
        )

    @property
    def kind(self) -> str:
        if self.error is None:
            return "completed"
        return "rejected" if self.status in REJECTED else "error"

    @property
    def ttft(self) -> float:
        return (self.times[0] if self.times else self.ended) - self.meant

    @property
    def e2e(self) -> float:
        return self.ended - self.meant

    @property
    def gaps(self) -> list[float]:
        """Between events, as a reader sees them; an event may bring several tokens."""
        return [after - before for before, after in itertools.pairwise(self.times)]

    @property
    def mean_gap(self) -> float:
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 and self.times else 0.0


@dataclass(frozen=True)
class Measured:
    """All outcomes of one run, in the order in which they were to leave."""

    url: str
    model: str
    endpoint: Endpoint
    load: Load
    slo: Slo
    outcomes: tuple[Outcome, ...]

    def those(self, kind: str) -> list[Outcome]:
        return [one for one in self.outcomes if one.kind == kind]

    @cached_property
    def good(self) -> list[Outcome]:
        return [one for one in self.outcomes if self.slo.met(one)]

    @property
    def seconds(self) -> float:
        """From the first that was to leave to the last end."""
        return max(one.ended for one in self.outcomes) - min(one.meant for one in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        done, rejected = self.those("completed"), self.those("rejected")
        seconds = self.seconds
        tokens = sum(one.tokens for one in done)
        return {
            "url": self.url,
            "model": self.model,
            "endpoint": self.endpoint,
            "arrivals": self.load.arrivals.text,
            "seconds": seconds,
            "requests": len(self.outcomes),
            "completed": len(done),
            "rejected": dict(sorted(Counter(str(one.status) for one in rejected).items())),
            "errors": dict(Counter(str(one.error) for one in self.those("error")).most_common()),
            "input_tokens": sum(one.prompt_tokens for one in done),
            "cached_tokens": sum(one.cached_tokens for one in done),
            "output_tokens": tokens,
            "requests_per_s": len(done) / seconds,
            "output_tokens_per_s": tokens / seconds,
            "goodput": {
                "slo": self.slo.promised,
                "requests": len(self.good),
                "requests_per_s": len(self.good) / seconds,
                "share": len(self.good) / len(self.outcomes),
            },
            "ttft_s": summary([one.ttft for one in done]),
            "itl_s": summary([gap for one in done for gap in one.gaps]),
            "request_itl_s": summary([one.mean_gap for one in done if one.tokens > 1]),
            "e2e_s": summary([one.e2e for one in done]),
            "rejected_s": summary([one.e2e for one in rejected]),
            "late_s": summary([one.late for one in self.outcomes]),
        }


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """None of nothing."""
    if not values:
        return None
    marks = np.percentile(values, list(QUANTILES.values()))
    shown = {name: float(mark) for name, mark in zip(QUANTILES, marks, strict=True)}
    return {"mean": float(np.mean(values)), **shown, "max": float(max(values))}


# --- running ----------------------------------------------------------------------------------------------

Tell = Callable[[Outcome], None]


def bench_serve(
    url: str,
    load: Load,
    slo: Slo,
    *,
    model: str | None = None,
    endpoint: Endpoint = "completions",
    key: str | None = None,
    timeout: float = 600.0,
    tell: Tell | None = None,
) -> Measured:
    """Sends the load to any OpenAI-compatible server. `tell` hears of each outcome as it comes."""
    target = Target.of(url, key)
    more_files()

    async def whole() -> Measured:
        named = model or await first_model(target)
        shots = load.draw(endpoint, named)
        outcomes = await Run(target, PATHS[endpoint], timeout, tell).run(shots, load.arrivals.concurrency)
        return Measured(url, named, endpoint, load, slo, tuple(outcomes))

    return asyncio.run(whole())


@dataclass(frozen=True)
class Run:
    target: Target
    path: str
    timeout: float = 600.0
    tell: Tell | None = None

    async def run(self, shots: Sequence[Shot], concurrency: int = 0) -> list[Outcome]:
        if not shots:
            raise LMWorksError("there is no request to send")
        if concurrency:
            return await self.closed(shots, concurrency)
        return await self.open(shots)

    async def open(self, shots: Sequence[Shot]) -> list[Outcome]:
        """Each leaves when it was meant to, whatever has become of the others."""
        start = time.perf_counter() + HEAD_START_S
        tasks = []
        for shot in shots:
            if (wait := start + shot.at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(self.fire(shot, start + shot.at, start)))
        return list(await asyncio.gather(*tasks))

    async def closed(self, shots: Sequence[Shot], concurrency: int) -> list[Outcome]:
        """Each leaves when one before it has ended."""
        start = time.perf_counter()
        waiting = iter(shots)

        async def one_after_another(left: Iterable[Shot]) -> list[Outcome]:
            return [await self.fire(shot, time.perf_counter(), start) for shot in left]

        done = await asyncio.gather(*(one_after_another(waiting) for _ in range(concurrency)))
        return sorted(itertools.chain(*done), key=lambda one: one.meant)

    async def fire(self, shot: Shot, meant: float, start: float) -> Outcome:
        sent = time.perf_counter()
        outcome = Outcome.of(await post(self.target, self.path, shot.body, self.timeout), meant, sent, start)
        if self.tell is not None:
            self.tell(outcome)
        return outcome


def more_files() -> None:
    """A thousand streams are a thousand open files, and many systems allow 1024 unless they are asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))
