"""A batch on the disk: its events (`events.jsonl`) and the results of its lines (`results.jsonl`), append-only both.

Its state follows from these alone, so that a process that starts after a kill knows what is left to do.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...record.jsonl import LineWriter, decode, read_lines
from .bodies import BatchErrors, BatchObject, Status
from .lines import Line

SECONDS = 24 * 3600  # of completion_window
TIMES: tuple[Status, ...] = (
    "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled",
)  # fmt: skip
ENDED = ("completed", "failed", "expired", "cancelled")


class Batch:
    def __init__(self, folder: Path) -> None:
        """One that is there."""
        self.folder, self.id = folder, folder.name
        self.fields: dict[str, Any] = {}
        self.status: Status = "validating"
        self.completed = self.failed = 0
        for event in read_lines(folder / "events.jsonl"):
            self.take(event)

    @classmethod
    def create(cls, folder: Path, **fields: Any) -> Batch:
        folder.mkdir(parents=True)
        batch, now = cls(folder), int(time.time())
        batch.note("validating", created_at=now, expires_at=now + SECONDS, **fields)
        return batch

    def note(self, status: Status, **fields: Any) -> None:
        """An event: written first, then true."""
        if status != "validating":
            fields[f"{status}_at"] = int(time.time())
        event = {"status": status, **fields}
        with LineWriter(self.folder / "events.jsonl") as events:
            events.append(event)
        self.take(event)

    def take(self, event: dict[str, Any]) -> None:
        self.status = event["status"]
        self.fields |= {name: value for name, value in event.items() if name != "status"}
        self.completed = self.fields.get("completed", self.completed)
        self.failed = self.fields.get("failed", self.failed)

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def starts_lines(self) -> bool:
        """Whether lines that are left may be started."""
        return self.status == "in_progress" and time.time() < self.fields["expires_at"]

    @property
    def results(self) -> Path:
        return self.folder / "results.jsonl"

    def shown(self) -> BatchObject:
        fields = self.fields
        errors: BatchErrors | None = {"object": "list", "data": fields["errors"]} if "errors" in fields else None
        times = {f"{status}_at": fields.get(f"{status}_at") for status in TIMES}
        counts = {"total": fields.get("total", 0), "completed": self.completed, "failed": self.failed}
        found: Any = {
            "id": self.id,
            "object": "batch",
            "endpoint": fields["endpoint"],
            "errors": errors,
            "input_file_id": fields["input_file_id"],
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": fields.get("output_file_id"),
            "error_file_id": fields.get("error_file_id"),
            "created_at": fields["created_at"],
            "expires_at": fields["expires_at"],
            **times,
            "request_counts": counts,
            "metadata": fields.get("metadata"),
        }
        shown: BatchObject = found
        return shown


class Results:
    """Results of lines, each written once: where in the file each is, by the number of its line."""

    def __init__(self, path: Path) -> None:
        self.path, self.writer, self.lock = path, LineWriter(path), threading.Lock()
        self.places: dict[int, int] = {}
        self.failures: set[int] = set()
        with path.open("rb") as file:
            place = 0
            for raw in file:
                found = decode(raw)
                if found is not None:
                    self.add(found, place)
                place += len(raw)
        self.end = place

    def add(self, found: dict[str, Any], place: int) -> None:
        self.places[found["line"]] = place
        if not found["ok"]:
            self.failures.add(found["line"])

    def append(self, line: Line, ok: bool, shown: dict[str, Any]) -> None:
        """From any thread."""
        with self.lock:
            record = {"line": line.number, "ok": ok, "shown": shown}
            self.writer.append(record)
            self.add(record, self.end)
            self.end = self.path.stat().st_size

    def read(self, ok: bool | None = None) -> Iterator[dict[str, Any]]:
        """What is shown of those that succeeded, or failed (None: of all), in the order of the input."""
        chosen = {None: self.places.keys(), True: self.places.keys() - self.failures, False: self.failures}[ok]
        with self.path.open("rb") as file:
            for number in sorted(chosen):
                file.seek(self.places[number])
                yield json.loads(file.readline())["shown"]

    def close(self) -> None:
        """A thread that is about to append fails then: another process may have the file by now."""
        with self.lock:
            self.writer.close()


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> int:
    """How many."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
            count += 1
    return count
