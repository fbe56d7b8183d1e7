"""Tables of other people's runs, as text: which columns are understood, under which names, and how a cell is read.

People write "1,024", "8.0", "8k", "Yes" or leave a cell empty. A cell that says nothing is unknown, never zero. A
column that holds a result (tokens/s, step time, memory) is recognised so that it can be left alone: a prediction must
not see what it is compared with.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...spec import SpecError

# Results, and what belongs to the table rather than to the run.
RESULT = re.compile(
    r"tok(en)?s?_?(per|sec|s(?![a-z]))|tps|wps|throughput|mfu|hfu|tflop|flops|pct|percent|step_(time|ms|s\b)|sec_(per_)?(it|step)|s_(per_)?(it|step)|seconds|iter|time|samples_per|^ms_|_it$|^it_"
    r"|seqs_per|mem|alloc|reserved|gib|_err|pred|loss|activations_|weights_opt|latency|speed|cost|price|days|util|hours"
)
SEPARATORS = re.compile(r"source|ref|match|check|_note$|date|year|mode$|act_cpu_offload|row")
DECIMAL_COMMA = re.compile(r"[~≈]?\d+,(\d{1,2}|\d{4,})\s*[a-zA-Z/]*")
EMPTY = {
    "",
    "-",
    "–",
    "—",
    "--",
    "n/a",
    "na",
    "nan",
    "null",
    "?",
    "unknown",
    "not given",
    "not stated",
    "tbd",
    "none given",
}
YES = {"true", "yes", "y", "on", "1", "✓", "✔", "x", "enabled", "t"}
NO = {"false", "no", "n", "off", "0", "✗", "disabled", "f", "none"}


def plain(header: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", header.strip().lower()).strip("_")


COLUMNS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("columns.toml").read_text(encoding="utf-8"))
NAMES = {name: column for column, facts in COLUMNS.items() for name in (column, *facts["also"])}
AXES = {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep", "data": "dp"}
OTHER = "other"  # cells of columns that nobody could place, joined: a row may say there that it is no training run


def place(column: str) -> str:
    """How an error names a column."""
    return "" if column == OTHER else f"{column} = "


def column_named(header: str) -> str:
    """ "" where nobody could place it. Of a parallel axis any spelling: "tensor parallelism", "TP (tensor) size"."""
    short = plain(header)
    if short in NAMES:
        return NAMES[short]
    words = set(short.split("_")) - {"parallel", "parallelism", "model", "size", "degree", "ways", "world", "num", "of"}
    axes = {AXES.get(word, word) for word in words}
    axis = next(iter(axes)) if len(axes) == 1 else ""
    return axis if axis in AXES.values() and short != "data" and short != "expert" else ""


@dataclass(frozen=True)
class Table:
    """Rows by our own column names; what was not understood is listed once, not row by row."""

    rows: list[dict[str, str]]
    unknown: tuple[str, ...] = ()  # columns nobody could place
    results: tuple[str, ...] = ()  # columns that hold a measurement: not looked at
    raw: tuple[dict[str, str], ...] = ()  # rows as they are written, for who knows the table


def read(path: Path) -> Table:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise SpecError(f"{path} is not a table in UTF-8 text") from None
    return parse(text, path.name)


def records(text: str, name: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows, split at whichever of comma, semicolon, tab or bar (Markdown) the header holds most of."""
    lines = text.lstrip("\ufeff \n\r").splitlines()
    if not lines:
        raise SpecError(
            f"{name} is empty; its first line names the columns, e.g. model,gpu,n_gpus,global_batch,seq_len"
        )
    sign = max(",;\t|", key=lines[0].count)
    if sign == "|":
        lines = [line.strip().strip("|") for line in lines if not re.fullmatch(r"[\s|:-]+", line)]
    header, *rows = list(csv.reader(io.StringIO("\n".join(lines)), delimiter=sign))
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    return header, rows if sign == "," else decimal_points(rows)


def decimal_points(rows: list[list[str]]) -> list[list[str]]:
    """Where commas do not part cells, one before other than three digits is a decimal comma, and so are all others of
    its column: "2,5" beside "2,512"."""
    width = max(map(len, rows), default=0)
    decimal = [any(DECIMAL_COMMA.fullmatch(row[i].strip()) for row in rows if i < len(row)) for i in range(width)]
    return [[cell.replace(",", ".") if decimal[i] else cell for i, cell in enumerate(row)] for row in rows]


