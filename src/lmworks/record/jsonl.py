"""Append-only JSON lines that survive a kill: one record a line, one write a record.

A process killed in the middle of a write, or a disk that fills up, can leave a last line without its end.
Readers pass over it; the next writer cuts it off, so that it never becomes a broken line inside the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from ..spec.errors import LMWorksError


class LineWriter:
    """Appends records to one file. Every record reaches the operating system before `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            mend_tail(self.descriptor)
        except OSError as error:
            raise LMWorksError(f"cannot write {path}: {error.strerror}") from None

    def append(self, record: Mapping[str, Any]) -> None:
        line = encode(record)
        try:
            while line:  # a nearly full disk takes a part; the next write then says why
                line = line[os.write(self.descriptor, line) :]
        except OSError as error:
            raise LMWorksError(f"cannot write {self.path}: {error.strerror}") from None

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def encode(record: Mapping[str, Any]) -> bytes:
    """One line of strict JSON. A number that is not finite becomes null, and `nonfinite` says what it was."""
    nonfinite = {
        key: str(value) for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)
    }
    if nonfinite:
        record = {**record, **dict.fromkeys(nonfinite), "nonfinite": nonfinite}
    return json.dumps(without_nan(record), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def without_nan(value: Any) -> Any:
    """Inside lists and tables a number that is not finite is written as a word, e.g. "nan"."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def mend_tail(descriptor: int) -> None:
    """Give a whole last line its missing newline, and cut off a torn one."""
    size = os.fstat(descriptor).st_size
    start, tail = size, b""
    while start and b"\n" not in tail:
        step = min(start, 4096)
        start -= step
        tail = os.pread(descriptor, step, start) + tail
    torn = tail[tail.rfind(b"\n") + 1 :]
    if not torn:
        return
    if decode(torn) is None:
        os.ftruncate(descriptor, size - len(torn))
    else:
        os.write(descriptor, b"\n")


def decode(line: bytes) -> dict[str, Any] | None:
    """The record, or None where the line does not hold a whole one."""
    try:
        record = json.loads(line)
    except ValueError:  # bad JSON and bad UTF-8 alike
        return None
    return record if isinstance(record, dict) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every record ([] if the file is not there yet). A torn last line is left out; damage elsewhere is refused."""
    try:
        *lines, tail = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LMWorksError(f"cannot read {path}: {error.strerror}") from None
    records = []
    for number, line in enumerate(lines, 1):
        record = decode(line)
        if record is None:
            raise LMWorksError(
                f"{path}, line {number} is damaged: it is not a JSON object; delete that line to read on"
            )
        records.append(record)
    last = decode(tail)
    return records if last is None else [*records, last]
