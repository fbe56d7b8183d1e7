"""Rows of a suite's data: JSON lines, JSON, parquet, csv, or a dataset of the Hugging Face hub."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..data.sources import hf_stream, parquet_file
from ..spec.errors import DataError, NoSuchData

Row = dict[str, Any]


def read_rows(source: str, what: str = "data") -> Iterator[tuple[str, Row]]:
    """Each with its place, for errors. `what`: the key that names the source."""
    if source.startswith("hf:"):
        yield from hub_rows(source)
        return
    path = Path(source)
    if not path.is_file():
        raise NoSuchData(f"{what} = {source!r}: there is no such file; give one, or hf:NAME:CONFIG:SPLIT")
    if path.suffix == ".parquet":
        rows = (row for batch in parquet_file(source).iter_batches() for row in batch.to_pylist())
        yield from ((f"{source} row {number}", row) for number, row in enumerate(rows, 1))
        return
    text = read(path)
    if path.suffix == ".csv":
        yield from ((f"{source} row {number}", row) for number, row in enumerate(csv.DictReader(text.splitlines()), 1))
    elif path.suffix == ".json":
        yield from json_rows(source, text)
    else:
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield f"{source} line {number}", as_row(f"{source} line {number}", decoded(source, number, line))


def read(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def decoded(source: str, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"{source} line {number} is not JSON: {error}") from None


def json_rows(source: str, text: str) -> Iterator[tuple[str, Row]]:
    """A list of objects, or an object of columns or of id → object."""
    found = decoded(source, 1, text)
    rows = list(found.values()) if isinstance(found, dict) else found
    if not isinstance(rows, list):
        raise DataError(f"{source} is neither a list of objects nor an object of them")
    yield from ((f"{source} entry {n}", as_row(f"{source} entry {n}", row)) for n, row in enumerate(rows, 1))


def as_row(place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{place} is not a JSON object")
    return value


def hub_rows(source: str) -> Iterator[tuple[str, Row]]:
    records = iter(hf_stream(source))
    number = 0
    while True:
        number += 1
        try:
            record = next(records)
        except StopIteration:
            return
        except Exception as error:  # the network, mostly
            raise DataError(f"{source} broke off: {' '.join(str(error).split())[:300]}; run again") from None
        yield f"{source} row {number}", dict(record)


def field_of(row: Mapping[str, Any], name: str, place: str) -> Any:
    if name not in row or row[name] is None:
        raise DataError(f"{place}: no field {name!r}; it has {', '.join(row)} (a suite's `fields` renames them)")
    return row[name]
