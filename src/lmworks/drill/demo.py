"""`lmworks fleet demo`: the whole stack on one machine, in minutes.

A gateway, two servers with a small model, two tenants with keys, Prometheus where it is installed; load, a kill -9 in
the middle of streams, and a new version that does not pass its gate and is rolled back. At the end a table of SLOs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..observability.alerts import GATEWAY_JOB, SERVER_JOB
from ..spec import LMWorksError
from .leftovers import end_marked, environment
from .load import Load, Tenant, questions, seen
from .local_fleet import MODEL, LocalFleet, Shape, train_model
from .monitoring import Monitoring, alert_rules
from .rollout import Candidate, write_gate

SLO_TTFT_S, OBJECTIVE = 2.0, 0.99
TENANTS = (Tenant("blue", 2.0), Tenant("green", 2.0))
QUIET_S, KILLED_S = 10.0, 5.0


@dataclass(frozen=True)
class Phase:
    name: str
    began: float
    ended: float


@dataclass
class Demo:
    folder: Path
    say: Callable[[str], None]

    def run(self) -> dict[str, Any]:
        """Facts for the table."""
        shutil.rmtree(self.folder / "fleet", ignore_errors=True)
        began = time.monotonic()
        self.say("training a model of two layers, and one that will be its bad new version")
        model = train_model(self.folder / "model")
        bad = train_model(self.folder / "bad", seed=1)
        self.fleet = LocalFleet(self.folder / "fleet", model, Shape(tenants=tuple(one.name for one in TENANTS)))
        self.monitoring: Monitoring | None = None
        self.candidate: Candidate | None = None
        try:
            self.say("starting a gateway and two servers; keys for two tenants")
            self.fleet.start()
            tenants = [Tenant(one.name, one.rate, key=self.fleet.keys[one.name]) for one in TENANTS]
            self.load = Load(self.fleet.url, MODEL, tenants, questions(), lambda: time.monotonic() - began)
            self.load.learn()
            self.start_monitoring()
            return self.story(bad)
        finally:
            self.load.stopping = True
            self.end()

    def start_monitoring(self) -> None:
        rules = alert_rules()
        if rules is None:
            self.say("Prometheus and Alertmanager are not installed: alerts are not checked")
            return
        targets = {
            GATEWAY_JOB: [self.fleet.url],
            SERVER_JOB: [self.fleet.server_url(name) for name in self.fleet.names],
        }
        self.monitoring = Monitoring(self.folder / "monitoring", rules, targets, self.load.clock)
        self.monitoring.start()
        self.say(f"Prometheus: {self.monitoring.url}")

    def story(self, bad: Path) -> dict[str, Any]:
        clock, phases = self.load.clock, list[Phase]()

        def phase(name: str, began: float) -> None:
            phases.append(Phase(name, began, clock()))

        self.say(f"load: {', '.join(f'{one.name} {one.rate:g} requests/s' for one in TENANTS)}, at {self.fleet.url}")
        self.load.start()
        start = clock()
        time.sleep(QUIET_S)
        phase("quiet", start)

        start, victim = clock(), self.fleet.names[0]
        self.say(f"kill -9 of {victim} and its engine")
        self.fleet.kill(victim)
        time.sleep(KILLED_S)
        self.wait(self.fleet.healthy, 120, f"{victim} is back")
        phase("a server killed", start)

        start = clock()
        rollout = self.canary(bad)
        phase("a bad version", start)
        time.sleep(3.0)
        self.load.stop()
        return self.facts(phases, rollout)

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise LMWorksError(f"not after {seconds:.0f} s: {what}; see {self.fleet.folder}/logs")
            time.sleep(0.3)
        self.say(what)

    def canary(self, bad: Path) -> dict[str, Any]:
        """A server of the new version beside the old ones, a share of the requests, and a gate."""
        self.candidate = Candidate(self.fleet, bad)
        self.candidate.start()
        self.say("the new version is ready")
        asked = self.load.questions[:6]
        answers = [self.load.expected[number] for number in range(len(asked))]
        self.candidate.begin_rollout(write_gate(self.folder, asked, answers))
        self.say("the new version gets a tenth of the requests, until its gate has decided")
        rollout = self.candidate.rollout
        self.wait(lambda: rollout().get("state") in ("rolled_back", "promoted"), 120, "the gate has decided")
        found = rollout()
        self.say(f"{found['state'].replace('_', ' ')}: {found.get('reason') or ''}")
        return found

    def facts(self, phases: list[Phase], rollout: dict[str, Any]) -> dict[str, Any]:
        rows = []
        for one in phases:
            for tenant in TENANTS:
                mine = [o for o in self.load.outcomes if o.tenant == tenant.name and one.began <= o.at < one.ended]
                found = seen(mine, SLO_TTFT_S, good=("ok", "wrong"))  # wrong answers have a column of their own
                rows.append({"phase": one.name, "tenant": tenant.name, **found.to_dict()})
        read = {
            tenant.name: sum(o.tokens for o in [*self.load.learned, *self.load.outcomes] if o.tenant == tenant.name)
            for tenant in TENANTS
        }
        return {
            "phases": rows, "rollout": rollout, "ttft_slo": SLO_TTFT_S, "objective": OBJECTIVE,
            "alerts": sorted({one.name for one in self.monitoring.alerts}) if self.monitoring else None,
            "tokens_read": read, "tokens_billed": self.billed(),
        }  # fmt: skip

    def billed(self) -> dict[str, int]:
        """Generated tokens by tenant, as the usage ledger has them."""
        time.sleep(2.0)  # the journal is written into the store several times a second
        words = [
            sys.executable,
            "-m",
            "lmworks",
            "gateway",
            "usage",
            "--config",
            str(self.fleet.gateway_file),
            "--json",
        ]
        ended = subprocess.run(words, capture_output=True, text=True, env=environment(), check=False)
        if ended.returncode:
            raise LMWorksError(f"lmworks gateway usage failed: {ended.stderr.strip()[-300:]}")
        return {one["tenant"]: int(one["completion_tokens"]) for one in json.loads(ended.stdout)["usage"]}

    def end(self) -> None:
        if self.monitoring is not None:
            self.monitoring.stop()
        if self.candidate is not None:
            self.candidate.stop()
        self.fleet.stop()
        end_marked()


def verdict(facts: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    found = []
    for one in facts["phases"]:
        where = f"{one['phase']}, {one['tenant']}"
        if one["within_slo"] < facts["objective"]:
            found.append(f"{where}: {one['within_slo']:.1%} within the SLO")
        found += [f"{where}: {one['ends'][end]} {end}" for end in ("lost", "failed") if one["ends"].get(end)]
        if one["phase"] != "a bad version" and one["ends"].get("wrong"):
            found.append(f"{where}: {one['ends']['wrong']} wrong answers")
    if facts["rollout"].get("state") != "rolled_back":
        found.append(f"the bad version is {facts['rollout'].get('state')}")
    found += [
        f"{tenant}: {read} tokens were read and {facts['tokens_billed'].get(tenant, 0)} billed"
        for tenant, read in facts["tokens_read"].items() if facts["tokens_billed"].get(tenant, 0) != read
    ]  # fmt: skip
    return found
