"""Ctrl-C and SIGTERM end a run between two steps, with a checkpoint; the second one ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from ..spec import LMWorksError


class Interrupted(LMWorksError):
    """The run was asked to stop, and did so where it can be resumed."""

    def __init__(self, number: int, step: int, folder: Path) -> None:
        super().__init__(
            f"stopped by {signal.Signals(number).name} after step {step}; go on with: lmworks resume {folder}"
        )
        self.exit_code = 128 + number


class StopSignals:
    """While active, the first SIGINT or SIGTERM only sets `asked`; the next ends the process at once."""

    def __init__(self) -> None:
        self.signal = 0
        self.before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        return self.signal != 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self.note)
        return self

    def note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = number
        for each in self.before:
            signal.signal(each, when_repeated(each))

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.restore()


def when_repeated(number: int) -> signal.Handlers:
    """The next one ends the process as the system does, wherever Python is.

    Not so a SIGTERM under torchrun: a scheduler signals every process of a job, and the agent hands its own on to the
    ranks, so each rank gets two for one request. The agent itself kills a rank that takes too long.
    """
    twice = number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ
    return signal.SIG_IGN if twice else signal.SIG_DFL
