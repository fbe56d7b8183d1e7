"""Points of a scaling study: one row a finished training, from a CSV file or a sweep.

Columns by any of their usual names (NAMES). With `flops` and without tokens, D = C / 6N; with tokens and without
`flops`, C = 6ND. Parameters with and without embeddings are two columns; a fit takes one of them.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec.errors import DataError, NoSuchData, SpecError, did_you_mean

Array = NDArray[np.float64]
NAMES = {
    "n": ("n", "params", "parameters"),
    "n_no_embed": ("n_no_embed", "params_no_embed"),
    "d": ("d", "tokens"),
    "flops": ("flops", "c", "compute"),
    "loss": ("loss", "val_loss"),
    "seq": ("seq", "seq_len", "context"),
    "trunk": ("trunk",),
    "lr": ("lr", "learning_rate"),
    "batch": ("batch", "batch_tokens", "global_batch"),
}
CONDITION = re.compile(r"^\s*([^<>=!]+?)\s*(<=|>=|!=|=|<|>)\s*(.+?)\s*$")
BUDGET_GAP = 0.05  # runs whose FLOPs differ by less belong to one iso-FLOP budget


@dataclass(frozen=True)
class Points:
    source: str
    loss: Array
    n: Array | None = None
    d: Array | None = None
    flops: Array | None = None
    seq: Array | None = None
    trunk: NDArray[np.intp] | None = None  # runs that branch off one trunk share a number
    n_no_embed: Array | None = None
    convention: str = "total"  # of n: parameters with embeddings ("total") or without ("no-embed")
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)  # as written
    lines: NDArray[np.intp] | None = None  # of the file, or numbers of trials
    row_name: str = "line"
    notes: tuple[str, ...] = ()  # what is missing from them

    def __len__(self) -> int:
        return len(self.loss)

    def take(self, rows: NDArray[Any]) -> Points:
        chosen = np.arange(len(self))[rows]
        arrays = {name: value[chosen] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        columns = {name: [cells[row] for row in chosen] for name, cells in self.columns.items()}
        return replace(self, **arrays, columns=columns)

    def need(self, name: str, why: str) -> Array:
        found: Array | None = getattr(self, name)
        if found is None:
            raise SpecError(f"{self.source}: {why} needs a column `{name}` (or {', '.join(NAMES[name][1:]) or 'none'})")
        return found

    def number(self, column: str) -> Array:
        """A column that no law needs by itself: a metric, a learning rate."""
        if column not in self.columns:
            raise SpecError(f"{self.source}: there is no column {column!r}{did_you_mean(column, self.columns)}")
        return np.array([self.parsed(column, row) for row in range(len(self))])

    def parsed(self, column: str, row: int) -> float:
        text = self.columns[column][row]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise DataError(f"{self.where(row)}: {column} is {text!r}, not a number; leave the row out or mend it")
        return value

    def where(self, row: int) -> str:
        number = row + 2 if self.lines is None else int(self.lines[row])
        return f"{self.source}, {self.row_name} {number}"


def read_points(
    path: str | Path,
    *,
    target: str = "",
    conditions: Sequence[str] = (),
    drop: int = 0,
    convention: str = "total",
) -> Points:
    """Of a CSV file, or of the finished trials of a sweep.

    `target`: the column of losses. `drop`: so many rows of the largest losses are left out.
    """
    if Path(path).is_dir():
        from .sweep_points import sweep_columns

        columns, notes = sweep_columns(Path(path))
        row_name = "trial"
        lines = np.array(columns["trial"], dtype=np.intp)
    else:
        (columns, lines), notes, row_name = read_columns(Path(path)), (), "line"
    points = Points(str(path), np.zeros(len(lines)), columns=columns, lines=lines, row_name=row_name, notes=notes)
    for condition in conditions:
        points = points.take(matching(points, condition))
        if not len(points):
            raise SpecError(f"{path}: no row has {condition}")
    points = with_numbers(points, target or loss_column(columns, path), convention)
    if drop:
        points = points.take(np.sort(np.argsort(points.loss, kind="stable")[: max(0, len(points) - drop)]))
    return points


def read_columns(path: Path) -> tuple[dict[str, list[str]], NDArray[np.intp]]:
    """Cells by column, and the line of each row."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except FileNotFoundError:
        raise NoSuchData(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as CSV: {error}") from None
    if not header or not rows:
        raise DataError(f"{path}: has no rows; a header such as n,d,loss and a row a run are needed")
    if repeated := {name for name in header if header.count(name) > 1}:
        raise DataError(f"{path}: the header has {sorted(repeated)[0]!r} twice")
    for line, row in rows:
        if len(row) != len(header):
            raise DataError(f"{path}, line {line}: has {len(row)} cells, the header has {len(header)}")
    columns = {name: [row[index].strip() for _, row in rows] for index, name in enumerate(header)}
    return columns, np.array([line for line, _ in rows], dtype=np.intp)


def spelt(columns: Mapping[str, Any], name: str) -> list[str]:
    """Columns that may stand for it, the usual name first."""
    return [column for usual in NAMES[name] for column in columns if column.lower() == usual]


def loss_column(columns: Mapping[str, Any], path: str | Path) -> str:
    found = spelt(columns, "loss")
    if not found:
        raise SpecError(f"{path}: has no column `loss`; it has {', '.join(columns)} (--target names another)")
    return found[0]


def with_numbers(points: Points, target: str, convention: str) -> Points:
    def column(name: str) -> Array | None:
        names = spelt(points.columns, name)
        optional = name == "seq" or (name == "n_no_embed" and convention == "total")
        if not names or (optional and "" in points.columns[names[0]]):
            return None
        values = points.number(names[0])
        if (bad := np.flatnonzero(values <= 0)).size:
            raise DataError(f"{points.where(int(bad[0]))}: {names[0]} is {values[bad[0]]:g}; it must be more than 0")
        return values

    loss = points.number(target)
    if (bad := np.flatnonzero(loss <= 0)).size:
        raise DataError(f"{points.where(int(bad[0]))}: {target} is {loss[bad[0]]:g}; a loss is more than 0")
    n, bare, d, flops = (column(name) for name in ("n", "n_no_embed", "d", "flops"))
    if convention == "no-embed":
        if bare is None:
            raise SpecError(f"{points.source}: --params no-embed needs a column `n_no_embed` (or params_no_embed)")
        n = bare
    if flops is None and n is not None and d is not None:
        flops = 6 * n * d
    if d is None and n is not None and flops is not None:
        d = flops / (6 * n)
    if flops is None:
        raise SpecError(f"{points.source}: needs columns n and d, or flops; it has {', '.join(points.columns)}")
    trunk = None
    if names := spelt(points.columns, "trunk"):
        trunk = np.unique(np.array(points.columns[names[0]]), return_inverse=True)[1]
    return replace(
        points, loss=loss, n=n, d=d, flops=flops, seq=column("seq"), trunk=trunk, n_no_embed=bare, convention=convention
    )


def matching(points: Points, condition: str) -> NDArray[np.bool_]:
    """`column=a|b`, `column!=a`, `column<1e9`, …"""
    parts = CONDITION.match(condition)
    if not parts:
        raise SpecError(f"--where {condition}: write COLUMN=VALUE, COLUMN=A|B, COLUMN!=VALUE, or COLUMN<NUMBER")
    column, sign, value = parts.groups()
    if column not in points.columns:
        raise SpecError(f"--where {condition}: there is no column {column!r}{did_you_mean(column, points.columns)}")
    if sign in ("=", "!="):
        same = np.array([equal(cell, value) for cell in points.columns[column]])
        return same if sign == "=" else ~same
    try:
        limit = float(value)
    except ValueError:
        raise SpecError(f"--where {condition}: {value!r} is not a number") from None
    cells = points.number(column)
    compare = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal}[sign]
    return np.asarray(compare(cells, limit), dtype=bool)


def equal(cell: str, wanted: str) -> bool:
    for value in wanted.split("|"):
        if cell == value.strip():
            return True
        try:
            if float(cell) == float(value):
                return True
        except ValueError:
            continue
    return False


def budgets(flops: Array) -> NDArray[np.intp]:
    """The number of each row's iso-FLOP budget: neighbours whose FLOPs are within 5 % are of one budget."""
    order = np.argsort(flops)
    steps = np.diff(np.log(flops[order])) > math.log1p(BUDGET_GAP)
    numbers = np.empty(len(flops), dtype=np.intp)
    numbers[order] = np.r_[0, np.cumsum(steps)]
    return numbers