def parse(text: str, name: str = "the table") -> Table:
    header, rows = records(text, name)
    places: list[tuple[int, str]] = []
    unknown, results = [], []
    for index, title in enumerate(header):
        short = plain(title)
        column = column_named(title)
        if column and not is_prose(column, [row[index] for row in rows if index < len(row)]):
            places.append((index, column))
        elif column:
            places.append((index, "note"))
        elif RESULT.search(short):
            results.append(title)
        elif short and not SEPARATORS.search(short):
            unknown.append(title)
            places.append((index, OTHER))
    if all(column in (OTHER, "note") for _, column in places):
        raise SpecError(f"{name}: no column is known; known are {', '.join(COLUMNS)}")
    raw = tuple(dict(zip(header, row, strict=False)) for row in rows)
    return Table([collect(row, places) for row in rows], tuple(unknown), tuple(results), raw)


def is_prose(column: str, cells: Iterable[str]) -> bool:
    """A column called "context" may hold the length of a sequence, or words about the run."""
    said = [cell for cell in cells if cell.strip().lower() not in EMPTY]
    return column == "seq_len" and bool(said) and not any(re.match(r"\W*\d", cell) for cell in said)


def collect(row: list[str], places: Iterable[tuple[int, str]]) -> dict[str, str]:
    """Cells by column; of two columns for one thing the first that says something counts; names, tasks, notes join."""
    cells: dict[str, str] = {}
    for index, column in places:
        cell = row[index].strip() if index < len(row) else ""
        if cell.lower() in EMPTY:
            continue
        if column in ("note", "model", "task", OTHER) and column in cells:
            cells[column] += f"; {cell}"
        else:
            cells.setdefault(column, cell)
    return cells


def number(cell: str, kilo: float = 1e3) -> float:
    """ "1,024", "8.0", "8k", "1.3B", "2^20", "16 GPUs". Raises ValueError for what is none."""
    text = re.sub(r"\(.*?\)|\[.*?\]", "", cell)  # "12288 (1536 nodes)"
    text = text.strip().lower().replace(",", "").replace("_", "").replace(" ", "").lstrip("~≈x×")
    power = re.fullmatch(r"(\d+)(?:\^|\*\*)(\d+)", text)
    if power:
        return float(int(power[1]) ** int(power[2]))
    found = re.fullmatch(r"([+-]?\d+(?:\.\d*)?(?:e[+-]?\d+)?)([kmbt])?(?:i?b|gpus?|seqs?|tokens?|x)?", text)
    if not found:
        raise ValueError(cell)
    times = kilo ** (" kmbt".index(found[2] or " "))
    return float(found[1]) * times


@dataclass
class Row:
    """One row while it is read: its cells, and the sentences about what it did not say."""

    cells: dict[str, str]
    assumed: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)  # columns whose value was chosen, not given

    def text(self, column: str) -> str:
        return self.cells.get(column, "")

    @property
    def hints(self) -> str:
        """Free text: people write there what has no column. "A vs B" says nothing about a row."""
        text = "; ".join(self.text(column) for column in ("framework", "note", "sharding") if self.text(column))
        return "; ".join(part for part in text.split("; ") if not re.search(r"\b(vs|versus|compared)\b", part))

    def real(self, column: str, kilo: float = 1e3) -> float | None:
        cell = self.text(column)
        if cell.lower() in EMPTY | {"none"}:
            return None
        try:
            value = number(cell, kilo)
        except ValueError:
            raise SpecError(f"{column} = {cell!r} is not a number") from None
        if value < 0:
            raise SpecError(f"{column} = {cell} is negative")
        return value

    def whole(self, column: str, kilo: float = 1e3) -> int | None:
        """A count. 0 is how many tables write "not used": unknown."""
        value = self.real(column, kilo)
        if value is None or value == 0:
            return None
        if value != int(value):
            raise SpecError(f"{column} = {self.text(column)} is not a whole number")
        return int(value)

    def flag(self, column: str) -> bool | None:
        word = self.text(column).lower().split("(")[0].strip()
        return True if word in YES else False if word in NO else None

    def assume(self, column: str, why: str) -> None:
        self.assumed.append(why)
        self.open.append(column)
