"""Suites: small TOML files that say where problems come from, how they are asked and how answers are scored."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..spec.errors import DataError, SpecError, did_you_mean
from ..spec.schema import Section, opt
from .formats import FORMATS
from .metrics import METRICS

SUITES = Path(__file__).parent / "suites"


@dataclass(frozen=True)
class Generation(Section):
    section: ClassVar[str] = "generation"

    max_tokens: int = opt(512, "tokens of an answer, at most", ge=1)
    temperature: float = opt(0.0, "sampling temperature (0: greedy)", ge=0)
    top_p: float = opt(1.0, "sample from the likeliest tokens with this total probability", gt=0, le=1)
    samples: int = opt(1, "answers to each problem", ge=1)
    stop: list[str] = opt(list, "texts that end an answer, beside those of the format")


@dataclass(frozen=True)
class Execution(Section):
    section: ClassVar[str] = "execution"

    seconds: float = opt(5.0, "CPU seconds of one answer's tests; twice as many by the clock", gt=0)
    memory_mb: int = opt(1024, "memory of one answer's tests", ge=64)


@dataclass(frozen=True)
class Needles(Section):
    """Of the format `needle`."""

    section: ClassVar[str] = "needles"

    task: str = opt(
        "number",
        "what is hidden: a number among sentences, several of a key, a line to copy, a constant that a file uses",
        choices=("number", "numbers", "copy", "repository"),
    )
    lengths: list[int] = opt([256, 1024, 4096], "words of the text, approximately")
    depths: list[float] = opt([0.0, 0.25, 0.5, 0.75, 1.0], "where the needle lies: 0 at the start, 1 at the end")
    keys: int = opt(1, "needles with keys of their own, of which one is asked for", ge=1)
    values: int = opt(1, "task numbers: how many a key has, all of which are asked for", ge=1)
    repeats: int = opt(2, "problems of each length and depth", ge=1)


@dataclass(frozen=True)
class Suite(Section):
    name: str = opt("", "by which it is called")
    about: str = opt("", "one line for `lmworks evals list`")
    format: str = opt("", "how the data are read", choices=tuple(FORMATS))
    data: str = opt("", "a file (jsonl, json, parquet, csv, text), hf:NAME:CONFIG:SPLIT, or stdlib")
    fields: dict[str, str] = opt({}, "the format's name of a field → the data's")
    prompt: str = opt("", "template with {field} of the data, or {prompt} for the format's own")
    shots: int = opt(0, "solved examples in front of a prompt", ge=0)
    shots_data: str = opt("", "where they come from: a file or hf:NAME:CONFIG:SPLIT")
    metrics: list[str] = opt(list, "scores; the first is the one that is compared (default: the format's)")
    k: list[int] = opt([1], "of pass@k")
    generation: Generation = opt(Generation, "how answers are generated")
    execution: Execution = opt(Execution, "limits of a program that an answer is tested in")
    needles: Needles = opt(Needles, "of the format needle")

    def check(self) -> None:
        if not self.metrics:
            self.derive("metrics", list(FORMATS[self.format].metrics))
        for name in self.metrics:
            if name not in METRICS:
                raise SpecError(f"metrics: {name!r} is no metric{did_you_mean(name, METRICS)}")
        if min(self.k, default=0) < 1:
            raise SpecError(f"k = {self.k}: of pass@k, each is at least 1")


def suite_names() -> list[str]:
    """Those that come with the package."""
    return sorted(path.stem for path in SUITES.glob("*.toml"))


def load_suite(name: str, changes: Mapping[str, Any] | None = None) -> Suite:
    """By name, or a TOML file. `changes` are merged over it, e.g. {"data": "problems.jsonl"}."""
    path = SUITES / f"{name}.toml"
    if name.endswith(".toml"):
        path = Path(name)
    elif not path.is_file():
        raise SpecError(f"there is no suite {name!r}{did_you_mean(name, suite_names())}; or give a .toml file")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"suite {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"suite {path} is not TOML: {error}") from None
    return suite_of(path, table, changes or {})


def suite_of(path: Path, table: dict[str, Any], changes: Mapping[str, Any]) -> Suite:
    data = table.get("data")
    if path.parent != SUITES and isinstance(data, str) and (path.parent / data).exists():
        table["data"] = str(path.parent / data)  # beside its suite
    for key, value in changes.items():
        table[key] = {**table.get(key, {}), **value} if isinstance(value, Mapping) else value
    table.setdefault("name", path.stem)
    if "format" not in table:
        raise SpecError(f"suite {path}: no format; it is one of: {', '.join(FORMATS)}")
    try:
        return Suite.from_dict(table)
    except SpecError as error:
        raise SpecError(f"suite {path}: {error}") from None
