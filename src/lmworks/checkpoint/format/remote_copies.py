"""Copying committed checkpoints to a second place while the run goes on: one at a time, the newest first.

A place that is slower than the run saves gets fewer checkpoints, not a queue of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import writer_client
from .folders import Keep
from .manifest import step_of
from .writer_client import Writer
from .writer_messages import Copy, Failed, Setup

POLL_S = 0.02


@dataclass(frozen=True)
class Copied:
    folder: Path
    seconds: float
    error: str = ""


class Copies:
    """Of one run, on the lead."""

    def __init__(self, remote: str, keep: Keep) -> None:
        self.remote, self.keep = remote, keep
        self.writer: Writer | None = None
        self.current: Path | None = None
        self.next: Path | None = None
        self.began = 0.0

    def add(self, folder: Path) -> None:
        if self.current is None:
            self.send(folder)
        else:
            self.next = folder

    def send(self, folder: Path) -> None:
        if self.writer is None or not self.writer.alive():
            self.close()
            self.writer = Writer(Setup(0, b"", 0, b"", "", tuple(writer_client.startup)))
        self.current, self.began = folder, time.perf_counter()
        self.writer.send(Copy(step_of(folder), folder, self.remote, self.keep))

    def poll(self, patience_s: float = 0.0) -> Copied | None:
        """What became of the copy under way, once it has ended; the next one is begun."""
        if self.writer is None or self.current is None:
            return None
        answer = self.writer.answer(patience_s)
        if answer is None:
            return None
        error = answer.reason if isinstance(answer, Failed) else ""
        copied = Copied(self.current, time.perf_counter() - self.began, error)
        self.current, following = None, self.next
        self.next = None
        if following is not None:
            self.send(following)
        return copied

    def settle(self) -> Iterator[Copied]:
        """Wait until nothing is left to copy."""
        while self.current is not None:
            if copied := self.poll(POLL_S):
                yield copied

    def close(self) -> None:
        """What is under way is given up: without its marker it is no copy."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None
