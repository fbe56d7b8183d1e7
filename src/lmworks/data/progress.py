"""How far a long job is: a bar on a terminal, a plain line a stage elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    """A line when a stage begins and at each further quarter of it: enough for a log, not a flood."""
    reached: dict[str, int] = {}

    def say(stage: str, done: int, total: int) -> None:
        quarter = 4 * done // total if total else 0
        if reached.get(stage, -1) < quarter:
            reached[stage] = quarter
            print(f"{stage}: {done} of {total}" if total else stage, file=sys.stderr, flush=True)

    return say
