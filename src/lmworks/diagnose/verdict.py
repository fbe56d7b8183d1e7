"""The verdict on the traces of a job: what bounds its steps, by what figures, the remedy, and what that would bring.

Every cause has a share of the steps' time that its remedy could give back, and an interval of how much of that share
remedies do give back. The cause with the largest expected gain is the verdict; where none is expected to gain 5 %, the
job is healthy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..spec import RunSpec
from ..trace.model import Trace
from .causes import Cause, Evidence, Figures, causes, figures_of
from .remedies import remedy_of

VERDICTS = (
    "input_bound",
    "host_bound",
    "sync_bound",
    "comm_bound",
    "memory_bound",
    "compute_bound",
    "straggler",
    "pipeline_bubble",
    "allocator_bound",
    "recompute_heavy",
    "healthy",
    "unknown",
)
WORTH = 0.05  # of the steps' time: a remedy below it is not proposed


@dataclass(frozen=True)
class Judgement:
    verdict: str
    kind: str
    evidence: tuple[Evidence, ...]
    overrides: tuple[str, ...]
    advice: str
    gain: tuple[float, float]
    others: tuple[Cause, ...]  # expected to gain 5 % as well, best first

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "kind": self.kind,
            "evidence": [asdict(one) for one in self.evidence],
            "remedy": {"overrides": list(self.overrides), "advice": self.advice},
            "predicted_gain": {"low": self.gain[0], "high": self.gain[1]},
            "also": [{"verdict": one.verdict, "kind": one.kind, "expected": one.expected} for one in self.others],
        }


def ranked_causes(figures: Figures) -> list[Cause]:
    return sorted(causes(figures), key=lambda one: -one.expected)


def worthwhile(ranked: Sequence[Cause]) -> list[Cause]:
    return [one for one in ranked if one.expected >= WORTH]


def judge(traces: Sequence[Trace], facts: Mapping[str, Any], spec: RunSpec | None = None) -> Judgement:
    """`facts` are those of trace.summary; `spec` is the run's, where it is one of ours."""
    if not facts["step_s"] or not facts["compute_s"]:
        lacks = (
            Evidence("steps", len(facts["steps"]), "count"),
            Evidence("ranks", len(traces), "count"),
            Evidence("seconds of compute", facts["compute_s"], "count"),
        )
        advice = "record a few whole steps, with activities=[CPU, CUDA] where there is a GPU"
        return Judgement("unknown", "", lacks, (), advice, (0.0, 0.0), ())
    figures = figures_of(traces, facts)
    ranked = ranked_causes(figures)
    found = worthwhile(ranked)
    if not found:
        best = ranked[0]
        evidence = (
            Evidence("compute", figures.compute),
            Evidence("idle", facts["idle_s"] / facts["step_s"]),
            Evidence(f"what the best remedy ({best.verdict}) would gain", best.expected),
        )
        return Judgement("healthy", "", evidence, (), "no remedy is expected to gain 5 %", best.gain, ())
    first = found[0]
    overrides, advice = remedy_of(first, figures, spec)
    low, high = (min(gain, 1.0) for gain in first.gain)  # no more than the step
    return Judgement(first.verdict, first.kind, first.evidence, tuple(overrides), advice, (low, high), tuple(found[1:]))
