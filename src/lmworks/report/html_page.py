"""The page template: one HTML file with inline style and script, for offline use, in light and dark mode.

The report of a study: sections of text, charts and tables, as markdown and as a single HTML page.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..spec import SpecError
from ..spec.files import write_whole
from .svg import Bars, as_svg, as_text

# default-src 'none': the page cannot load external resources.
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
"""

STYLE = """
:root { --page: #f7f7f5; --card: #ffffff; --ink: #17181a; --soft: #5d6066; --line: #e3e3df; --grid: #e9e9e6;
  --s0: #2a6fd6; --s1: #d9622b; --s2: #1e9a83; --s3: #b0820c; --s4: #8c8f96;
  --good: #1c7c4a; --bad: #b93a32; --busy: #2a6fd6; --idle: #8a6d1a; }
@media (prefers-color-scheme: dark) { :root { --page: #131416; --card: #1c1d20; --ink: #ececea; --soft: #a2a5ab;
  --line: #2f3135; --grid: #303339; --s0: #5b9bf3; --s1: #ee8a55; --s2: #45bfa6; --s3: #d8ab3c; --s4: #7d8087;
  --good: #5cc48d; --bad: #ef7b72; --busy: #5b9bf3; --idle: #d8ab3c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 64px; }
header { display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: center; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 36px 0 12px; }
h3 { font-size: 14px; margin: 0 0 8px; }
.lead, .note { color: var(--soft); margin: 4px 0 0; flex-basis: 100%; }
.note { font-size: 13px; margin-top: 8px; }
.pill { font-size: 13px; font-weight: 600; padding: 1px 10px; border-radius: 99px; border: 1px solid currentColor; }
.finished { color: var(--good); } .failed { color: var(--bad); } .running { color: var(--busy); }
.interrupted, .new { color: var(--idle); }
.outside, .note.outside { color: var(--bad); font-weight: 600; } .note.busy { color: var(--idle); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 14px; margin-top: 20px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 0; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles dd small { display: block; font-size: 12px; font-weight: 400; color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 14px; }
.scroll { overflow-x: auto; padding: 4px 16px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 16px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 500; font-size: 13px; }
.number { text-align: right; white-space: nowrap; }
.whole { white-space: nowrap; }
td:last-child, th:last-child { padding-right: 0; }
td code { overflow-wrap: anywhere; }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
pre { overflow-x: auto; margin: 0; }
summary { cursor: pointer; font-weight: 600; }
details pre { margin-top: 10px; }
svg { display: block; width: 100%; height: auto; }
svg .grid { stroke: var(--grid); } svg .cursor { stroke: var(--soft); stroke-dasharray: 3 3; }
svg .axis { fill: var(--soft); font-size: 12px; } svg .title { font-weight: 600; }
.end { text-anchor: end; } .mid { text-anchor: middle; }
polyline { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
polyline.faint { stroke-width: 1; opacity: .38; }
polygon { fill: var(--c); stroke: var(--card); stroke-width: .5; }
circle { fill: var(--c); }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); } .s3 { --c: var(--s3); } .s4 { --c: var(--s4); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0; padding: 0; list-style: none; }
.legend, .readout { font-size: 13px; color: var(--soft); font-variant-numeric: tabular-nums; }
.readout { margin: 2px 0; min-height: 1.5em; color: var(--ink); white-space: pre-line; }
.mark line { stroke: var(--c); stroke-width: 1; opacity: .7; } .mark text { fill: var(--c); font-size: 12px; }
.legend b { color: var(--c); font-weight: 400; margin-right: 6px; }
.spike { --c: var(--bad); } .restart { --c: var(--idle); } .save { --c: var(--good); }
.legend i { display: inline-block; width: 12px; height: 3px; border-radius: 2px; background: var(--c);
  margin-right: 6px; vertical-align: middle; } .legend .faint i { opacity: .45; }
.empty { color: var(--soft); }
@media (max-width: 640px) {
  main { padding: 20px 14px 48px; }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px; }
  .scroll table { width: max-content; min-width: 100%; }
  .scroll td { max-width: 70vw; }
  svg[data-chart] text { font-size: 17px; }
}
@media print { body { background: none; } .card { break-inside: avoid; } }
"""

# Shows the values under the pointer, from the chart's data-chart attribute.
SCRIPT = """
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const { place, x: name, lines, marks } = JSON.parse(svg.dataset.chart);
  const cursor = svg.querySelector(".cursor"), readout = svg.parentElement.querySelector(".readout");
  const nearest = (points, x) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
  svg.addEventListener("pointermove", event => {
    const at = (event.offsetX / svg.clientWidth) * svg.viewBox.baseVal.width;
    const wanted = place.low + (at - place.left) / (place.right - place.left) * (place.high - place.low);
    const step = nearest(lines[0].points, wanted)[0];
    const x = place.left + (step - place.low) / (place.high - place.low) * (place.right - place.left);
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.setAttribute("visibility", "visible");
    const values = lines.filter(line => line.points.length).map(line => {
      const [from, value] = nearest(line.points, step);
      return `${line.name} ${value}` + (from === step ? "" : ` (at ${from})`);
    });
    const close = Math.abs(place.high - place.low) / 100;
    const near = marks.flatMap(mark => mark.points.filter(([x]) => Math.abs(x - wanted) <= close)
      .map(([x, text]) => `${mark.name} at ${x}: ${text}`));
    readout.textContent = [`${name} ${step}:  ${values.join("  ·  ")}`, ...near].join("\\n");
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden"); readout.textContent = "\\u00a0";
  });
}
"""


def page(title: str, body: str, style: str = "", script: str = SCRIPT) -> str:
    """A complete document. `body` is HTML, `title` is text. `style` is added, `script` replaces the default."""
    return (
        f"{HEAD}<title>{escape(title)}</title>\n<style>{STYLE}{style}</style></head>\n"
        f"<body><main>\n{body}\n</main>\n<script>{script}</script></body></html>\n"
    )


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
