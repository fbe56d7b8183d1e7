"""Replay every source, and write what is reached: `thresholds.toml`, and the table of docs/validation.md.

    python benchmarks/validation.py --data measured

Without --data the bulk sets keep the figures that are there.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

from lmworks.plan.tables.components import components
from lmworks.plan.tables.replay import THRESHOLDS, reached, replay
from lmworks.plan.tables.validate import Line

PAGE = Path(__file__).parent.parent / "docs" / "validation.md"
BEGIN, END = "<!-- table: benchmarks/validation.py -->\n", "<!-- end of table -->"
PARTS, PARTS_END = "<!-- parts: benchmarks/validation.py -->\n", "<!-- end of parts -->"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def table_row(line: Line) -> str:
    name = f"{line.source} {line.group}".strip()
    figure = {"tokens_per_s": "tokens/s", "step_s": "step time"}.get(line.figure, line.figure)
    figure += " (formula)" if line.kind == "formula" else ""
    blind, guess, sure = line.blind, line.baseline, line.sure
    fitted = percent(line.fitted.mape) + (f" ({percent(sure.mape)} without suspects)" if sure else "")
    cells = [
        name, figure, str(line.fitted.rows), fitted, percent(line.fitted.p90), f"{100 * line.fitted.bias:+.1f}",
        percent(blind.mape if blind else None), percent(guess.mape if guess else None),
        percent(guess.guess_mape if guess else None), f"{line.fitted.worst} ({100 * line.fitted.worst_error:+.0f})",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def fill(page: str, begin: str, end: str, text: str) -> str:
    before, rest = page.split(begin)
    return before + begin + text + end + rest.split(end)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with the bulk sets")
    report = replay(parser.parse_args().data)
    before = THRESHOLDS.read_text(encoding="utf-8") if THRESHOLDS.exists() else ""
    kept = [key for key in tomllib.loads(before) if key.split("/")[0] in report.missing]
    old = [line for line in before.splitlines() if line.startswith(tuple(f'"{key}"' for key in kept))] if kept else []
    THRESHOLDS.write_text(reached(report) + "".join(f"{line}\n" for line in old), encoding="utf-8")

    head = [
        "| source | figure | rows | fitted | p90 | bias | blind | same MFU | MFU 40% | worst row |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    page = PAGE.read_text(encoding="utf-8")
    parts = ["| what | how | rows | median | mean | p90 |", "|---|---|---|---|---|---|"]
    parts += [
        f"| {part.name} | {part.how} | {part.rows or '–'} | {' | '.join(map(percent, part.spread))} |"
        for part in components()
    ]
    page = fill(page, PARTS, PARTS_END, "\n".join(parts) + "\n")
    inside = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    bulk = [row for row in inside.splitlines() if any(row.startswith(f"| {name} ") for name in report.missing)]
    rows = "\n".join([*head, *(table_row(line) for line in report.lines), *bulk]) + "\n"
    PAGE.write_text(fill(page, BEGIN, END, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
