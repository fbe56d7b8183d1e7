"""What the gateway's file says of a rollout: see `rollouts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..spec import SpecError
from ..spec.schema import Section, opt


@dataclass(frozen=True)
class RolloutRule(Section):
    """What the file says."""

    section: ClassVar[str] = "rollouts"

    model: str = opt("", "what clients ask for")
    stable: str = opt("", "pool of the version that is there")
    candidate: str = opt("", "pool of the new one")
    start: bool = opt(False, "begin the canary at once")
    steps: list[float] = opt([0.05, 0.25, 0.5], "shares of requests, one after the other; then all")
    step_seconds: float = opt(300.0, "shortest time of a step", gt=0)
    min_requests: int = opt(50, "of the candidate, before a step ends and before its latency is judged", ge=1)
    error_rate: float = opt(0.02, "share of tries that may fail, beyond those of the stable pool", ge=0, le=1)
    latency_ratio: float = opt(1.5, "median time to the first token, over the stable pool's (0: any)", ge=0)
    gate: list[str] = opt(list, "command that must succeed before a step ends, e.g. lmworks evals … --gate …")
    shadow: float = opt(0.0, "share of requests that the candidate gets a copy of; its answers are thrown away", ge=0)

    def check(self) -> None:
        if not (self.model and self.stable and self.candidate):
            raise SpecError("rollouts: each needs model, stable and candidate")
        where = f"rollouts: {self.model!r}"
        if self.stable == self.candidate:
            raise SpecError(f"{where}: stable and candidate are the same pool")
        if not self.steps or self.steps != sorted(self.steps) or not 0 < self.steps[0] <= self.steps[-1] <= 1:
            raise SpecError(f"{where}: steps must be growing shares above 0 and up to 1")
        if self.shadow > 1:
            raise SpecError(f"{where}: shadow is a share, up to 1")
