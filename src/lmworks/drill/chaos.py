"""Random faults in a real fleet of three servers under load, one trial after another, resumable.

A trial sends streams whose answers are known to the character, plants one or two faults at random moments, and then
compares: every answer, every token that the gateway counted, and every token that it billed. What a trial does is a
function of seed and number.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from ..fleet.up import GATEWAY
from ..report.html_page import check_output_folder
from ..spec import LMWorksError
from .leftovers import end_marked
from .load import Load, Outcome, Question, Tenant, questions
from .local_fleet import MODEL, LocalFleet, Shape, train_model
from .tcp_proxy import TCPProxy

SERVERS = 3
STREAMS = 12
SPREAD_S = 1.0  # over which the streams of a trial begin
SETTLE_S = 90.0  # for servers to come back
RETRY_S = 0.3  # a client that is told to come later does so
PATIENCE_S = 30.0
BILLED_S = 20.0  # until usage is in the store
TRIALS = "trials.jsonl"
CLIENT = Tenant("chaos", 0.0)
SHAPE = Shape(servers=SERVERS, proxied=True, tenants=(CLIENT.name,))


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
    os.kill(fleet.local.pid(fleet.name(number)), signal.SIGTERM)


def kill_gateway(fleet: Fleet, number: int) -> None:
    fleet.local.kill(GATEWAY)


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


GATEWAY_KILLED = "kill-gateway"
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
    Fault(GATEWAY_KILLED, "kill -9 of the gateway, which is started again on its journal", kill_gateway),
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

    @property
    def cuts_streams(self) -> bool:
        """Those that its only gateway carried: their clients ask again."""
        return any(one.fault == GATEWAY_KILLED for one in self.planted)

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
    ends: dict[str, int]  # of the last try of each stream
    migrations: int
    retries: int  # of clients that were refused, or cut off
    tokens_expected: int
    tokens_reported: int  # usage of the answers
    tokens_counted: int  # by the gateway, since it was started
    longest_gap: float
    seconds: float
    tokens_read: int = 0  # at least: of all tries, those that were cut off too
    tokens_billed: int = 0  # of all tries, in the ledger
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
        shutil.rmtree(out / "fleet", ignore_errors=True)  # of a run that was killed
        local = LocalFleet(out / "fleet", train_model(out / "model"), SHAPE)
        servers = [local.port + 1 + number for number in range(SERVERS)]
        self.fleet = Fleet(local, [TCPProxy(port + SERVERS, port) for port in servers])
        self.questions = asked_of_trials()
        self.load = Load(local.url, MODEL, [CLIENT], self.questions, time.monotonic)

    def start(self) -> None:
        for proxy in self.fleet.proxies:
            proxy.start()
        self.fleet.local.start([f"http://127.0.0.1:{proxy.port}/v1" for proxy in self.fleet.proxies])
        self.client = replace(CLIENT, key=self.fleet.local.keys[CLIENT.name])
        self.load.tenants = [self.client]
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
            found = httpx.get(url, headers=self.fleet.local.admin, timeout=2.0, trust_env=False)
            return list(found.json()["servers"])
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
        tries: list[list[Outcome]] = []  # of each stream
        clients = threading.Thread(target=lambda: tries.extend(asyncio.run(self.ask_all(trial))))
        clients.start()
        self.plant(trial, began)
        clients.join()
        seconds = round(time.monotonic() - began, 2)
        self.settle()
        after = self.counters()
        every, outcomes = [one for stream in tries for one in stream], [stream[-1] for stream in tries]
        bills, wrongly_billed = self.bills(trial, every)
        expected = sum(self.questions[number].max_tokens for number in trial.asked)
        result = Result(
            trial.number, trial.seed, [asdict(one) for one in trial.planted],
            dict(Counter(one.end for one in outcomes)),
            max(0, after["migrations_total"] - before["migrations_total"]), len(every) - len(outcomes), expected,
            sum(one.tokens for one in outcomes),
            max(0, after["generation_tokens_total"] - before["generation_tokens_total"]),
            round(max((one.longest_gap for one in outcomes), default=0.0), 3), seconds,
            sum(map(least_read, every)), sum(bill.tokens for bill in bills),
        )  # fmt: skip
        result.problems = problems_of(result, outcomes, self.questions, trial.cuts_streams) + wrongly_billed
        return result

    async def ask_all(self, trial: Trial) -> list[list[Outcome]]:
        again = ("refused", "failed", "lost") if trial.cuts_streams else ("refused", "failed")
        async with self.load.client() as http:

            async def ask(stream: int, start: float, number: int) -> list[Outcome]:
                await asyncio.sleep(start)
                end, tries = time.monotonic() + PATIENCE_S, list[Outcome]()
                while True:
                    id = f"{request_prefix(trial)}{stream}-{len(tries)}"
                    tries.append(await self.load.ask(http, self.client, number, id))
                    if tries[-1].end not in again or time.monotonic() > end:
                        return tries
                    await asyncio.sleep(RETRY_S)

            return await asyncio.gather(*map(ask, range(STREAMS), trial.starts, trial.asked))

    def bills(self, trial: Trial, tries: Sequence[Outcome]) -> tuple[list[Bill], list[str]]:
        """Of a trial, once they are in the store; and what is wrong with them."""
        end = time.monotonic() + BILLED_S
        while True:
            bills, spent = read_bills(self.fleet.local.store, request_prefix(trial))
            problems = wrongly_billed(tries, bills, self.questions)
            if not spent:
                problems.append("the sums of budgets are not those of the records")
            if not problems or time.monotonic() > end:
                return bills, problems
            time.sleep(0.2)

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


def problems_of(
    result: Result, outcomes: Sequence[Outcome], asked: Sequence[Question], gateway_killed: bool = False
) -> list[str]:
    """Of the last try of each stream. A gateway that was killed counts from 0 again."""
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
    if not found and not gateway_killed and result.tokens_counted != result.tokens_expected:
        found.append(f"the gateway counted {result.tokens_counted} tokens of {result.tokens_expected}")
    return found


# --- bills ------------------------------------------------------------------------------------------------


class Bill(NamedTuple):
    """One record of usage."""

    id: str  # the request's, and a part of the gateway's
    tokens: int  # generated
    outcome: str


def request_prefix(trial: Trial) -> str:
    """Of the ids of its requests."""
    return f"chaos-{trial.seed}-{trial.number}-"


def read_bills(store: Path, prefix: str) -> tuple[list[Bill], bool]:
    """Of requests with such ids; and whether what counts against the tenant's budget is the sum of all its records."""
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=10.0)) as database:
        database.execute("BEGIN")  # one moment for all that is read
        rows = database.execute(
            "SELECT id, completion_tokens, outcome FROM usage WHERE id LIKE ? ORDER BY id", (f"{prefix}%",)
        ).fetchall()
        (sums,) = database.execute("SELECT SUM(prompt_tokens + completion_tokens), COUNT(*) FROM usage").fetchall()
        spent = database.execute(
            "SELECT tokens, requests FROM spent WHERE subject = ? AND period = 'total'", (f"tenant:{CLIENT.name}",)
        ).fetchall()
    return [Bill(*row) for row in rows], [sums] == spent


