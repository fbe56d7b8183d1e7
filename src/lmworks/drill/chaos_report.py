"""Report of random faults: chaos.md and chaos.json."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..report.html_page import Section, sections_as_markdown
from ..spec.files import write_whole
from .chaos import FAULTS, SERVERS, STREAMS, Result


def trial_line(result: Result, total: int) -> str:
    faults = ", ".join(f"{one['fault']} of {one['server']}" for one in result.faults)
    verdict = "ok" if result.ok else f"FAILED: {'; '.join(result.problems[:3])}"
    return f"[{result.trial + 1}/{total}] {faults}: {result.migrations} migrated, {result.seconds:.1f} s: {verdict}"


def write_chaos_report(results: Sequence[Result], out: Path) -> Path:
    table = out / "chaos.md"
    write_whole(table, as_markdown(results))
    write_whole(out / "chaos.json", json.dumps([asdict(one) for one in results], indent=1) + "\n")
    return table


def as_markdown(results: Sequence[Result]) -> str:
    failed = [one for one in results if not one.ok]
    streams = sum(sum(one.ends.values()) for one in results)
    lead = (
        f"Seed {results[0].seed}; {SERVERS} servers, {STREAMS} streams a trial, {streams:,} streams in all, "
        f"{sum(one.migrations for one in results):,} continued by another server; "
        f"{sum(one.tokens_read for one in results):,} tokens read, those of cut streams included, and "
        f"{sum(one.tokens_billed for one in results):,} billed; {os.cpu_count()} cores."
    )
    ends: dict[str, int] = {}
    for result in results:
        for end, count in result.ends.items():
            ends[end] = ends.get(end, 0) + count
    sections = [
        Section("Streams", "As clients saw them.", ["end", "streams"], [[end, f"{n:,}"] for end, n in ends.items()]),
        Section("Faults", "", ["fault", "what", "planted", "trials with a problem"], fault_rows(results)),
        Section("Problems", "" if failed else "None.", ["trial", "faults", "problem"] if failed else [], [
            [str(one.trial), ", ".join(fault["fault"] for fault in one.faults), "; ".join(one.problems[:3])]
            for one in failed
        ]),
    ]  # fmt: skip
    return sections_as_markdown(f"{len(results)} trials, {len(failed)} with a problem", [lead], sections)


def fault_rows(results: Sequence[Result]) -> list[list[str]]:
    rows = []
    for fault in FAULTS:
        having = [one for one in results if any(planted["fault"] == fault.name for planted in one.faults)]
        rows.append([fault.name, fault.what, str(len(having)), str(sum(not one.ok for one in having))])
    return rows
