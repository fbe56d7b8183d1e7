"""One drill from a steady state to the end of its incident, with a timeline and checks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..observability.alerts import GATEWAY_JOB, SERVER_JOB
from ..spec import LMWorksError
from .leftovers import environment
from .load import Load, Outcome, Tenant, questions, seen
from .local_fleet import GATEWAY, LIMITS, MODEL, LocalFleet, Shape, merged
from .monitoring import FASTER, SCRAPE_S, Monitoring
from .tcp_proxy import TCPProxy

STEADY_S = 4.0  # of load before the incident, where a drill needs no more
AFTER_S = 4.0  # of load after it, which must be as before
POLL_S = 0.2
SLO_TTFT_S = 2.0  # of the drills' small model, on a machine that other processes share
TENANTS = (Tenant("blue", 2.0), Tenant("green", 2.0))


@dataclass(frozen=True)
class Impact:
    """The most that users may see of the incident. `within_slo`: share of a tenant's requests."""

    lost: int = 0  # streams that broke off
    failed: int = 0  # requests that got an error, beyond those that were told to come later
    refused: int | None = 0  # requests that were told to come later (429, 503); None: any number
    within_slo: Mapping[str, float] = field(default_factory=dict)
    wrong: int = 0  # answers
    spoilt: tuple[str, ...] = ()  # tenants whose answers are what is wrong: until the end of the incident


@dataclass(frozen=True)
class Drill:
    name: str
    what: str  # is planted
    plant: Callable[[Stage], None]
    alerts: tuple[str, ...] = ()  # that must fire, …
    within: float = 30.0  # …so many seconds after the fault, with windows divided by FASTER
    impact: Impact = field(default_factory=Impact)
    look: tuple[str, ...] = ("lmworks fleet status --folder $FLEET",)  # the runbook's commands: what to look at, …
    act: tuple[str, ...] = ()  # …what to do
    withdraw: Callable[[Stage], None] | None = None  # what ends outside of the fleet: a cable, a client
    steady: float = STEADY_S  # seconds of load before the incident
    seconds: float = 5.0  # that the incident lasts at least, under load
    recovers: float = 60.0  # seconds after the last command, at most
    shape: Shape = field(default_factory=Shape)
    tenants: tuple[Tenant, ...] = TENANTS
    tokens: tuple[int, int] = (16, 48)  # of an answer, at least and at most
    prompt_bytes: int = 0  # that each prompt has at least
    prepare: Callable[[Stage], None] | None = None  # before the load starts
    check: Callable[[Stage], list[Check]] | None = None
    clear: Callable[[Stage], None] | None = None  # what `prepare` started, however the drill ends
    scrape_proxied: bool = False  # a TCP proxy between Prometheus and the first server


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    expected: str
    observed: str
    ran: bool = True


@dataclass(frozen=True)
class Moment:
    at: float  # seconds of the drill
    what: str
    kind: str = "note"  # note, fault, alert, command, end


@dataclass(frozen=True)
class CommandRun:
    line: str
    code: int
    output: str
    at: float
    seconds: float


