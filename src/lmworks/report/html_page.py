"""HTML pages: one file with inline style (page.css) and script (page.js: values under the pointer), for offline use, in
light and dark mode; and the report of a study, sections of text, charts and tables, as markdown and as a page.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from ..spec import SpecError
from ..spec.files import write_whole
from .svg import Bars, as_svg, as_text

# default-src 'none': the page cannot load external resources.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
"""


def page(title: str, body: str, style: str = "", script: str = "", policy: str = POLICY) -> str:
    """A complete document. `body` is HTML, `title` is text. `style` is added, `script` replaces the default."""
    return (
        f"{HEAD.format(policy=policy)}<title>{escape(title)}</title>\n<style>{resource_text('page.css')}{style}</style></head>\n"
        f"<body><main>\n{body}\n</main>\n<script>{script or resource_text('page.js')}</script></body></html>\n"
    )


def resource_text(name: str) -> str:
    """A file of this package."""
    return (files(__package__) / name).read_text(encoding="utf-8")


# --- pieces of a page: arguments are text and are escaped, except `inside` and charts ---------------------


def header(title: str, lead: str, status: str = "") -> str:
    pill = f'<span class="pill {status.replace(" ", "-")}">{status}</span>' if status else ""
    return f'<header><h1>{escape(title)}</h1>{pill}<p class="lead">{escape(lead)}</p></header>'


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    """Cards with a name, a figure and a note."""
    cards = (
        f'<div class="card"><dt>{escape(name)}</dt><dd>{escape(figure)}'
        f"<small>{escape(note) or '&nbsp;'}</small></dd></div>"
        for name, figure, note in figures
    )
    return f'<dl class="tiles">{"".join(cards)}</dl>'


def card(title: str, inside: str) -> str:
    return f'<div class="card">{f"<h3>{escape(title)}</h3>" if title else ""}{inside}</div>'


def chart_cards(charts: Mapping[str, str]) -> str:
    """Charts (SVG) by title."""
    return f'<div class="charts">{"".join(card(title, chart) for title, chart in charts.items())}</div>'


def note(text: str, style: str = "") -> str:
    return f'<p class="note{f" {style}" if style else ""}">{escape(text)}</p>'


class StyledCell(str):
    """A table cell with a CSS class."""

    mark: str

    def __new__(cls, text: str, mark: str) -> StyledCell:
        cell = super().__new__(cls, text)
        cell.mark = mark
        return cell


def table(columns: list[str], rows: list[list[str]], numeric: int = 0, whole: int = 0) -> str:
    """Cells are text, escaped here; the last `numeric` columns are figures, the first `whole` do not wrap."""

    def kind(index: int, cell: str) -> str:
        name = "number" if index >= len(columns) - numeric else "whole" if index < whole else ""
        if isinstance(cell, StyledCell):
            return f' class="{name} {cell.mark}"'
        return f" class={name}" if name else ""

    def cells(tag: str, row: list[str]) -> str:
        return "".join(f"<{tag}{kind(i, cell)}>{escape(cell)}</{tag}>" for i, cell in enumerate(row))

    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="card scroll"><table><tr>{cells("th", columns)}</tr>{lines}</table></div>'


# --- sections --------------------------------------------------------------------------------------------


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
    body = [header(title, lead) + "".join(map(note, notes))]
    for section in sections:
        body.append(f"<h2>{escape(section.title)}</h2><p>{escape(section.text)}</p>")
        if section.bars:
            body.append(f'<div class="card" style="max-width: 720px">{as_svg(section.bars)}</div><p></p>')
        if section.charts:
            body.append(f"{chart_cards(section.charts)}<p></p>")
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
