"""The cheat sheet (cheat_sheet.toml), with what the planner says of each rule and of each debugging tip."""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..plan.case import Case
from ..plan.cluster_request import ClusterRequest, run_on_cluster
from ..plan.devices.machine import Machine
from ..plan.exact.collectives import collectives
from ..plan.exact.exchanges import by_kind
from ..plan.memory.rank_weights import Place, rank_weights
from ..plan.memory.reserve import RISK, oom_probability
from ..plan.memory.sheet import run_budget
from ..plan.predict import step_flops, time_of
from ..plan.software import SOFTWARE
from ..record.formatting import binary_bytes, duration
from ..spec import RunSpec
from ..spec.errors import SpecError
from .goals import Reading, readings

FILE = Path(__file__).parent / "cheat_sheet.toml"
MEASURED = Path(__file__).parent / "rules_of_thumb.json"  # benchmarks/rules_of_thumb.py writes it


@dataclass(frozen=True)
class PlannerCase:
    """A run on a cluster that the planner is asked about."""

    model: str
    cluster: str
    zero: int
    seq: int
    micro_batch: int
    global_batch: int
    recompute: str = "none"
    overrides: tuple[str, ...] = ()

    @functools.cached_property
    def run(self) -> RunSpec:
        asked = ClusterRequest(
            cluster=self.cluster, zero=self.zero, seq=self.seq, micro_batch=self.micro_batch,
            global_batch=self.global_batch, recompute=self.recompute,
        )  # fmt: skip
        return run_on_cluster(self.model, self.overrides, asked)

    @property
    def command(self) -> str:
        """What prints its memory."""
        words = [
            f"lmworks plan memory {self.model} --cluster {self.cluster} --zero {self.zero} --seq {self.seq}",
            f"--micro-batch {self.micro_batch} --global-batch {self.global_batch}",
            *([f"--recompute {self.recompute}"] if self.recompute != "none" else []),
            *self.overrides,
        ]
        return " ".join(words)


@dataclass(frozen=True)
class Tip:
    text: str
    command: str
    change: Mapping[str, Any]  # fields of the problem's case; empty: nothing that the planner prices


@dataclass(frozen=True)
class Problem:
    id: str
    title: str
    case: PlannerCase
    tips: tuple[Tip, ...]


@dataclass(frozen=True)
class Rule:
    id: str
    title: str
    points: tuple[tuple[str, str], ...]
    premise: str
    formula: str


@dataclass(frozen=True)
class KeyQuestion:
    question: str
    answer: str
    exercises: tuple[str, ...]


@dataclass(frozen=True)
class Essential:
    kind: str
    reading: Reading
    command: str


@dataclass(frozen=True)
class CheatSheet:
    rules: tuple[Rule, ...]
    problems: tuple[Problem, ...]
    questions: tuple[KeyQuestion, ...]
    essential: tuple[Essential, ...]


@functools.cache
def cheat_sheet() -> CheatSheet:
    data = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return CheatSheet(
        rules=tuple(
            Rule(**{**one, "points": tuple((label, text) for label, text in one["points"])}) for one in data["rules"]
        ),
        problems=tuple(
            Problem(one["id"], one["title"], PlannerCase(**case_fields(one["case"])), tuple(
                Tip(tip["text"], tip["command"], tip.get("change", {})) for tip in one["tips"]))
            for one in data["problems"]
        ),
        questions=tuple(KeyQuestion(**{**one, "exercises": tuple(one["exercises"])}) for one in data["questions"]),
        essential=tuple(
            Essential(one["kind"], readings()[one["reading"]], one["command"]) for one in data["essential"]
        ),
    )  # fmt: skip


def case_fields(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if key == "overrides" else value for key, value in table.items()}


def changed(case: PlannerCase, change: Mapping[str, Any]) -> PlannerCase:
    return replace(case, **case_fields(change))


# --- tables ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Rows of numbers, by the keys of COLUMNS: `--json` has them as they are."""

    about: str
    rows: list[dict[str, Any]]

    @property
    def columns(self) -> list[str]:
        return [COLUMNS[key][0] for key in self.rows[0]]

    @property
    def cells(self) -> list[list[str]]:
        return [[COLUMNS[key][1](value) for key, value in row.items()] for row in self.rows]


def times(value: float) -> str:
    return f"{value:,.0f} ×" if value >= 1000 else f"{value:.3g} ×"


def percent(value: float) -> str:
    return f"{value:.0%}"


def number(value: float) -> str:
    return f"{value:.5g}"


def yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


