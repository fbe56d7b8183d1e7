"""Progress of long jobs on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

Progress = Callable[[str, int, int], None]
"""Called with a stage ("tokenize"), how much is done, and how much there is in all (0: unknown)."""


def silent(stage: str, done: int, total: int) -> None:
    """The default of a library call."""


@contextmanager
def console_progress() -> Iterator[Progress]:
    """Draws on standard error, so that a result on standard output stays clean."""
    if not sys.stderr.isatty():
        yield plain_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def draw(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total or None)
            bars.update(tasks[stage], completed=done, total=total or None)

        yield draw


def plain_lines() -> Progress:
    """A line when a stage begins and at each further quarter of it, with the time that is left where it is long: enough
    for a log, not a flood."""
    reached: dict[str, int] = {}
    begun: dict[str, tuple[float, int]] = {}

    def show(stage: str, done: int, total: int) -> None:
        quarter = 4 * done // total if total else 0
        if reached.get(stage, -1) < quarter:
            reached[stage] = quarter
            began, before = begun.setdefault(stage, (time.monotonic(), done))
            seconds = (time.monotonic() - began) * (total - done) / max(1, done - before)
            left = f", about {seconds / 60:.0f} min left" if done > before and seconds >= 90 else ""
            print(f"{stage}: {done} of {total}{left}" if total else stage, file=sys.stderr, flush=True)

    return show


# --- jobs of unknown length ---------------------------------------------------------------------------------

DRAWN_S = 0.2  # between two updates of a live line
TICK_S = 1.0  # and where nothing changes but the clock
FIRST_S, AGAIN_S = 10.0, 60.0  # where there is no terminal: when a line is written, and how often after that


@contextmanager
def activity() -> Iterator[Progress]:
    """Show the current stage on standard error: a live line with its seconds on a terminal, elsewhere a line where it
    takes long. Only rank 0 prints.
    """
    if os.environ.get("RANK", "0") != "0":
        yield silent
        return
    shown = Activity(sys.stderr)
    try:
        yield shown
    except BaseException:
        shown.close(failed=True)
        raise
    shown.close()


class Activity:
    """Called as a `Progress`; a thread updates the clock during stages that report nothing."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self.stage, self.done, self.total = "", 0, 0
        self.began = self.drawn = time.monotonic()
        self.printed = 0  # lines about this stage, where there is no terminal
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.clock = threading.Thread(target=self.tick, name="lmworks-activity", daemon=True)
        self.clock.start()

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None:
        with self.lock:
            new = stage != self.stage
            if new:
                self.finish()
                self.stage, self.began, self.printed = stage, time.monotonic(), 0
            self.done, self.total = done, total
            if self.live and (new or time.monotonic() - self.drawn > DRAWN_S):
                self.draw()

    def tick(self) -> None:
        while not self.ended.wait(TICK_S if self.live else 0.1):
            with self.lock:
                due = FIRST_S + AGAIN_S * self.printed
                if self.stage and (self.live or time.monotonic() - self.began >= due):
                    self.draw()

    def draw(self) -> None:
        seconds, self.drawn = time.monotonic() - self.began, time.monotonic()
        counted = f": {self.done} of {self.total}" if self.total else ""
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            self.write(f"\r\x1b[2K{f'{self.stage}{counted} … {int(seconds)} s'[:width]}")
        else:
            self.printed += 1
            self.write(f"{self.stage}{counted} … {int(seconds)} s so far\n")

    def finish(self) -> None:
        """The line stays, with what it took."""
        if self.stage and (self.live or self.printed):
            begin = "\r\x1b[2K" if self.live else ""
            self.write(f"{begin}{self.stage}: {time.monotonic() - self.began:.1f} s\n")

    def close(self, failed: bool = False) -> None:
        self.ended.set()
        with self.lock:
            if not failed:
                self.finish()
            elif self.live and self.stage:
                self.write("\n")  # the error is printed on a line of its own
            self.stage = ""
        self.clock.join()

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the stream is closed
            self.stream.write(text)
            self.stream.flush()
