"""Background copies of committed checkpoints to remote storage: one at a time, the newest first.

Storage that is slower than the saves gets fewer checkpoints, not a queue of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import writer_client
from .folders import RetentionPolicy
from .manifest import step_of
from .writer_client import WriterClient
from .writer_messages import CopyJob, JobFailed, WriterSetup

POLL_S = 0.02


@dataclass(frozen=True)
class CopyResult:
    folder: Path
    seconds: float
    error: str = ""


class RemoteCopier:
    """Of one run, on rank 0."""

    def __init__(self, remote: str, keep: RetentionPolicy) -> None:
        self.remote, self.keep = remote, keep
        self.writer: WriterClient | None = None
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
            self.writer = WriterClient(WriterSetup(0, b"", 0, b"", "", tuple(writer_client.startup)))
        self.current, self.began = folder, time.perf_counter()
        self.writer.send(CopyJob(step_of(folder), folder, self.remote, self.keep))

    def poll(self, timeout_s: float = 0.0) -> CopyResult | None:
        """The result of the running copy, once it has ended; starts the next one."""
        if self.writer is None or self.current is None:
            return None
        answer = self.writer.answer(timeout_s)
        if answer is None:
            return None
        error = answer.reason if isinstance(answer, JobFailed) else ""
        copied = CopyResult(self.current, time.perf_counter() - self.began, error)
        self.current, next_folder = None, self.next
        self.next = None
        if next_folder is not None:
            self.send(next_folder)
        return copied

    def drain(self) -> Iterator[CopyResult]:
        """Wait until all copies are done."""
        while self.current is not None:
            if copied := self.poll(POLL_S):
                yield copied

    def close(self) -> None:
        """The running copy is abandoned; without its marker it does not count."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None
