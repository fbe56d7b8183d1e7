"""The folder of one evaluation: everything that was asked, answered and judged, line by line.

settings.json     model, suite, limit, samples, seed: a folder is continued only with the same
problems.jsonl    what was asked
samples.jsonl     every answer, as it came
verdicts.jsonl    its scores, and the log of its program
result.json       estimates with intervals, scores by problem
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from ..record.jsonl import LineWriter, encode, read_lines
from ..spec.errors import DataError, LMWorksError, SpecError
from ..spec.files import read_json_object
from .problem import Problem

Key = tuple[str, int]  # problem, sample


class EvaluationFolder:
    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.lock = threading.Lock()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(f"--out {path}: {error.strerror}") from None
        self.settings = json.loads(json.dumps(settings))
        self.check_settings()
        self.samples = {key_of(one): one for one in read_lines(path / "samples.jsonl")}
        self.verdicts = {key_of(one): one for one in read_lines(path / "verdicts.jsonl")}
        self.sample_lines = LineWriter(path / "samples.jsonl")
        self.verdict_lines = LineWriter(path / "verdicts.jsonl")

    def check_settings(self) -> None:
        place = self.path / "settings.json"
        if not place.exists():
            return
        before, now = flat(read_json_object(place, DataError)), flat(self.settings)
        other = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if other:
            name = other[0]
            raise SpecError(
                f"{self.path} holds an evaluation with {name} = {shown(before.get(name))}, not "
                f"{shown(now.get(name))}: give another --out, or delete that folder"
            )

    def claim(self) -> None:
        """From now on the folder is of these settings. Not before there is something to evaluate: what was mistyped
        does not stand in the way of what was meant."""
        self.write("settings.json", self.settings)

    def problems(self) -> list[Problem] | None:
        """Those that were asked before the evaluation stopped; None: it had not begun."""
        path = self.path / "problems.jsonl"
        return [Problem(**one) for one in read_lines(path)] if path.exists() else None

    def write_problems(self, problems: list[Problem]) -> None:
        self.claim()
        lines = b"".join(encode(one.to_dict()) for one in problems)
        self.replace("problems.jsonl", lines)

    def add_sample(self, sample: dict[str, Any]) -> None:
        with self.lock:
            self.sample_lines.append(sample)
            self.samples[key_of(sample)] = sample

    def add_verdict(self, verdict: dict[str, Any]) -> None:
        with self.lock:
            self.verdict_lines.append(verdict)
            self.verdicts[key_of(verdict)] = verdict

    def write(self, name: str, value: Any) -> None:
        self.replace(name, json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")

    def replace(self, name: str, content: bytes) -> None:
        """Whole, or not at all."""
        temporary = self.path / f".{name}"
        try:
            temporary.write_bytes(content)
            temporary.replace(self.path / name)
        except OSError as error:
            raise LMWorksError(f"cannot write {self.path / name}: {error.strerror}") from None

    def close(self) -> None:
        self.sample_lines.close()
        self.verdict_lines.close()


def key_of(record: dict[str, Any]) -> Key:
    return record["problem"], record["sample"]


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"suite": {"data": …}} → {"suite.data": …}"""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
