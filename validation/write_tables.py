"""Replay every source, and write what is reached: `thresholds.toml`, and the tables of docs/validation.md.

    python validation/write_tables.py --data measured

Without --data the bulk sets keep the figures that are there.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path

from lmworks.cli.plan_validate import COLUMNS, PART_COLUMNS, cells, part_cells
from lmworks_validation.components import components
from lmworks_validation.replay import THRESHOLDS, current_errors, mean_of, memory, replay, seconds
from lmworks_validation.sources import SOURCES, Measured

PAGE = Path(__file__).parent.parent / "docs" / "validation.md"
BEGIN, END = "<!-- table: validation/write_tables.py -->\n", "<!-- end of table -->"
PARTS, PARTS_END = "<!-- parts: validation/write_tables.py -->\n", "<!-- end of parts -->"
OWN, OWN_END = "<!-- own: validation/write_tables.py -->\n", "<!-- end of own -->"
SECTIONS = ("data.", "parallel.", "precision.", "model.")
OWN_COLUMNS = ("run", "allocated, GB", "error, %", "step, ms", "error, %")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in (columns, *rows)]
    return [lines[0], "|---" * len(columns) + "|", *lines[1:]]


def fill(page: str, begin: str, end: str, text: str) -> str:
    before, rest = page.split(begin)
    return before + begin + text + end + rest.split(end)[1]


def own_cells(run: Measured) -> list[str]:
    """One of our own runs beside its prediction; blocks that recompute in several ways have no closed form."""
    held, error = "–", "–"
    if run.allocated:
        held = f"{run.allocated / 1e9:.2f}"
        error = error if run.mixed else f"{100 * (memory(run.case)['allocated'] / run.allocated - 1):+.1f}"
    took = run.step_s or 0.0
    name = " ".join(word.split(".", 1)[1] if word.startswith(SECTIONS) else word for word in run.label.split())
    return [name, held, error, f"{1e3 * took:.1f}", f"{100 * (mean_of(run, seconds) / took - 1):+.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with the bulk sets")
    report = replay(parser.parse_args().data)
    before = THRESHOLDS.read_text(encoding="utf-8") if THRESHOLDS.exists() else ""
    kept = [key for key in tomllib.loads(before) if key.split("/")[0] in report.missing]
    old = [line for line in before.splitlines() if line.startswith(tuple(f'"{key}"' for key in kept))] if kept else []
    THRESHOLDS.write_text(current_errors(report) + "".join(f"{line}\n" for line in old), encoding="utf-8")

    page = PAGE.read_text(encoding="utf-8")
    parts = markdown(PART_COLUMNS, [part_cells(part) for part in components()])
    page = fill(page, PARTS, PARTS_END, "\n".join(parts) + "\n")
    runs = [own_cells(run) for run in SOURCES["lmworks"].rows() or []]
    page = fill(page, OWN, OWN_END, "\n".join(markdown(OWN_COLUMNS, runs)) + "\n")
    inside = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    bulk = [row for row in inside.splitlines() if any(row.startswith(f"| {name} ") for name in report.missing)]
    rows = [*markdown(COLUMNS, [cells(line) for line in report.lines]), *bulk]
    PAGE.write_text(fill(page, BEGIN, END, "\n".join(rows) + "\n"), encoding="utf-8")


if __name__ == "__main__":
    main()
