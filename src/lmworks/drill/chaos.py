"""Random faults in a real fleet of three servers under load, one trial after another, resumable.

A trial sends streams whose answers are known to the character, plants one or two faults at random moments, and then
compares: every answer, and every token that the gateway counted. What a trial does is a function of seed and number.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ..report.html_page import check_output_folder
from ..spec import LMWorksError
from .load import Load, Question, Tenant, questions
from .local_fleet import MODEL, LocalFleet, Shape, train_model
from .tcp_proxy import TCPProxy

SERVERS = 3
STREAMS = 12
SPREAD_S = 1.0  # over which the streams of a trial begin
SETTLE_S = 90.0  # for servers to come back
RETRY_S = 0.3  # a client that is told to come later does so
PATIENCE_S = 30.0
TRIALS = "trials.jsonl"
SHAPE = Shape(servers=SERVERS, proxied=True)
CLIENT = Tenant("chaos", 0.0)


@dataclass(frozen=True)
class Fault:
    name: str
    what: str
    begin: Callable[[Fleet, int], None]
    end: Callable[[Fleet, int], None] | None = None  # after a while; None: it heals by itself


@dataclass
class Fleet:
    """The fleet of all trials, and the network between its gateway and its servers."""

    local: LocalFleet
    proxies: list[TCPProxy]

    def name(self, number: int) -> str:
        return self.local.names[number]


def kill_server(fleet: Fleet, number: int) -> None:
    fleet.local.kill(fleet.name(number))


def kill_engine(fleet: Fleet, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(fleet.local.engine(fleet.name(number)), signal.SIGKILL)


def pause_server(fleet: Fleet, number: int) -> None:
    fleet.local.signal(fleet.name(number), signal.SIGSTOP)


def resume_server(fleet: Fleet, number: int) -> None:
    fleet.local.signal(fleet.name(number), signal.SIGCONT)


def pause_engine(fleet: Fleet, number: int) -> None:
    os.kill(fleet.local.engine(fleet.name(number)), signal.SIGSTOP)


def drain_server(fleet: Fleet, number: int) -> None:
    import os

    os.kill(fleet.local.pid(fleet.name(number)), signal.SIGTERM)


def network(**state: Any) -> Callable[[Fleet, int], None]:
    def change(fleet: Fleet, number: int) -> None:
        for name, value in state.items():
            setattr(fleet.proxies[number], name, value)

    return change


def touch_config(fleet: Fleet, number: int) -> None:
    """The gateway reads its file again, with another policy."""
    config = fleet.local.folder / "gateway.toml"
    policy = ("least_loaded", "round_robin", "power_of_two")[number]
    text = re.sub(r"\n\[routing\]\npolicy = .*\n", "\n", config.read_text(encoding="utf-8"))
    config.write_text(f'{text}\n[routing]\npolicy = ["{policy}"]\n', encoding="utf-8")


FAULTS = (
    Fault("kill-server", "kill -9 of a server and its engine", kill_server),
    Fault("kill-engine", "kill -9 of an engine", kill_engine),
    Fault("pause-server", "SIGSTOP of a server and its engine, then SIGCONT", pause_server, resume_server),
    Fault("hang-engine", "SIGSTOP of an engine until its watchdog kills it", pause_engine),
    Fault("drain-server", "SIGTERM of a server", drain_server),
    Fault("cut-network", "bytes between gateway and server are held back, then flow",
          network(cut=True), network(cut=False)),
    Fault("slow-network", "300 ms between gateway and server", network(delay=0.3), network(delay=0.0)),
    Fault("reset-network", "a tenth of the packets reset their connection", network(reset=0.1), network(reset=0.0)),
    Fault("change-routing", "the gateway's file is written with another policy", touch_config),
)  # fmt: skip
BY_NAME = {fault.name: fault for fault in FAULTS}


@dataclass(frozen=True)
class Planted:
    fault: str
    server: int
    at: float  # seconds after the first stream
    lasts: float


@dataclass(frozen=True)
class Trial:
    number: int
    seed: int
    planted: tuple[Planted, ...]
    starts: tuple[float, ...]
    asked: tuple[int, ...]  # numbers of questions

    @classmethod
    def draw(cls, seed: int, number: int, count: int) -> Trial:
        luck = random.Random(f"{seed}-{number}")
        servers = luck.sample(range(SERVERS), 2 if luck.random() < 0.3 else 1)  # at least one is left alone
        names = [FAULTS[number % len(FAULTS)].name, luck.choice(FAULTS).name]  # each fault in turn, and any
        planted = tuple(
            Planted(name, server, round(luck.uniform(0.3, SPREAD_S + 0.8), 3), round(luck.uniform(0.5, 5.0), 3))
            for name, server in zip(names, servers, strict=False)
        )
        starts = tuple(sorted(round(luck.uniform(0, SPREAD_S), 3) for _ in range(STREAMS)))
        return cls(number, seed, planted, starts, tuple(luck.randrange(count) for _ in range(STREAMS)))


@dataclass
class Result:
    trial: int
    seed: int
    faults: list[dict[str, Any]]
    ends: dict[str, int]
    migrations: int
    retries: int  # of clients that were refused
    tokens_expected: int
    tokens_reported: int  # usage of the answers
    tokens_counted: int  # by the gateway
    longest_gap: float
    seconds: float
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def asked_of_trials() -> list[Question]:
    return questions(count=24, tokens=(60, 160), seed=1)


class Harness:
    def __init__(self, out: Path) -> None:
        check_output_folder(out)
        self.out = out
        local = LocalFleet(out / "fleet", train_model(out / "model"), SHAPE)
        servers = [local.port + 1 + number for number in range(SERVERS)]
        self.fleet = Fleet(local, [TCPProxy(port + SERVERS, port) for port in servers])
        self.questions = asked_of_trials()
        self.load = Load(local.url, MODEL, [CLIENT], self.questions, time.monotonic)

    def start(self) -> None:
        for proxy in self.fleet.proxies:
            proxy.start()
        self.fleet.local.start([f"http://127.0.0.1:{proxy.port}/v1" for proxy in self.fleet.proxies])
        self.settle()
        self.load.learn()

    def stop(self) -> None:
        self.fleet.local.stop()
        for proxy in self.fleet.proxies:
            proxy.stop()

    def settle(self) -> None:
        """Until every server takes requests again."""
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            if all(one["up"] for one in self.servers()):
                return
            time.sleep(0.1)
        raise LMWorksError(f"a server has not come back after {SETTLE_S:.0f} s; see {self.out}/fleet/logs")

    def servers(self) -> list[dict[str, Any]]:
        with suppress(httpx.HTTPError, ValueError, KeyError):
            url = f"{self.fleet.local.url}/gateway/servers"
            return list(httpx.get(url, timeout=2.0, trust_env=False).json()["servers"])
        return [{"up": False}]

    def counters(self) -> Counter[str]:
        """Tokens and migrations, as the gateway counted them."""
        text = httpx.get(f"{self.fleet.local.url}/metrics", timeout=5.0, trust_env=False).text
        found = Counter[str]()
        for name, value in re.findall(r"^lmworks:gateway_(\w+?)(?:\{.*\})? ([0-9.e+]+)$", text, re.MULTILINE):
            if name in ("generation_tokens_total", "migrations_total"):
                found[name] += int(float(value))
        return found

    def run(self, trial: Trial) -> Result:
        self.settle()
        before, began = self.counters(), time.monotonic()
        outcomes: list[Any] = []
        clients = threading.Thread(target=lambda: outcomes.extend(asyncio.run(self.ask_all(trial))))
        clients.start()
        self.plant(trial, began)
        clients.join()
        after = self.counters()
        expected = sum(self.questions[number].max_tokens for number in trial.asked)
        result = Result(
            trial.number, trial.seed, [asdict(one) for one in trial.planted],
            dict(Counter(one.end for one in outcomes)),
            after["migrations_total"] - before["migrations_total"], sum(one.retried for one in outcomes), expected,
            sum(one.tokens for one in outcomes), after["generation_tokens_total"] - before["generation_tokens_total"],
            round(max((one.longest_gap for one in outcomes), default=0.0), 3), round(time.monotonic() - began, 2),
        )  # fmt: skip
        result.problems = problems_of(result, outcomes, self.questions)
        return result

    async def ask_all(self, trial: Trial) -> list[Any]:
        async with self.load.client() as http:

            async def ask(start: float, number: int) -> Any:
                await asyncio.sleep(start)
                end, retried = time.monotonic() + PATIENCE_S, 0
                while True:
                    found = await self.load.ask(http, CLIENT, number)
                    found.retried = retried
                    if found.end not in ("refused", "failed") or time.monotonic() > end:
                        return found
                    retried += 1
                    await asyncio.sleep(RETRY_S)

            return await asyncio.gather(*map(ask, trial.starts, trial.asked))

    def plant(self, trial: Trial, began: float) -> None:
        """Begins and ends faults at their times."""
        moments: list[tuple[float, Callable[[Fleet, int], None], int]] = []
        for one in trial.planted:
            fault = BY_NAME[one.fault]
            moments.append((one.at, fault.begin, one.server))
            if fault.end is not None:
                moments.append((one.at + one.lasts, fault.end, one.server))
        for at, change, server in sorted(moments, key=lambda moment: moment[0]):
            time.sleep(max(0.0, began + at - time.monotonic()))
            change(self.fleet, server)


def problems_of(result: Result, outcomes: Sequence[Any], asked: Sequence[Question]) -> list[str]:
    found = [
        f"{one.end}: {one.status} {one.error} after {len(one.text)} characters of question {one.question}"
        for one in outcomes if one.end != "ok"
    ]  # fmt: skip
    if len(outcomes) != STREAMS:
        found.append(f"{len(outcomes)} of {STREAMS} requests ended")
    found += [
        f"question {one.question}: the usage says {one.tokens} tokens, it has {asked[one.question].max_tokens}"
        for one in outcomes if one.end == "ok" and one.tokens != asked[one.question].max_tokens
    ]  # fmt: skip
    if not found and result.tokens_counted != result.tokens_expected:
        found.append(f"the gateway counted {result.tokens_counted} tokens of {result.tokens_expected}")
    return found


def run_chaos(trials: int, seed: int, out: Path, on_result: Callable[[Result, int], None]) -> list[Result]:
    """Goes on where an earlier run with this seed and folder was ended."""
    check_output_folder(out)
    done = {one.trial: one for one in read_results(out) if one.seed == seed}
    left = [number for number in range(trials) if number not in done]
    if left:
        harness = Harness(out)
        try:
            harness.start()
            for number in left:
                result = harness.run(Trial.draw(seed, number, len(harness.questions)))
                with (out / TRIALS).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
                done[number] = result
                on_result(result, trials)
        finally:
            harness.stop()
    return [done[number] for number in range(trials)]


def read_results(out: Path) -> list[Result]:
    """A line that a kill cut short is left out."""
    found = []
    with suppress(FileNotFoundError):
        for line in (out / TRIALS).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, TypeError):
                found.append(Result(**json.loads(line)))
    return found
