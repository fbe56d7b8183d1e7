"""Sweeps of a tiny model, what their trials computed, and the processes that run them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmworks.sweep.folder import Sweep
from lmworks.sweep.space import Space
from tiny import make_spec

FIGURES = ("step", "loss", "grad_norm", "lr", "tokens", "val_loss")


def make_sweep(path: Path, data: Path, space: dict[str, Any], *overrides: str, **options: Any) -> Sweep:
    base = make_spec(data, "cluster.device=cpu", *overrides).to_dict()
    return Sweep.create(path, base, Space.of(space), **options)


def figures(sweep: Sweep, number: int, keys: tuple[str, ...] = FIGURES) -> list[tuple[Any, ...]]:
    """What a trial computed, step by step; not how long it took."""
    return [tuple(line.get(key) for key in keys) for line in sweep.metrics(number)]


# --- a sweep of three trials, run by `lmworks sweep` --------------------------------------------------------

SPACE = "optim.lr.values = [1e-2, 2e-2, 3e-2]\n"
TRIALS, STEPS = 3, 44
SECONDS = 60.0


def make_base(data: Path) -> dict[str, Any]:
    return make_spec(data, "cluster.device=cpu", f"optim.steps={STEPS}", "checkpoint.every=15").to_dict()


def check(name: str, expected: list[Any]) -> None:
    sweep = Sweep.open(f"sweeps/{name}")
    assert [(trial.state, trial.step) for trial in sweep.trials()] == [("finished", STEPS)] * TRIALS
    assert [figures(sweep, number) for number in range(TRIALS)] == expected


def until(true: Callable[[], Any], seconds: float = SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)
    return found


def running(name: str, step: int = 1, last: int = STEPS - 4) -> tuple[int, int, int] | None:
    """(trial, its worker's pid, its own pid) of a trial in the middle of its steps."""
    for number in range(TRIALS):
        folder = Path("sweeps", name, "trials", f"{number:04d}")
        try:
            worker = json.loads((folder / "claim").read_text()).get("pid")
            taken = (folder / "metrics.jsonl").read_bytes().count(b"\n")
            (child,) = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
        except (OSError, ValueError):
            continue
        if step <= taken < last:
            return number, worker, int(child)
    return None


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except OSError:
        return True