@dataclass
class Report:
    drill: str
    what: str
    checks: list[Check]
    timeline: list[Moment]
    commands: list[CommandRun]
    tenants: dict[str, dict[str, Any]]  # name → before, during, after
    seconds: float
    declared: dict[str, Any]  # what was shorter than in production
    alerts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(one.ok for one in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


@dataclass
class Stage:
    """Where a drill happens."""

    folder: Path
    fleet: LocalFleet
    drill: Drill
    rules: Mapping[str, Any] | None = None
    began: float = field(default_factory=time.monotonic)
    timeline: list[Moment] = field(default_factory=list)
    commands: list[CommandRun] = field(default_factory=list)
    monitoring: Monitoring | None = None
    proxies: list[TCPProxy] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)  # what `plant` leaves for `withdraw` and `check`
    planted: float = 0.0
    ended: float = 0.0
    on_moment: Callable[[Moment], None] | None = None

    def __post_init__(self) -> None:
        asked = questions(tokens=self.drill.tokens, prompt_bytes=self.drill.prompt_bytes)
        self.load = Load(self.fleet.url, MODEL, self.drill.tenants, asked, self.now)

    def now(self) -> float:
        return time.monotonic() - self.began

    def note(self, what: str, kind: str = "note") -> None:
        moment = Moment(round(self.now(), 2), what, kind)
        self.timeline.append(moment)
        if self.on_moment is not None:
            self.on_moment(moment)

    @property
    def victim(self) -> str:
        """The server that something happens to."""
        return self.fleet.names[0]

    @property
    def variables(self) -> dict[str, str]:
        """What the commands of runbooks say instead of names and addresses."""
        return {
            "FLEET": str(self.fleet.folder), "GATEWAY": self.fleet.url, "SERVER": self.victim,
            "OTHER_URL": self.fleet.server_url(self.fleet.names[-1]),
            "SERVER_URL": self.fleet.server_url(self.victim), "GATEWAY_PID": str(self.fleet.pid("gateway")),
        }  # fmt: skip

    def command(self, line: str) -> CommandRun:
        """As an operator types it, with `lmworks` of this installation."""
        at, began = round(self.now(), 2), time.monotonic()
        typed = line.replace("lmworks ", f"{sys.executable} -m lmworks ", 1) if line.startswith("lmworks ") else line
        ended = subprocess.run(
            ["sh", "-c", typed], capture_output=True, text=True, timeout=240, env=environment(self.variables),
            check=False,
        )  # fmt: skip
        output = (ended.stdout + ended.stderr).strip().replace(str(self.fleet.folder), "$FLEET")
        done = CommandRun(line, ended.returncode, output, at, round(time.monotonic() - began, 2))
        self.commands.append(done)
        self.note(f"$ {line}" + (f"   (exit code {done.code})" if done.code else ""), "command")
        return done

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(POLL_S)
        return condition()

    def outcomes(self, since: float, until: float = float("inf")) -> list[Outcome]:
        """Of requests that began in this stretch."""
        return [one for one in list(self.load.outcomes) if since <= one.at < until]


def run_drill(
    drill: Drill, fleet: LocalFleet, folder: Path, rules: Mapping[str, Any] | None,
    on_moment: Callable[[Moment], None] | None = None,
) -> Report:  # fmt: skip
    """`fleet` is up, or is started here; it is left up and healthy."""
    folder.mkdir(parents=True, exist_ok=True)
    stage = Stage(folder, fleet, drill, rules, on_moment=on_moment)
    try:
        set_up(stage)
        play(stage)
        return report(stage)
    finally:
        with suppress(LMWorksError):
            stage.load.stop()
        if drill.clear is not None:
            drill.clear(stage)
        if stage.monitoring is not None:
            stage.monitoring.stop()
        for proxy in stage.proxies:
            proxy.stop()
        if drill.shape.proxied:
            fleet.stop()  # its addresses were the proxies'


def set_up(stage: Stage) -> None:
    fleet, drill = stage.fleet, stage.drill
    if fleet.supervisor is None:
        pools = None
        if drill.shape.proxied:
            ports = [fleet.port + 1 + number for number in range(drill.shape.servers)]
            stage.proxies = [TCPProxy(port + drill.shape.servers, port) for port in ports]
            for proxy in stage.proxies:
                proxy.start()
            pools = [f"http://127.0.0.1:{proxy.port}/v1" for proxy in stage.proxies]
        fleet.start(pools)
    fleet.wait_ready()
    if drill.prepare is not None:
        drill.prepare(stage)
    stage.wait(lambda: servers_up(fleet) == len(fleet.names), 30.0)
    warm_up(stage)
    stage.load.tenants = [replace(one, key=fleet.keys.get(one.name, "")) for one in stage.load.tenants]
    stage.load.learn()
    if stage.rules is not None:  # last, so that nothing of the start is seen
        servers = [fleet.server_url(name) for name in fleet.names]
        if drill.scrape_proxied:
            scraped = TCPProxy(fleet.port + 50, fleet.port + 1)
            scraped.start()
            stage.proxies.append(scraped)
            servers[0] = f"http://127.0.0.1:{scraped.port}"
        targets = {GATEWAY_JOB: [fleet.url], SERVER_JOB: servers}
        stage.monitoring = Monitoring(stage.folder / "monitoring", stage.rules, targets, stage.now)
        stage.monitoring.start()


