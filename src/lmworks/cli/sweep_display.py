"""What `lmworks sweep` shows while it runs: a live table in a terminal, a line for each trial that ends elsewhere."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..record.formatting import clock
from ..spec.errors import PREEMPTED
from ..sweep.folder import Trial
from ..sweep.progress import Progress, Row, best, counts
from .output import print_table
from .tables import render_table

REFRESH_S = 1.0
STATUS_EVERY_S = 60.0  # a line for logs, when no trial ends
SHOWN = 20  # rows of the live table


class Display:
    """`update(trials)` often; `quiet` prints nothing."""

    def __init__(self, progress: Progress, quiet: bool) -> None:
        self.progress, self.quiet = progress, quiet
        self.console = Console(file=sys.stdout, markup=False, highlight=False)
        is_terminal = self.console.is_terminal and not self.console.is_dumb_terminal
        self.live = Live(console=self.console, auto_refresh=False) if is_terminal and not quiet else None
        self.looked = self.said = float("-inf")
        self.states: dict[int, str] = {}
        self.waiting = ""  # what was last said to be waited for

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self.live:
            self.live.update(Text(), refresh=True)
            self.live.stop()

    def update(self, trials: Sequence[Trial]) -> None:
        now = time.monotonic()
        ended = any(trial.state != self.states.get(trial.number, trial.state) for trial in trials)
        if self.quiet or (now - self.looked < REFRESH_S and not ended):
            return
        self.looked = now
        rows = self.progress.update(trials)
        waiting = self.progress.waits_for(rows)
        status = self.status(rows, waiting)
        if self.live:
            self.live.update(Group(*live_lines(rows, status, self.console.width)), refresh=True)
        else:
            self.print_lines(rows, status, waiting, now)
        self.states = {row.trial.number: row.trial.state for row in rows}

    def print_lines(self, rows: Sequence[Row], status: str, waiting: str, now: float) -> None:
        changed = [
            row for row in rows if row.trial.settled and self.states.get(row.trial.number, "queued") != row.state
        ]
        for row in changed if self.states else []:
            print(f"trial {row.trial.number} {trial_text(row)}   ({status})", flush=True)
        news = bool(waiting) and waiting != self.waiting
        if changed or news or now - self.said > STATUS_EVERY_S:
            if news or not changed or not self.states:
                print(status, flush=True)
            self.said = now
        self.waiting = waiting or self.waiting

    def status(self, rows: Sequence[Row], waiting: str) -> str:
        left = self.progress.eta_s(rows)
        said = [f"{count} {state}" for state, count in counts(rows).items()]
        eta = f"ETA {clock(left)}" if left is not None else "ETA: known after the first steps"
        return "; ".join([", ".join(said), *([f"waiting for {waiting}"] if waiting else []), eta])


@contextmanager
def stopped_by_signals(advice: str) -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does; both leave one line."""
    received: list[int] = []

    def stop(number: int, _frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"lmworks: stopped; {advice}", err=True)
        raise typer.Exit(PREEMPTED if received else 130) from None


def print_waiting(why: str) -> None:
    """Where another process drives the same sweep."""
    typer.echo(f"lmworks: {why}", err=True)


def trial_text(row: Row) -> str:
    if row.state == "failed":
        return f"failed: {where(row)}: {row.trial.error}"
    loss = f": val {row.val_loss:.4f}" if row.val_loss is not None else ""
    return f"{row.state}: {where(row)}{loss}"


def where(row: Row) -> str:
    """The label that its driver gave it, or what it overrides."""
    label: str = row.trial.notes.get("label", "")
    return label or " ".join(f"{key}={cell(value)}" for key, value in row.trial.overrides.items())


def live_lines(rows: Sequence[Row], status: str, width: int) -> list[Text]:
    """Running trials, then those that ended best; the others are counted."""
    running = [row for row in rows if row.state == "running"]
    ended = sorted((row for row in rows if row.val_loss is not None and row not in running), key=val_loss)
    shown = [*running, *ended][:SHOWN]
    more = f"; {len(rows) - len(shown)} more trials" if len(rows) > len(shown) else ""
    return [*table_lines(shown, width), Text(f"{status}{more}")]


def val_loss(row: Row) -> float:
    return float("inf") if row.val_loss is None else row.val_loss


def columns(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]], tuple[str, ...]]:
    """Names, cells, and the columns that a narrow terminal does without."""
    labels = [row.trial.notes.get("label") for row in rows]
    keys = ["run"] if all(labels) else list(dict.fromkeys(key for row in rows for key in row.trial.overrides))
    cells = [
        [
            row.trial.number,
            *([label] if all(labels) else (cell(row.trial.overrides.get(key)) for key in keys)),
            row.state,
            f"{row.step:,}/{row.total:,}",
            "-" if row.loss is None else f"{row.loss:.4f}",
            "-" if row.val_loss is None else f"{row.val_loss:.4f}",
        ]
        for row, label in zip(rows, labels, strict=True)
    ]
    return ["trial", *keys, "state", "steps", "loss", "val"], cells, ("loss", "steps")


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def table_lines(rows: Sequence[Row], width: int | None) -> list[Text]:
    names, cells, drop = columns(rows)
    return render_table("", names, cells, width, drop) if rows else []


def print_trials(title: str, rows: Sequence[Row]) -> None:
    names, cells, drop = columns(rows)
    print_table(title, names, cells, drop)
    for row in rows:
        if row.state == "failed":
            print(f"trial {row.trial.number} failed: {row.trial.error}")
    if found := best(rows):
        print(f"best: trial {found.trial.number}, val {found.val_loss:.4f}: {where(found)}")
        print(f"its run: {found.path}")
