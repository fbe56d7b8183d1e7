"""Reports of drills: report.json, report.md and report.html of one folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from ..report.html_page import Section, check_output_folder, sections_as_markdown, sections_as_page, write_report_files
from ..spec.files import write_whole
from .incident import Report

RECORD = "report.json"
OUTPUT_LINES = 14  # of a command


def write_report(reports: Sequence[Report], out: Path, day: date) -> tuple[Path, Path]:
    check_output_folder(out)
    content = {"date": day.isoformat(), "drills": [one.to_dict() for one in reports]}
    write_whole(out / RECORD, json.dumps(content, indent=1) + "\n")
    passed = sum(one.ok for one in reports)
    title = f"{passed} of {len(reports)} drills passed"
    declared = next((one.declared for one in reports if one.declared), None)  # drills that could not run have none
    lead = f"{day.isoformat()}." + (f" {declared_text(declared)}" if declared else "")
    sections = [summary(reports), *(section for one in reports for section in sections_of(one))]
    return write_report_files(
        out, sections_as_markdown(title, [lead], sections), sections_as_page(title, lead, (), sections)
    )


def declared_text(declared: dict[str, Any]) -> str:
    health, timeouts, limits = declared["gateway"]["health"], declared["gateway"]["timeouts"], declared["limits"]
    return (
        f"Shorter than in production: windows of alerts are divided by {declared['alert windows divided by']}, "
        f"scrapes are {declared['scrape_interval']:g} s apart, probes {health['interval']:g} s, a stream may stand "
        f"still for {timeouts['idle']:g} s, an engine for {limits['kill_seconds']:g} s. SLO: the right answer, its "
        f"first text within {declared['slo_ttft']:g} s. {declared['cores']} cores, load average "
        f"{declared['load average']:.1f}."
    )


def summary(reports: Sequence[Report]) -> Section:
    columns = ["drill", "what", "alerts", "lost", "wrong", "failed", "refused", "SLO meanwhile", "over after", "passed"]
    return Section("Drills", "", columns, [summary_row(one) for one in reports])


def summary_row(report: Report) -> list[str]:
    ends: dict[str, int] = {}
    for stretches in report.tenants.values():
        for seen in stretches.values():
            for end, count in seen["ends"].items():
                ends[end] = ends.get(end, 0) + count
    during = [stretches["during"] for stretches in report.tenants.values() if stretches["during"]["requests"]]
    kept = sum(one["within_slo"] * one["requests"] for one in during) / (sum(one["requests"] for one in during) or 1)
    checks = {one.name: one for one in report.checks}
    alerts = [
        f"{name.removeprefix('alert ')} {one.observed.removesuffix(' after the fault')}"
        for name, one in checks.items() if name.startswith("alert ")
    ]  # fmt: skip
    return [
        report.drill, report.what, "; ".join(alerts) or "-",
        *(str(ends.get(end, 0)) for end in ("lost", "wrong", "failed", "refused")), f"{kept:.0%}",
        checks["the incident ends"].observed.removeprefix("after ") if report.tenants else "-",
        "yes" if report.ok else "NO",
    ]  # fmt: skip


def sections_of(report: Report) -> list[Section]:
    checks = [
        [one.name, one.expected, one.observed, "yes" if one.ok else "NO"] if one.ran else
        [one.name, one.expected, one.observed, "-"] for one in report.checks
    ]  # fmt: skip
    moments = [[f"{one.at:.1f}", one.kind, one.what] for one in report.timeline]
    tenants = [
        [name, stretch, str(seen["requests"]), f"{seen['within_slo']:.1%}", f"{seen['ttft_p50']:.3f}",
         f"{seen['ttft_p99']:.3f}", f"{seen['longest_gap']:.2f}",
         ", ".join(f"{count} {end}" for end, count in seen["ends"].items())]
        for name, stretches in report.tenants.items() for stretch, seen in stretches.items()
    ]  # fmt: skip
    columns = ["tenant", "", "requests", "within SLO", "TTFT p50", "p99", "longest gap", "ends"]
    text = f"{report.what}. {'Passed' if report.ok else 'NOT passed'}."
    return [
        Section(report.drill, text, ["check", "expected", "observed", "ok"], checks),
        Section(f"{report.drill}: timeline", "Seconds of the drill.", ["s", "", "what"], moments),
        Section(f"{report.drill}: what users saw", "Seconds.", columns, tenants),
        *(
            Section(f"{report.drill}: {one.line}", "", ["output"], [[line] for line in shortened(one.output)])
            for one in report.commands if one.output
        ),
    ]  # fmt: skip


def shortened(output: str) -> list[str]:
    lines = output.splitlines()
    return lines if len(lines) <= OUTPUT_LINES else [*lines[:OUTPUT_LINES], f"… {len(lines) - OUTPUT_LINES} more lines"]