def warm_up(stage: Stage) -> None:
    """The first request of a process is a slow one, at each server."""
    import httpx

    body = {"model": MODEL, "prompt": "x = 1", "max_tokens": 8}
    for name in stage.fleet.names:
        url = f"{stage.fleet.server_url(name)}/v1/completions"
        httpx.post(url, json=body, timeout=60.0, trust_env=False, verify=False).raise_for_status()


def servers_up(fleet: LocalFleet) -> int:
    """As the gateway sees them."""
    import httpx

    with suppress(httpx.HTTPError, ValueError, KeyError):
        found = httpx.get(f"{fleet.url}/gateway/servers", headers=fleet.admin, timeout=2.0, trust_env=False)
        return sum(one["up"] for one in found.json()["servers"] if one["pool"] == MODEL)
    return 0


def play(stage: Stage) -> None:
    drill = stage.drill
    stage.note("load starts: " + ", ".join(f"{one.name} {one.rate:g}/s" for one in drill.tenants))
    stage.load.start()
    time.sleep(drill.steady)
    stage.planted = stage.now()
    stage.note(drill.what, "fault")
    drill.plant(stage)
    until = time.monotonic() + drill.seconds
    if stage.monitoring is not None:
        for name in drill.alerts:
            stage.wait(lambda name=name: fired(stage, name) is not None, drill.within - (stage.now() - stage.planted))  # type: ignore[misc]
    time.sleep(max(0.0, until - time.monotonic()))
    for line in drill.look:
        stage.command(line)
    if drill.withdraw is not None:
        drill.withdraw(stage)
    for line in drill.act:
        stage.command(line)
    recovered = stage.wait(lambda: healthy(stage), drill.recovers)
    stage.ended = stage.now()
    stage.note("every process is ready, no alert fires" if recovered else "NOT over", "end")
    stage.memory["recovered"] = recovered
    time.sleep(AFTER_S)
    stage.load.stop()
    stage.note("load ends")


def fired(stage: Stage, name: str) -> float | None:
    """When it fired first, after the fault."""
    found = [one.fired for one in stage.monitoring.alerts if one.name == name] if stage.monitoring else []
    return next((at for at in sorted(found) if at >= stage.planted), None)


def healthy(stage: Stage) -> bool:
    quiet = stage.monitoring is None or not stage.monitoring.firing() & set(stage.drill.alerts)
    return quiet and stage.fleet.healthy() and servers_up(stage.fleet) == len(stage.fleet.names)


def report(stage: Stage) -> Report:
    drill = stage.drill
    for alert in stage.monitoring.alerts if stage.monitoring else []:
        stage.timeline.append(Moment(round(alert.fired, 2), f"{alert.name} fires", "alert"))
        if alert.resolved is not None:
            stage.timeline.append(Moment(round(alert.resolved, 2), f"{alert.name} is resolved", "alert"))
    stage.timeline.sort(key=lambda moment: moment.at)
    tenants = {}
    for tenant in drill.tenants:
        stretches = {
            "before": (0.0, stage.planted),
            "during": (stage.planted, stage.ended),
            "after": (stage.ended, 1e9),
        }
        tenants[tenant.name] = {
            name: seen((one for one in stage.outcomes(*stretch) if one.tenant == tenant.name), SLO_TTFT_S).to_dict()
            for name, stretch in stretches.items()
        }
    alerts = [asdict(one) for one in stage.monitoring.alerts] if stage.monitoring else []
    checks = [*user_checks(stage), *alert_checks(stage), *runbook_checks(stage)]
    if drill.check is not None:
        checks += drill.check(stage)
    declared = {
        "gateway": merged(GATEWAY, drill.shape.gateway), "limits": {**LIMITS, **drill.shape.limits},
        "alert windows divided by": FASTER, "scrape_interval": SCRAPE_S, "slo_ttft": SLO_TTFT_S,
        "cores": os.cpu_count(), "load average": os.getloadavg()[0],
    }  # fmt: skip
    seconds = round(stage.now(), 1)
    return Report(drill.name, drill.what, checks, stage.timeline, stage.commands, tenants, seconds, declared, alerts)