# Key of a row → its heading, and how it is printed.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "ranks": ("ranks", str),
    "strategy": ("strategy", str),
    "format": ("weights", str),
    "of_parameter": ("bytes a parameter", number),
    "states": ("model states of a rank", binary_bytes),
    "planned_states": ("by the planner", binary_bytes),
    "exact": ("equal to the byte", yes_or_no),
    "reduce": ("gradients sent in", str),
    "saving": ("DDP holds", times),
    "zero1": ("ZeRO-1", times),
    "zero2": ("ZeRO-2", times),
    "zero3": ("ZeRO-3", times),
    "sent": ("a rank sends in a step", binary_bytes),
    "sent_ratio": ("sent, DDP = 1", times),
    "dtype": ("format", str),
    "exponent": ("bits of exponent", str),
    "fraction": ("of fraction", str),
    "largest": ("largest", number),
    "epsilon": ("epsilon", number),
    "smallest": ("smallest above 0", number),
    "as_formula": ("as by the formula", yes_or_no),
    "small_gradient": ("10⁻⁸ becomes", str),
    "large_value": ("10⁵ becomes", str),
    "sum": ("256 + 1", str),
    "policy": ("recompute", str),
    "activations": ("activations at the peak", binary_bytes),
    "saved": ("saved", percent),
    "peak": ("peak", binary_bytes),
    "planned_peak": ("by the planner", binary_bytes),
    "flops": ("FLOPs, none = 1", times),
    "what": ("", str),
    "reserved": ("reserved on a GPU", binary_bytes),
    "fits": ("fits", yes_or_no),
    "host": ("host memory of a rank", binary_bytes),
    "step_s": ("step", duration),
    "slower": ("step, none = 1", times),
}


# --- what the planner says -------------------------------------------------------------------------------

RULES_CASE = PlannerCase("mistral-7b", "8xh100", zero=3, seq=4096, micro_batch=1, global_batch=64)
RANKS = (2, 8, 64)
# What holds weights, gradients and optimizer states in how many bytes: name → overrides, another code base.
STATE_FORMATS = {
    "fp32: 4 + 4 + 8": ((), ""),
    "bf16, low bits kept: 2 + 2 + 10": (("precision.weights=bf16",), ""),
    "bf16, fp32 copy: 2 + 2 + 12": ((), "deepspeed"),
}
RING = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}  # rounds of N − 1, each of 1/N of the tensor


@functools.cache
def planned(case: PlannerCase) -> dict[str, Any]:
    """Of one rank of the run: bytes and seconds."""
    gpu = case.run.cluster.accelerator
    assert gpu is not None
    budget, time = run_budget(case.run), time_of(case.run, Machine.of(gpu))
    if time is None:
        raise SpecError(f"the step time of {case.model} on {gpu.name} is not known")
    return {
        "activations": float(budget.activations),
        "reserved": float(budget.reserved),
        "fits": bool(oom_probability(float(budget.reserved), gpu) <= RISK),
        "host": float(budget.host),
        "step_s": time.total,
    }


def states(run: RunSpec, code_base: str = "") -> float:
    """Bytes of weights, gradients and optimizer states on a rank, as this code base holds them ("": LMWorks)."""
    case = Case.of(run)
    case = case.replace(software=SOFTWARE[code_base]) if code_base else case
    return float(rank_weights(case, Place()).resident.total)


def ring_bytes(messages: Mapping[str, tuple[int, int]], ranks: int) -> float:
    """What a rank sends in rings of all ranks. `messages`: kind of collective → how many, bytes of their tensors."""
    return sum(RING[kind] * size * (ranks - 1) / ranks for kind, (_, size) in messages.items())


def planned_sent(run: RunSpec) -> float:
    return ring_bytes(by_kind(collectives(run)), run.parallel.world)


def one_micro_batch(ranks: int, **change: Any) -> PlannerCase:
    return replace(RULES_CASE, cluster=f"{ranks}xh100", global_batch=ranks, **change)


def ddp_planned() -> list[dict[str, Any]]:
    rows = []
    for ranks in RANKS:
        run = one_micro_batch(ranks, zero=0).run
        rows.append({"ranks": ranks, "states": states(run), "sent": planned_sent(run)})
    return rows


def fsdp_planned() -> list[dict[str, Any]]:
    rows = []
    for ranks in RANKS:
        for reduce in ("fp32", "bf16"):
            case = one_micro_batch(ranks, overrides=(f"precision.reduce={reduce}",))
            plain = replace(case, zero=0)
            rows.append({
                "ranks": ranks, "states": states(case.run), "saving": states(plain.run) / states(case.run),
                "reduce": reduce, "sent": planned_sent(case.run),
                "sent_ratio": planned_sent(case.run) / planned_sent(plain.run),
            })  # fmt: skip
    return rows


def zero_planned() -> list[dict[str, Any]]:
    rows = []
    for name, (overrides, code_base) in STATE_FORMATS.items():
        for ranks in (4, 8, 64, 1024):
            cases = [one_micro_batch(ranks, zero=stage, overrides=overrides) for stage in range(4)]
            whole, *sharded = [states(case.run, code_base) for case in cases]
            savings = {f"zero{stage}": whole / held for stage, held in enumerate(sharded, 1)}
            parameters = cases[0].run.model.params
            rows.append({"format": name, "of_parameter": whole / parameters, "ranks": ranks, **savings})
    return rows


