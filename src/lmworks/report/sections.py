"""The report of a study: sections of text, charts and tables, as markdown and as a single HTML page."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..spec import SpecError
from ..spec.files import write_whole
from .bars import Bars, as_svg, as_text
from .html_page import page, table


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    columns: list[str]  # none: the section has no table
    rows: list[list[str]]
    bars: Bars | None = None
    numeric: int = 0  # how many of the last columns are figures
    charts: dict[str, str] | None = None  # title → SVG, on the page alone


def sections_as_markdown(title: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    parts = [f"# {title}", *lead]
    for section in sections:
        parts += [f"## {section.title}", section.text]
        if section.bars:
            parts.append(as_text(section.bars))
        if section.columns:
            first = len(section.columns) - section.numeric
            rule = ["---:" if index >= first else "---" for index in range(len(section.columns))]
            lines = [section.columns, rule, *section.rows]
            parts.append("\n".join(f"| {' | '.join(cell.replace('|', '¦') for cell in line)} |" for line in lines))
    return "\n\n".join(parts) + "\n"


def sections_as_page(title: str, lead: str, notes: Sequence[str], sections: Sequence[Section], style: str = "") -> str:
    notes_html = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    body = [f'<header><h1>{title}</h1><p class="lead">{escape(lead)}</p></header>{notes_html}']
    for section in sections:
        body.append(f"<h2>{escape(section.title)}</h2><p>{escape(section.text)}</p>")
        if section.bars:
            body.append(f'<div class="card" style="max-width: 720px">{as_svg(section.bars)}</div><p></p>')
        if section.charts:
            cards = [f'<div class="card"><h3>{escape(name)}</h3>{svg}</div>' for name, svg in section.charts.items()]
            body.append(f'<div class="charts">{"".join(cards)}</div><p></p>')
        if section.columns:
            body.append(table(section.columns, section.rows, section.numeric))
    return page(title, "\n".join(body), style)


def check_output_folder(folder: Path) -> None:
    """Checked before the study: the output folder must be writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SpecError(f"--out {folder}: {error.strerror}") from None


def write_report_files(folder: Path, markdown: str, html: str) -> tuple[Path, Path]:
    """report.md and report.html."""
    check_output_folder(folder)
    paths = folder / "report.md", folder / "report.html"
    try:
        for path, text in zip(paths, (markdown, html), strict=True):
            write_whole(path, text)
    except OSError as error:
        raise SpecError(f"--out {folder}: {error.strerror}") from None
    return paths
