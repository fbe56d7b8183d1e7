"""The planner's price of every op of a step beside its traced time, sorted by the seconds that the planner was wrong.

The prices are those that were made when the run began (`plan.step.op_prices`, in the trace); the times are those of
`trace.op_times`. Both are summed by rows: an op of the network and a pass, a collective, waiting for the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..record.formatting import short
from ..trace.model import Trace
from ..trace.op_times import COMMUNICATION, IDLE, UNASSIGNED, op_times
from ..trace.op_work import Peaks, peaks_of
from ..trace.own_runs import recorded_spec

BLOCK = (
    "attention norm", "qkv", "head norms", "rotary", "attention", "out-projection", "residual", "mlp norm", "ffn up",
    "activation", "ffn down", "router", "experts", "shared experts",
)  # fmt: skip
FUSED = ("ffn up", "activation", "ffn down", "residual")  # one kernel with the sum after it
BY_NAME = {
    "attention norm": "attention norm", "mlp norm": "mlp norm", "final norm": "final norm", "mask": "embedding",
    "attention out": "out-projection", "gate": "ffn up", "up": "ffn up", "down": "ffn down", "router": "router",
    "experts": "experts", "clip": "gradient norm", "update": "update", "copies": "sharding",
}  # fmt: skip
BY_PART = {
    "embedding": "embedding", "norms": "head norms", "rotary": "rotary", "attention": "attention",
    "residual": "residual", "activation": "activation", "experts": "experts", "loss": "head and loss",
    "matmul": "qkv",
}  # fmt: skip
AXES = ("tp", "cp", "ep", "dp", "pp")
HOST, WAIT = ("launches", "host"), "waiting for the host"
KEYS = {"op", "part", "way", "seconds", "flops", "bytes"}  # of a price
Key = tuple[str, str]  # op and pass


@dataclass
class Row:
    """Seconds of one step of one rank; None: not priced, or not traced."""

    predicted: float | None = None
    measured: float | None = None
    flops: float = 0.0
    bytes: float = 0.0  # of memory-bound kernels

    @property
    def wrong(self) -> float:
        """Predicted less measured."""
        return (self.predicted or 0.0) - (self.measured or 0.0)

    def floor(self, peaks: Peaks | None, dtype: str) -> float | None:
        """Its products at the machine's peak, and after them its memory-bound kernels at the bandwidth."""
        if peaks is None or dtype not in peaks.flops or not peaks.bytes:
            return None
        return self.flops / peaks.flops[dtype] + self.bytes / peaks.bytes or None

    def to_dict(self, key: Key, peaks: Peaks | None, dtype: str) -> dict[str, Any]:
        spent = self.measured or 0.0
        return {
            "op": key[0],
            "pass": key[1],
            "predicted_s": self.predicted,
            "measured_s": self.measured,
            "wrong_s": self.wrong,
            "floor_s": self.floor(peaks, dtype),
            "flops_per_s": self.flops / spent if self.flops and spent else None,
            "bytes_per_s": self.bytes / spent if self.bytes and spent else None,
        }


@dataclass
class Table:
    rows: defaultdict[Key, Row] = field(default_factory=lambda: defaultdict(Row))

    def price(self, key: Key, one: Mapping[str, Any]) -> None:
        row = self.rows[key]
        row.predicted = (row.predicted or 0.0) + one["seconds"]
        row.flops += one["flops"]
        row.bytes += one["bytes"]

    def measure(self, key: Key, seconds: float) -> None:
        row = self.rows[key]
        row.measured = (row.measured or 0.0) + seconds


def predicted_ops(traces: Sequence[Trace]) -> dict[str, Any] | None:
    """The key `predicted` of a report; None of other programs' traces, and where no step was traced."""
    times = op_times(traces)
    if times is None:
        return None
    prices = next((found for trace in traces if are_prices(found := trace.about.get("step_ops"))), None)
    table, unassigned = Table(), times.get((UNASSIGNED, ""), 0.0)
    left = join_prices(table, prices or [], set(times))
    axes = {op for op, _ in table.rows if op.startswith(COMMUNICATION)}
    clip = ("gradient norm", "") in table.rows or not prices
    for (op, way), seconds in times.items():
        if op == COMMUNICATION:
            table.measure((communication_row(way, axes), ""), seconds)
        elif op == IDLE:
            table.measure((WAIT, ""), seconds)
        elif op != UNASSIGNED:
            table.measure(("update", "") if op == "gradient norm" and not clip else (op, way), seconds)
    spec = recorded_spec(traces)
    peaks, dtype = peaks_of(traces[0]), spec.precision.dtype if spec else "fp32"
    ranked = sorted(table.rows.items(), key=lambda one: -abs(one[1].wrong))
    rows = [row.to_dict(key, peaks, dtype) for key, row in ranked]
    return {
        "step_predicted_s": sum(one["seconds"] for one in prices) if prices else None,
        "step_measured_s": sum(times.values()),
        "rows": rows,
        "unassigned_predicted_s": left,
        "unassigned_measured_s": unassigned,
    }


def are_prices(found: Any) -> bool:
    """Rows as `plan.step.op_prices` writes them; those of a version with other keys are no prices."""
    return (
        isinstance(found, list) and bool(found) and all(isinstance(one, dict) and one.keys() >= KEYS for one in found)
    )


