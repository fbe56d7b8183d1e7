"""Replay every source, and write what is reached: `thresholds.toml`, and the tables of docs/validation.md.

    python benchmarks/validation.py --data measured

Without --data the bulk sets keep the figures that are there.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmworks.cli.plan_validate import COLUMNS, PART_COLUMNS, cells, part_cells
from lmworks.plan.tables.components import components
from lmworks.plan.tables.replay import THRESHOLDS, reached, replay

PAGE = Path(__file__).parent.parent / "docs" / "validation.md"
BEGIN, END = "<!-- table: benchmarks/validation.py -->\n", "<!-- end of table -->"
PARTS, PARTS_END = "<!-- parts: benchmarks/validation.py -->\n", "<!-- end of parts -->"
OWN, OWN_END = "<!-- own: benchmarks/validation.py -->\n", "<!-- end of own -->"
OWN_RUNS = Path(__file__).parent / "results" / "plan_check_cuda.json"
OWN_COLUMNS = ("run", "allocated, GB", "error, %", "step, ms", "error, %")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in (columns, *rows)]
    return [lines[0], "|---" * len(columns) + "|", *lines[1:]]


def fill(page: str, begin: str, end: str, text: str) -> str:
    before, rest = page.split(begin)
    return before + begin + text + end + rest.split(end)[1]


def own_cells(case: dict[str, Any]) -> list[str]:
    """One of our own runs beside its prediction; what was measured before the code changed has no error."""
    old = case.get("outdated", ())
    errors = [
        "–" if figure in old else f"{100 * (case[predicted] / case[figure] - 1):+.1f}"
        for figure, predicted in (("memory", "memory_predicted"), ("step", "step_modelled"))
    ]
    return [
        case["case"].replace("data.", "").replace("parallel.", "").replace("precision.", ""),
        f"{case['memory'] / 1e9:.2f}", errors[0], f"{1e3 * case['step']:.1f}", errors[1],
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with the bulk sets")
    report = replay(parser.parse_args().data)
    before = THRESHOLDS.read_text(encoding="utf-8") if THRESHOLDS.exists() else ""
    kept = [key for key in tomllib.loads(before) if key.split("/")[0] in report.missing]
    old = [line for line in before.splitlines() if line.startswith(tuple(f'"{key}"' for key in kept))] if kept else []
    THRESHOLDS.write_text(reached(report) + "".join(f"{line}\n" for line in old), encoding="utf-8")

    page = PAGE.read_text(encoding="utf-8")
    parts = markdown(PART_COLUMNS, [part_cells(part) for part in components()])
    page = fill(page, PARTS, PARTS_END, "\n".join(parts) + "\n")
    runs = json.loads(OWN_RUNS.read_text(encoding="utf-8"))["cases"]
    page = fill(page, OWN, OWN_END, "\n".join(markdown(OWN_COLUMNS, [own_cells(run) for run in runs])) + "\n")
    inside = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    bulk = [row for row in inside.splitlines() if any(row.startswith(f"| {name} ") for name in report.missing)]
    rows = [*markdown(COLUMNS, [cells(line) for line in report.lines]), *bulk]
    PAGE.write_text(fill(page, BEGIN, END, "\n".join(rows) + "\n"), encoding="utf-8")


if __name__ == "__main__":
    main()
