"""Tables of trial outcomes: by fault, by (fault, phase) pair, and the failures."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from .faults import FAULTS, LAYOUTS, PAIRS, TOLERANCE
from .harness import Outcome

SUMMARY = ("fault", "trials", "pairs", "verdict", "ok", "median s", "longest s")


def summary_rows(outcomes: Sequence[Outcome]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for fault in FAULTS:
        of_fault = [outcome for outcome in outcomes if outcome.fault == fault.name]
        if not of_fault:
            continue
        times = sorted(outcome.seconds for outcome in of_fault)
        injected = {outcome.phase for outcome in of_fault}
        rows.append(
            [
                fault.name,
                len(of_fault),
                f"{len(injected)} of {len(fault.phases)}",
                fault.verdict,
                sum(outcome.ok for outcome in of_fault),
                f"{times[len(times) // 2]:.1f}",
                f"{times[-1]:.1f}",
            ]
        )
    return rows


def fault_rows() -> list[list[str]]:
    """Every fault, its legal phases and the expected verdict."""
    return [
        [
            fault.name,
            fault.description,
            " ".join(fault.phases),
            fault.verdict + (f" (async: {fault.verdict_async})" if fault.verdict_async else ""),
            layouts_text(fault.layouts),
            "/".join(fault.saves),
        ]
        for fault in FAULTS
    ]


def layouts_text(layouts: tuple[str, ...]) -> str:
    """The layouts, or "all but …" where that is shorter."""
    without = [name for name in LAYOUTS if name not in layouts]
    return "all" + (f" but {', '.join(without)}" if without else "") if len(without) < 3 else " ".join(layouts)


def write_report(outcomes: Sequence[Outcome], seed: int, seconds: float, out: Path) -> tuple[Path, Path]:
    """chaos.md and chaos.json; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    table, record = out / "chaos.md", out / "chaos.json"
    table.write_text(as_markdown(outcomes, seed, seconds), encoding="utf-8")
    record.write_text(json.dumps([outcome.to_dict() for outcome in outcomes], indent=1) + "\n", encoding="utf-8")
    return table, record


def as_markdown(outcomes: Sequence[Outcome], seed: int, seconds: float) -> str:
    failed = [outcome for outcome in outcomes if not outcome.ok]
    pairs = {(outcome.fault, outcome.phase) for outcome in outcomes}
    lines = [
        f"# {len(outcomes)} trials, {len(failed)} lost",
        "",
        f"Seed {seed}; {len(pairs)} of {len(PAIRS)} legal pairs of fault and phase; {seconds / 60:.0f} minutes. "
        f"{environment_text()}. Tolerance of `close`: {TOLERANCE:g}, relative.",
        "",
        *markdown_table(SUMMARY, summary_rows(outcomes)),
        "",
        *markdown_table(("verdict", "trials"), counts(outcomes, "verdict")),
        "",
        *markdown_table(("layout", "trials"), counts(outcomes, "layout")),
        "",
        *markdown_table(("saves", "trials"), counts(outcomes, "saves")),
        "",
        *markdown_table(("job", "trials"), counts(outcomes, "job")),
    ]
    if failed:
        lines += ["", "## What failed", ""]
        lines += [f"- `{o.repeat}`: {o.fault} in {o.phase} ({o.layout}): {o.verdict}: {o.problem}" for o in failed]
    lines += ["", "## Every trial", ""]
    columns = ("trial", "fault", "phase", "layout", "saves", "job", "injected", "attempts", "s", "verdict", "ok")
    lines += markdown_table(columns, [trial_row(outcome) for outcome in outcomes])
    return "\n".join(lines) + "\n"


def trial_row(outcome: Outcome) -> list[Any]:
    o = outcome
    ok = "yes" if o.ok else "NO"
    return [o.trial, o.fault, o.phase, o.layout, o.saves, o.job, o.injected, o.attempts, o.seconds, o.verdict, ok]


def counts(outcomes: Sequence[Outcome], key: str) -> list[list[Any]]:
    values = [getattr(outcome, key) for outcome in outcomes]
    return [[value, values.count(value)] for value in sorted(set(values))]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(str(cell) for cell in line)} |" for line in lines]


def environment_text() -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    at = f" at {commit.stdout.strip()}" if commit.returncode == 0 else ""
    return f"LMWorks {__version__}{at}, torch {torch.__version__}, {os.cpu_count()} cores, {platform.system()}"


def progress_line(outcome: Outcome, total: int) -> str:
    """One line of progress."""
    o = outcome
    how = f"{o.verdict} ({o.seconds:.1f} s)" if o.ok else f"FAILED, {o.verdict}: {o.problem}"
    return f"[{o.trial + 1}/{total}] {o.fault} in {o.phase}, {o.layout} {o.saves} {o.job}: {how}"