def join_prices(table: Table, prices: Iterable[Mapping[str, Any]], traced: set[Key]) -> float:
    """Adds prices to rows; returns the seconds of what has no row: stragglers, copies of optimizer states."""
    ops = {op for op, _ in traced}
    prices = list(prices)
    axes = sorted(one["op"] for one in prices if one["part"] in AXES and one["seconds"] > 0)
    has_experts = any(one["op"] == "router" for one in prices)
    shared, left = False, 0.0
    for one in prices:
        shared |= one["op"].startswith("shared ")
        if one["part"] in HOST:
            table.price((WAIT, ""), one)
        elif one["part"] == COMMUNICATION:
            table.price((collective_row(one["op"], traced), ""), one)
        elif one["part"] in (*AXES, "bubble"):
            if one["seconds"] > 0:
                table.price((axis_row(one["op"], axes), ""), one)
        elif (op := row_of(one, has_experts, shared)) is not None:
            name = merged(op, ops)
            table.price((name, "backward" if name == "accumulate gradients" else one["way"]), one)
        else:
            left += one["seconds"]
    return left


def row_of(one: Mapping[str, Any], has_experts: bool, shared: bool) -> str | None:
    name, part = one["op"], one["part"]
    if name.startswith("shared "):
        return "shared experts"
    row = BY_NAME.get(name) or BY_PART.get(part)
    if has_experts and row in ("ffn up", "ffn down", "activation"):
        return "shared experts" if shared else "experts"
    return row


def merged(op: str, traced: set[str]) -> str:
    """The row that a trace has for an op: of a compiled block there is one, of a fused MLP one with its sum."""
    if op in BLOCK and "block" in traced:
        return "block"
    if op == "sharding" and op not in traced:  # without FSDP the copies are gradients that are added up
        return "accumulate gradients"
    return "ffn" if op in FUSED and "ffn" in traced else op


LIKELY = ((("send", "recv"), ("pp", "cp")), (("all_to_all", "alltoall"), ("ep", "cp")))  # axes of a collective


# --- communication ---------------------------------------------------------------------------------------


def collective_row(kind: str, traced: set[Key]) -> str:
    """gloo reduces whole tensors for a reduce-scatter: where none was traced, its price is that of an all-reduce."""
    name = kind.replace("-", "_")
    if name == "reduce_scatter" and not any(way.startswith(name) for op, way in traced if op == COMMUNICATION):
        name = "all_reduce"
    return f"{COMMUNICATION}: {name}"


def axis_row(axis: str, axes: Sequence[str]) -> str:
    """Layouts are priced by axis. The bubble is traced as receives that wait; tp and dp have the same collectives."""
    if axis == "bubble":
        axis = "pp"
    if axis in ("tp", "dp") and {"tp", "dp"} <= set(axes):
        axis = "dp, tp"
    return f"{COMMUNICATION}: {axis}"


def communication_row(kind: str, rows: set[str]) -> str:
    """The row of a traced collective among those that were priced."""
    plain = kind.lower().replace("-", "_").lstrip("_")
    by_kind = f"{COMMUNICATION}: {plain}"
    if by_kind in rows or not rows:
        return by_kind
    if len(rows) == 1 and not any("_" in row for row in rows):
        return next(iter(rows))
    likely = next((axes for words, axes in LIKELY if plain.startswith(words)), ("dp, tp", "dp", "tp"))
    return next((f"{COMMUNICATION}: {axis}" for axis in likely if f"{COMMUNICATION}: {axis}" in rows), by_kind)


# --- as text ---------------------------------------------------------------------------------------------


def op_table(predicted: Mapping[str, Any], most: int | None = None) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: the ops, what more there is, what no op has, and the total."""
    columns = ["op", "pass", "predicted ms", "measured ms", "wrong by", "floor ms", "FLOP/s", "bytes/s"]

    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{1e3 * seconds:,.2f}"

    known = predicted["step_predicted_s"] is not None

    def line(name: str, way: str, before: float | None, after: float | None) -> list[str]:
        wrong = f"{1e3 * ((before or 0.0) - (after or 0.0)):+,.2f}" if known else "-"
        return [name, way, ms(before), ms(after), wrong]

    rows = [
        [
            *line(one["op"], one["pass"], one["predicted_s"], one["measured_s"]),
            ms(one["floor_s"]),
            "-" if one["flops_per_s"] is None else short(one["flops_per_s"]),
            "-" if one["bytes_per_s"] is None else short(one["bytes_per_s"]),
        ]
        for one in predicted["rows"]
    ]
    if most is not None and len(rows) > most:
        rest = predicted["rows"][most:]
        before = sum(one["predicted_s"] or 0.0 for one in rest) if known else None
        after = sum(one["measured_s"] or 0.0 for one in rest)
        rows = [*rows[:most], [*line(f"{len(rest)} more", "", before, after), "-", "-", "-"]]
    unassigned = (predicted["unassigned_predicted_s"] if known else None, predicted["unassigned_measured_s"])
    rows.append([*line("unassigned", "", *unassigned), "-", "-", "-"])
    rows.append([*line("total", "", predicted["step_predicted_s"], predicted["step_measured_s"]), "-", "-", "-"])
    return columns, rows


def missing_price(predicted: Mapping[str, Any]) -> str:
    """Why there is no prediction; empty: there is one."""
    if predicted["step_predicted_s"] is not None:
        return ""
    return (
        "no prices of ops: the run had no prediction of its step. A machine is measured by `lmworks plan hardware "
        "--probe`; several CPU ranks (DDP, FSDP2) need cluster.profile, which `lmworks plan calibrate --ranks 2` writes"
    )
