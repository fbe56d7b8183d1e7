"""A new version of a model's servers beside the old one: canary, blue and green, shadow.

A rollout has a stable pool and a candidate. Its state is `stable` (nobody asks the candidate), `canary` (a share of
the requests does, larger step by step), `promoted` (all do) or `rolled_back`. A canary that fails more often, answers
later, or does not pass its gate is rolled back by itself; `POST /gateway/rollouts` switches by hand. What was decided
is in a file, so a gateway that is restarted goes on with it, and a rolled back candidate stays out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from ..serve.limits import APIError
from ..spec.files import write_whole
from .exchange import Exchange
from .policies.session_affinity import session_of
from .rollout_rule import RolloutRule
from .servers import Server

log = logging.getLogger("lmworks.gateway")

State = Literal["stable", "canary", "promoted", "rolled_back"]
STATES: tuple[State, ...] = get_args(State)
ACTIONS: dict[str, State] = {"start": "canary", "promote": "promoted", "roll_back": "rolled_back", "stop": "stable"}
SHADOW_OUTCOMES = ("same", "different", "answered", "failed")  # "answered": not compared
STORED = ("state", "step", "reason", "since")  # fields of a rollout that are kept
TICK_S = 0.25
FEW = 5  # tries that failures are judged by: a circuit breaker may let no more of them through
OUTCOMES = 500  # of each side that count
GATE_SECONDS = 3600.0  # longest time that a gate may take


@dataclass
class Outcomes:
    """Of the tries at one pool, since the last change."""

    failed: deque[bool] = field(default_factory=lambda: deque(maxlen=OUTCOMES))
    first_token: deque[float] = field(default_factory=lambda: deque(maxlen=OUTCOMES))
    count: int = 0

    @property
    def error_rate(self) -> float:
        return sum(self.failed) / len(self.failed) if self.failed else 0.0


@dataclass
class Rollout:
    rule: RolloutRule
    state: State = "stable"
    step: int = 0
    reason: str = ""
    since: float = field(default_factory=time.time)
    gated: int = -1  # the last step whose gate was passed
    gate: asyncio.Task[None] | None = None
    outcomes: dict[str, Outcomes] = field(default_factory=dict)  # by pool
    rollbacks: int = 0  # not by hand
    shadowed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SHADOW_OUTCOMES, 0))

    @property
    def share(self) -> float:
        return {"canary": self.rule.steps[self.step], "promoted": 1.0}.get(self.state, 0.0)

    def switch(self, state: State, reason: str) -> None:
        self.state, self.reason, self.step, self.gated = state, reason, 0, -1
        self.begin_step()
        log.warning("rollout", extra={"model": self.rule.model, "state": state, "reason": reason})

    def roll_back(self, reason: str) -> None:
        self.rollbacks += 1
        self.switch("rolled_back", reason)

    def begin_step(self) -> None:
        self.since, self.outcomes = time.time(), {}
        if self.gate is not None:
            self.gate.cancel()
            self.gate = None

    def of(self, pool: str) -> Outcomes:
        return self.outcomes.setdefault(pool, Outcomes())

    def fault(self) -> str:
        """Why the candidate is worse; empty: it is not, as far as is known."""
        rule, new, old = self.rule, self.of(self.rule.candidate), self.of(self.rule.stable)
        few = min(rule.min_requests, FEW)
        if len(new.failed) >= few and new.error_rate > old.error_rate + rule.error_rate:
            return f"{new.error_rate:.1%} of its tries failed, {old.error_rate:.1%} of the stable pool's"
        enough = min(len(new.first_token), len(old.first_token)) >= rule.min_requests
        if rule.latency_ratio and enough:
            ratio = median(new.first_token) / max(1e-9, median(old.first_token))
            if ratio > rule.latency_ratio:
                return f"its first token takes {ratio:.2f} times as long as the stable pool's"
        return ""

    def describe(self) -> dict[str, Any]:
        tries = {
            pool: {
                "tries": one.count,
                "error_rate": one.error_rate,
                "ttft_p50": median(one.first_token) if one.first_token else None,
            }
            for pool, one in self.outcomes.items()
        }
        return {
            "model": self.rule.model,
            "stable": self.rule.stable,
            "candidate": self.rule.candidate,
            "state": self.state,
            "share": self.share,
            "step": self.step,
            "reason": self.reason,
            "since": self.since,
            "pools": tries,
            "shadowed": {outcome: count for outcome, count in self.shadowed.items() if count},
        }


class Rollouts:
    """All of them. `file`: where their states are kept."""

    def __init__(
        self,
        file: Path,
        rules: Callable[[], Sequence[RolloutRule]],
        urls: Callable[[str], list[str]],
        tell: Callable[[str, dict[str, Any]], None] = lambda model, state: None,
        leads: bool = True,
    ) -> None:
        """`tell`: other workers, what was decided; of these one `leads` to the next step, and each may roll back."""
        self.file, self.rules, self.urls, self.tell, self.leads = file, rules, urls, tell, leads
        self.known: dict[str, Rollout] = {}
        self.stored: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}

    def of(self, model: str) -> Rollout | None:
        rule = next((one for one in self.rules() if one.model == model), None)
        if rule is None:
            return None
        found = self.known.get(model)
        if found is None:
            found = self.known[model] = self.restored(rule)
        if found.rule != rule:
            if found.rule.candidate != rule.candidate:  # another version: what was decided is not of it
                found.switch("canary" if rule.start else "stable", "the file names another candidate")
            found.rule, found.step = rule, min(found.step, len(rule.steps) - 1)
        return found

    def restored(self, rule: RolloutRule) -> Rollout:
        stored = self.stored.get(rule.model)
        if stored is None or stored.get("candidate") != rule.candidate:
            return Rollout(rule, "canary" if rule.start else "stable")
        step = min(int(stored["step"]), len(rule.steps) - 1)
        return Rollout(rule, stored["state"], step, stored["reason"], stored["since"])

    def save(self) -> None:
        for name, one in self.known.items():
            state = {"candidate": one.rule.candidate} | {key: getattr(one, key) for key in STORED}
            if self.stored.get(name) != state:
                self.stored[name] = state
                self.tell(name, state)
        write_whole(self.file, json.dumps(self.stored, indent=1))

    def adopt(self, model: str, state: dict[str, Any]) -> None:
        """What another worker has decided, and written."""
        self.stored[model] = state
        found = self.of(model)
        if found is not None and found.rule.candidate == state["candidate"]:
            found.begin_step()
            found.gated = -1
            for key in STORED:
                setattr(found, key, state[key])

    # --- requests -----------------------------------------------------------------------------------------

    def narrow(self, servers: list[Server], exchange: Exchange, model: str) -> list[Server]:
        """The servers of the side that this request is for; a request that failed there may go to the other one."""
        rollout = self.of(model)
        if rollout is None:
            return servers
        pools = (rollout.rule.stable, rollout.rule.candidate)
        candidate = falls_into(exchange, rollout.share)
        preferred = [one for one in servers if one.pool.name == pools[candidate]]
        if preferred or rollout.state in ("stable", "rolled_back"):
            return preferred
        return [one for one in servers if one.pool.name == pools[not candidate]]

    def record(self, exchange: Exchange, server: Server, first_token: float | None) -> None:
        """How a try ended: `first_token` None where it failed."""
        rollout = self.known.get(exchange.rule.name)
        if rollout is None:
            return
        outcomes = rollout.of(server.pool.name)
        outcomes.count += 1
        outcomes.failed.append(first_token is None)
        if first_token is not None:
            outcomes.first_token.append(first_token)

    # --- decisions ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            self.decide()
            await asyncio.sleep(TICK_S)

    def decide(self) -> None:
        before = [(one.state, one.step) for one in self.known.values()]
        for rule in self.rules():
            rollout = self.of(rule.model)
            if rollout is not None and rollout.state == "canary":
                self.advance(rollout)
        if before != [(one.state, one.step) for one in self.known.values()]:
            self.save()

    def advance(self, rollout: Rollout) -> None:
        rule = rollout.rule
        if fault := rollout.fault():
            rollout.roll_back(fault)
            return
        early = time.time() - rollout.since < rule.step_seconds
        if early or not self.leads or rollout.of(rule.candidate).count < rule.min_requests:
            return
        if rule.gate and rollout.gated < rollout.step:
            if rollout.gate is None:
                rollout.gate = asyncio.create_task(self.pass_gate(rollout))
            return
        if rollout.step + 1 < len(rule.steps):
            rollout.step += 1
            rollout.begin_step()
            log.info("rollout", extra={"model": rule.model, "state": "canary", "share": rollout.share})
        else:
            rollout.switch("promoted", "it passed all steps")

    async def pass_gate(self, rollout: Rollout) -> None:
        """Runs the gate's command, which finds the candidate's address in LMWORKS_GATE_URL."""
        rule, output = rollout.rule, b""
        environment = {
            **os.environ,
            "LMWORKS_GATE_URL": next(iter(self.urls(rule.candidate)), ""),
            "LMWORKS_GATE_MODEL": rule.model,
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *rule.gate, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            try:
                async with asyncio.timeout(GATE_SECONDS):
                    output, _ = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
        except OSError as error:
            problem = f"its gate cannot be run: {error}"
        except TimeoutError:
            problem = f"its gate took longer than {GATE_SECONDS:g} s"
        else:
            said = output.decode(errors="replace").strip()[-300:]
            problem = f"its gate failed with status {process.returncode}: {said}" if process.returncode else ""
        rollout.gate = None
        if problem:
            rollout.roll_back(problem)
            self.save()
        else:
            rollout.gated = rollout.step

    def act(self, model: str, action: str) -> Rollout:
        """By hand; raises APIError."""
        rollout = self.of(model)
        if rollout is None:
            raise APIError(404, "rollout_not_found", f"the file has no rollout of {model[:80]!r}", "model")
        if action not in ACTIONS:
            raise APIError(400, "invalid_request", f"action must be one of {', '.join(ACTIONS)}", "action")
        rollout.switch(ACTIONS[action], "by hand")
        self.save()
        return rollout

    def current(self) -> list[Rollout]:
        return [found for rule in self.rules() if (found := self.of(rule.model)) is not None]


def falls_into(exchange: Exchange, share: float) -> bool:
    """Whether a request is among this share: always the same for one session, and for one request with its retries."""
    name = session_of(exchange) or exchange.id
    draw = int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
    return draw < share * 2**64