def least_read(one: Outcome) -> int:
    """Tokens that its client has surely read: as its usage says, or where it was cut off one for each character, as a
    token is a byte."""
    return one.tokens or len(one.text)


def wrongly_billed(tries: Sequence[Outcome], bills: Sequence[Bill], asked: Sequence[Question]) -> list[str]:
    """Every token that a client read is billed, once; of an answer that was cut off no more than could be generated."""
    of = {one.id: [bill for bill in bills if bill.id.startswith(f"{one.id}.")] for one in tries}
    known = {bill.id for found in of.values() for bill in found}
    problems = [f"{bill.id} is billed, and nobody asked it" for bill in bills if bill.id not in known]
    for one in tries:
        tokens = [bill.tokens for bill in of[one.id]]
        if len(tokens) > 1:
            problems.append(f"{one.id} is billed {len(tokens)} times")
        elif one.end == "ok" and tokens != [one.tokens]:
            problems.append(f"{one.id} has {one.tokens} tokens, billed are {tokens}")
        elif not least_read(one) <= sum(tokens) <= asked[one.question].max_tokens:
            problems.append(f"{one.id}: at least {least_read(one)} tokens were read, billed are {tokens}")
        elif one.end == "refused" and any(tokens):
            problems.append(f"{one.id} was refused, billed are {tokens}")
    return problems


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
            end_marked()
    return [done[number] for number in range(trials)]


def read_results(out: Path) -> list[Result]:
    """A line that a kill cut short is left out."""
    found = []
    with suppress(FileNotFoundError):
        for line in (out / TRIALS).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, TypeError):
                found.append(Result(**json.loads(line)))
    return found
