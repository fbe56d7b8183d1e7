"""Clients of a drill: streams at a steady rate, each compared with the answer to the same request on a quiet fleet.

Every request is greedy or seeded, so its answer is known beforehand, to the character. A client that reads less has
lost something, one that reads more has read something twice, and one that reads something else got a wrong answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from ..spec import LMWorksError

PROMPTS = (
    "def add(a, b):", "import os", "class Reader:", "for name in", "    return self", "try:\n", "with open(", "if not",
    "raise ValueError(", "print(", "from pathlib", "while True:", "x = [", "assert", "lambda value:", "yield",
)  # fmt: skip
READ_S = 180.0  # longer than the gateway gives a request: what is cut off is cut off by the fleet
ENDS = ("ok", "refused", "failed", "lost", "wrong")


@dataclass(frozen=True)
class Question:
    """A request whose answer follows from it."""

    prompt: str
    max_tokens: int
    seed: int | None  # None: greedy

    def body(self, model: str) -> dict[str, Any]:
        sampled = {"temperature": 0.0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        more = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        return {"model": model, "prompt": self.prompt, "max_tokens": self.max_tokens, **sampled, **more}


def questions(
    count: int = 16, tokens: tuple[int, int] = (16, 48), seed: int = 0, prompt_bytes: int = 0
) -> list[Question]:
    """`prompt_bytes`: what each begins with, and no other does."""
    luck = random.Random(seed)
    return [
        Question(
            f"# {number:02}\n" * (prompt_bytes // 5) + PROMPTS[number % len(PROMPTS)],
            luck.randint(*tokens),
            None if number % 2 else 100 + number,
        )
        for number in range(count)
    ]


@dataclass(frozen=True)
class Tenant:
    """One group of clients. `key`: what they show."""

    name: str
    rate: float  # requests a second
    key: str = ""
    model: str = ""
    retries: int = 0  # at once, where it is refused or fails
    known: bool = True  # whether its answers are compared
    limited: bool = False  # it is refused what it asks beyond its limits


@dataclass
class Outcome:
    """One request, as its client saw it."""

    tenant: str
    at: float  # seconds of the drill
    question: int
    end: str = ""  # one of ENDS
    status: int = 0  # 0: no answer at all
    error: str = ""
    first: float | None = None  # seconds to the first text
    seconds: float = 0.0
    longest_gap: float = 0.0
    text: str = ""
    tokens: int = 0  # as the usage of the answer says
    retried: int = 0
    server_busy: bool = False
    id: str = ""  # that the client gave it


@dataclass
class Load:
    """Tenants' requests, from `start` to `stop`, in a thread of their own."""

    url: str
    model: str
    tenants: Sequence[Tenant]
    questions: Sequence[Question]
    clock: Callable[[], float]
    headers: Mapping[str, str] = field(default_factory=dict)
    verify: Any = True  # of TLS, as httpx takes it
    seed: int = 0
    salted: bool = False  # each request has a cache_salt of its own
    expected: dict[int, str] = field(default_factory=dict)
    learned: list[Outcome] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)  # of tenants, where they changed
    asking: dict[str, set[asyncio.Task[None]]] = field(default_factory=dict)  # requests under way, of tenants
    loop: asyncio.AbstractEventLoop | None = None
    stopping: bool = False
    thread: threading.Thread | None = None
    failure: BaseException | None = None

    def learn(self) -> None:
        """Asks every question once, while nothing is wrong: that is the answer."""

        async def ask_all() -> None:
            async with self.client() as http:
                for number in range(len(self.questions)):
                    found = await self.ask(http, self.tenants[0], number)
                    if found.status != 200 or not found.tokens:
                        raise LMWorksError(f"a quiet fleet did not answer: status {found.status} {found.error}")
                    self.expected[number] = found.text
                    self.learned.append(found)

        asyncio.run(ask_all())

    def start(self) -> None:
        self.thread = threading.Thread(target=self.run, name="load", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Returns when every request has ended."""
        self.stopping = True
        if self.thread is not None:
            self.thread.join()
        if self.failure is not None:
            raise LMWorksError(f"the load of the drill failed: {self.failure!r}")

    def run(self) -> None:
        try:
            asyncio.run(self.main())
        except BaseException as error:  # said by `stop`
            self.failure = error

    def leave(self, tenant: str) -> None:
        """Its clients end: their connections are closed, whatever they wait for."""
        self.rates[tenant] = 0.0

        def cancel() -> None:
            for one in self.asking.get(tenant, ()):
                one.cancel()

        assert self.loop is not None
        self.loop.call_soon_threadsafe(cancel)

    async def main(self) -> None:
        self.loop = asyncio.get_running_loop()
        async with self.client() as http, asyncio.TaskGroup() as group:
            for number, tenant in enumerate(self.tenants):
                group.create_task(self.arrive(http, tenant, random.Random(self.seed * 1000 + number), group))

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        timeout = httpx.Timeout(READ_S, connect=10.0)
        return httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False, verify=self.verify)

    async def arrive(
        self, http: httpx.AsyncClient, tenant: Tenant, luck: random.Random, group: asyncio.TaskGroup
    ) -> None:
        """An open loop: requests come whether or not those before them have ended."""
        due = self.clock() + luck.random() / max(tenant.rate, 1.0)
        while not self.stopping:
            rate = self.rates.get(tenant.name, tenant.rate)
            if rate <= 0 or self.clock() < due:
                await asyncio.sleep(0.02)
                due = max(due, self.clock()) if rate <= 0 else due
                continue
            asking = self.asking.setdefault(tenant.name, set())
            task = group.create_task(self.request(http, tenant, luck.randrange(len(self.questions))))
            asking.add(task)
            task.add_done_callback(asking.discard)
            due = max(due + luck.expovariate(rate), self.clock() - 1.0)

    async def request(self, http: httpx.AsyncClient, tenant: Tenant, number: int) -> None:
        for attempt in range(tenant.retries + 1):
            found = await self.ask(http, tenant, number)
            found.retried = attempt
            self.outcomes.append(found)
            if found.end not in ("refused", "failed") or self.stopping:
                return

    async def ask(self, http: httpx.AsyncClient, tenant: Tenant, number: int, id: str = "") -> Outcome:
        found = Outcome(tenant.name, self.clock(), number, id=id)
        headers = {**self.headers, **({"authorization": f"Bearer {tenant.key}"} if tenant.key else {})}
        if id:
            headers["x-request-id"] = id
        body = self.questions[number].body(tenant.model or self.model)
        if self.salted:
            body["cache_salt"] = uuid.uuid4().hex
        began = last = time.perf_counter()
        done = False
        try:
            async with http.stream("POST", f"{self.url}/v1/completions", json=body, headers=headers) as answer:
                found.status = answer.status_code
                if answer.status_code != 200:
                    await answer.aread()
                    found.error = error_code(answer.text)
                    found.server_busy = "retry-after" in answer.headers
                else:
                    async for line in answer.aiter_lines():
                        if not line.startswith("data: "):
                            continue
                        now = time.perf_counter()
                        if line == "data: [DONE]":
                            done = True
                            continue
                        self.read(found, line.removeprefix("data: "), now - began, now - last)
                        last = now
        except httpx.HTTPError as error:
            found.error = type(error).__name__
        found.seconds = time.perf_counter() - began
        found.end = self.verdict(found, done, tenant)
        return found

    def read(self, found: Outcome, data: str, since: float, gap: float) -> None:
        event = json.loads(data)
        if "error" in event:
            found.error = str(event["error"].get("code"))
            return
        if usage := event.get("usage"):
            found.tokens = int(usage["completion_tokens"])
        for choice in event.get("choices") or ():
            if choice.get("text"):
                if found.first is None:
                    found.first = since
                else:
                    found.longest_gap = max(found.longest_gap, gap)
                found.text += choice["text"]

    def verdict(self, found: Outcome, done: bool, tenant: Tenant) -> str:
        expected = self.expected.get(found.question) if tenant.known else None
        if done and not found.error:
            return "ok" if expected is None or found.text == expected else "wrong"
        if found.text:
            return "lost" if expected is None or expected.startswith(found.text) else "wrong"
        if found.status in (429, 503):
            return "refused"
        return "failed"


def error_code(text: str) -> str:
    try:
        return str(json.loads(text)["error"].get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return text[:60]


# --- what they saw ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """Of one tenant, in a stretch of time."""

    requests: int
    ends: dict[str, int]
    within_slo: float  # share of all requests
    ttft_p50: float
    ttft_p99: float
    longest_gap: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def seen(outcomes: Iterable[Outcome], slo_ttft: float, good: Sequence[str] = ("ok",)) -> Seen:
    """`within_slo`: with a `good` end, and the first text in time."""
    found = list(outcomes)
    firsts = sorted(one.first for one in found if one.first is not None)
    met = sum(one.end in good and one.first is not None and one.first <= slo_ttft for one in found)
    ends = Counter(one.end for one in found)
    return Seen(
        len(found),
        {name: ends[name] for name in ENDS if ends[name]},
        met / len(found) if found else 1.0,
        quantile(firsts, 0.5),
        quantile(firsts, 0.99),
        max((one.longest_gap for one in found), default=0.0),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) if ordered else 0.0