def user_checks(stage: Stage) -> list[Check]:
    allowed, drill = stage.drill.impact, stage.drill
    before, during = stage.outcomes(0.0, stage.planted), stage.outcomes(stage.planted - 1.0, stage.ended)
    every = [
        one for one in stage.outcomes(0.0)
        if one.tenant not in allowed.spoilt or not stage.planted <= one.at + one.seconds or one.at > stage.ended
    ]  # fmt: skip
    after = stage.outcomes(stage.ended)
    bad = [one for one in before if one.end != "ok" and one.seconds + one.at < stage.planted]
    within_limits = {one.name for one in drill.tenants if not one.limited}
    checks = [
        Check("steady before", bool(before) and not bad, "every request answered", f"{len(before)}, {len(bad)} not"),
        count_check("wrong answers, or text twice", [one for one in every if one.end == "wrong"], allowed.wrong),
        count_check("lost streams", [one for one in every if one.end == "lost"], allowed.lost),
        count_check("failed requests", [one for one in every if one.end == "failed"], allowed.failed),
    ]
    if allowed.refused is not None:
        checks.append(
            count_check(
                "refused requests",
                [o for o in every if o.end == "refused" and o.tenant in within_limits],
                allowed.refused,
            )
        )
    for name, share in allowed.within_slo.items():
        found = seen((one for one in during if one.tenant == name), SLO_TTFT_S)
        ok = found.requests > 0 and found.within_slo >= share
        checks.append(
            Check(f"SLO of {name}", ok, f"at least {share:.0%}", f"{found.within_slo:.1%} of {found.requests}")
        )
    wrong = [one for one in after if one.end != "ok" and one.tenant in within_limits]
    checks.append(
        Check("well after", bool(after) and not wrong, "every request answered", f"{len(after)}, {len(wrong)} not")
    )
    return checks


def count_check(name: str, found: list[Outcome], most: int) -> Check:
    examples = ", ".join(sorted({f"{one.status} {one.error}".strip() for one in found}))
    return Check(name, len(found) <= most, f"at most {most}", f"{len(found)}" + (f" ({examples})" if examples else ""))


def alert_checks(stage: Stage) -> list[Check]:
    drill = stage.drill
    if stage.monitoring is None:
        why = "not run: Prometheus or Alertmanager is not installed"
        return [Check(f"alert {name}", True, f"within {drill.within:g} s", why, ran=False) for name in drill.alerts]
    found = []
    for name in drill.alerts:
        at = fired(stage, name)
        after = None if at is None else at - stage.planted
        ok = after is not None and after <= drill.within
        told = "it did not fire" if after is None else f"{after:.1f} s after the fault"
        found.append(Check(f"alert {name}", ok, f"within {drill.within:g} s", told))
    early = sorted({one.name for one in stage.monitoring.alerts if one.fired < stage.planted})
    return [*found, Check("no alert before", not early, "none", ", ".join(early) or "none")]


def runbook_checks(stage: Stage) -> list[Check]:
    acted = [one for one in stage.commands if one.line in stage.drill.act]
    failed = [one.line for one in acted if one.code]
    what = "; ".join(stage.drill.act) or "nothing to do: it heals by itself"
    checks = [Check("runbook's commands", not failed, what, f"failed: {failed}" if failed else f"{len(acted)} ran")]
    took = stage.ended - (max(one.at + one.seconds for one in acted) if acted else stage.planted)
    ended = bool(stage.memory.get("recovered"))
    limit = f"within {stage.drill.recovers:g} s"
    return [*checks, Check("the incident ends", ended, limit, f"after {took:.1f} s" if ended else "it did not")]
