"""Arrivals of requests: public traces as they are published.

| format | columns | time |
|---|---|---|
| Azure LLM inference (2023, 2024) | TIMESTAMP, ContextTokens, GeneratedTokens | date and time |
| BurstGPT | Timestamp, Session ID and Elapsed time (newer files), Model, Request tokens, Response tokens, … | seconds |
| Mooncake (JSON lines) | timestamp, input_length, output_length, hash_ids | milliseconds |

A Mooncake hash id names 512 tokens of a prompt together with all before them: equal ids are a shared prefix. BurstGPT's
rows without an answer are calls that failed; they are left out.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from ..spec import SpecError

MOONCAKE_BLOCK = 512  # tokens that a hash id stands for


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, its lengths, and what its tokens are, block by block."""

    at: float  # seconds from the start
    prompt: int
    answer: int
    prefix: tuple[int, ...] = ()  # an id per block of prompt and answer; equal ids are equal tokens, and equal before


@dataclass(frozen=True)
class Trace:
    arrivals: tuple[Arrival, ...]  # by time, the first at 0
    block: int = MOONCAKE_BLOCK  # tokens of an id of `prefix`

    @property
    def seconds(self) -> float:
        return self.arrivals[-1].at

    @property
    def rate(self) -> float:
        return len(self.arrivals) / self.seconds if self.seconds else float(len(self.arrivals))

    def first(self, seconds: float) -> Self:
        return replace(self, arrivals=tuple(one for one in self.arrivals if one.at <= seconds))

    def at_rate(self, rate: float) -> Self:
        """The same requests, in the same pattern, at another mean rate."""
        scale = self.rate / rate
        return replace(self, arrivals=tuple(replace(one, at=one.at * scale) for one in self.arrivals))


def read_trace(path: Path) -> Trace:
    """A file in one of the formats above, told apart by its first line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise SpecError(f"--trace {path}: {getattr(error, 'strerror', None) or error}") from None
    if not lines:
        raise SpecError(f"--trace {path}: the file is empty")
    arrivals = list(mooncake(path, lines) if lines[0].lstrip().startswith("{") else table(path, lines))
    if not arrivals:
        raise SpecError(f"--trace {path}: it has no request with a prompt and an answer")
    return from_zero(arrivals)


def from_zero(arrivals: Iterable[Arrival], block: int = MOONCAKE_BLOCK) -> Trace:
    ordered = sorted(arrivals, key=lambda one: one.at)
    start = ordered[0].at
    return Trace(tuple(replace(one, at=one.at - start) for one in ordered), block)


def mooncake(path: Path, lines: list[str]) -> Iterator[Arrival]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield parsed(path, number, lambda row: mooncake_row(json.loads(row)), line)


def mooncake_row(row: Mapping[str, Any]) -> Arrival:
    ids = tuple(int(one) for one in row.get("hash_ids", ()))
    return Arrival(float(row["timestamp"]) / 1e3, int(row["input_length"]), int(row["output_length"]), ids)


def table(path: Path, lines: list[str]) -> Iterator[Arrival]:
    columns = next(csv.reader(lines[:1]))
    formats = {"ContextTokens": azure_row, "Request tokens": burst_gpt_row}
    read = next((read for column, read in formats.items() if column in columns), None)
    if read is None:
        raise SpecError(
            f"--trace {path}: its first line is {lines[0][:80]!r}; known are the columns of Azure's LLM traces "
            "(TIMESTAMP,ContextTokens,GeneratedTokens), of BurstGPT (Timestamp,…,Request tokens,Response tokens,…) and "
            'Mooncake\'s JSON lines {"timestamp": …, "input_length": …, "output_length": …}'
        )
    for number, row in enumerate(csv.DictReader(lines), 2):
        one = parsed(path, number, read, row)
        if one.prompt > 0 and one.answer > 0:
            yield one


def azure_row(row: Mapping[str, str]) -> Arrival:
    at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
    return Arrival(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def burst_gpt_row(row: Mapping[str, str]) -> Arrival:
    return Arrival(float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]))


def parsed(path: Path, number: int, read: Callable[[Any], Arrival], row: Any) -> Arrival:
    try:
        return read(row)
    except (ValueError, TypeError, KeyError) as error:
        raise SpecError(f"--trace {path}, line {number}: {error!r} in {str(row)[:80]}") from None