NUMBER_FORMATS = {"fp32": (8, 23), "bf16": (8, 7), "fp16": (5, 10)}  # bits of exponent, and of fraction


def limits(dtype: str) -> dict[str, float]:
    exponent, fraction = NUMBER_FORMATS[dtype]
    bias = 2 ** (exponent - 1) - 1
    return {
        "largest": (2 - 2.0**-fraction) * 2.0**bias,
        "epsilon": 2.0**-fraction,
        "smallest": 2.0 ** (1 - bias - fraction),
    }


def precision_planned() -> list[dict[str, Any]]:
    rows = []
    for dtype, (exponent, fraction) in NUMBER_FORMATS.items():
        found = planned(replace(RULES_CASE, seq=2048, overrides=(f"precision.dtype={dtype}",)))
        bits = {"dtype": dtype, "exponent": exponent, "fraction": fraction}
        rows.append({**bits, **limits(dtype), "reserved": found["reserved"], "step_s": found["step_s"]})
    return rows


def recompute_planned() -> list[dict[str, Any]]:
    cases = {name: replace(RULES_CASE, micro_batch=2, recompute=name) for name in ("none", "selective", "full")}
    plain, flops = planned(cases["none"]), step_flops(cases["none"].run).hardware
    return [
        {
            "policy": name,
            "activations": planned(case)["activations"],
            "saved": 1 - planned(case)["activations"] / plain["activations"],
            "reserved": planned(case)["reserved"],
            "flops": step_flops(case.run).hardware / flops,
            "step_s": planned(case)["step_s"],
            "slower": planned(case)["step_s"] / plain["step_s"],
        }
        for name, case in cases.items()
    ]


# Rule → what the planner is asked about, and its rows.
PLANNED: dict[str, tuple[str, Callable[[], list[dict[str, Any]]]]] = {
    "ddp": ("mistral-7b (7.2B parameters), bf16 products, on H100s", ddp_planned),
    "fsdp": ("mistral-7b, bf16 products, on H100s", fsdp_planned),
    "zero": ("mistral-7b, model states of a rank: how much more DDP holds", zero_planned),
    "precision": (
        "limits by the formula; mistral-7b on 8 H100s, ZeRO-3, micro-batches of 2,048 tokens",
        precision_planned,
    ),
    "recompute": ("mistral-7b on 8 H100s, ZeRO-3, micro-batches of 2 × 4,096 tokens", recompute_planned),
}


@functools.cache
def planned_table(rule: Rule) -> Table:
    about, rows = PLANNED[rule.id]
    return Table(about, rows())


def problem_table(problem: Problem) -> Table:
    """The case as it is, with each change alone, and with all of them that go together."""
    priced = [(number, tip.change) for number, tip in enumerate(problem.tips, 1) if tip.change]
    cases = {"as it is": problem.case}
    cases |= {f"tip {number}": changed(problem.case, change) for number, change in priced}
    fields = [key for _, change in priced for key in change]
    if len(priced) > 1 and len(set(fields)) == len(fields):  # no two of them set the same
        every = functools.reduce(changed, (change for _, change in priced), problem.case)
        cases[f"tips {', '.join(str(number) for number, _ in priced)} together"] = every
    host = ["host"] if any(planned(case)["host"] for case in cases.values()) else []
    keys = ["reserved", "fits", *host, "step_s"]
    rows = [{"what": name, **{key: planned(case)[key] for key in keys}} for name, case in cases.items()]
    return Table(problem.case.command, rows)


# --- what was measured -----------------------------------------------------------------------------------


@functools.cache
def shipped_measurement() -> dict[str, Any]:
    """That of LMWorks' own machine (benchmarks/results)."""
    found: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return found


def measured_on(measured: Mapping[str, Any]) -> str:
    """The machine, and the day and commit of a measurement that was kept."""
    kept = f", {measured['date']}, commit {measured['commit']}" if "date" in measured else ""
    return f"{measured['where']}{kept}"


def measured_table(rule: Rule, measured: Mapping[str, Any]) -> Table:
    return Table(**measured["rules"][rule.id])


def as_json(measured: Mapping[str, Any]) -> dict[str, Any]:
    sheet = cheat_sheet()
    return {
        "measured_on": measured_on(measured),
        "rules": [
            {
                **asdict(rule),
                "planned": asdict(planned_table(rule)),
                "measured": asdict(measured_table(rule, measured)),
            }
            for rule in sheet.rules
        ],
        "problems": [
            {
                "id": one.id,
                "title": one.title,
                "tips": [{"text": tip.text, "command": tip.command} for tip in one.tips],
                "planned": asdict(problem_table(one)),
            }
            for one in sheet.problems
        ],
        "questions": [asdict(one) for one in sheet.questions],
        "essential": [
            {
                "kind": one.kind,
                "reading": one.reading.id,
                "title": one.reading.title,
                "link": one.reading.link,
                "command": one.command,
            }
            for one in sheet.essential
        ],
    }
