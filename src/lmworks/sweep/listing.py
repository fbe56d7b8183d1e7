"""Sweeps found and summarized, for lists of runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..spec import LMWorksError
from ..spec.files import read_json_object
from .folder import SWEEPS_DIR, Sweep
from .progress import Progress, best, counts


def find_sweeps(roots: Sequence[Path]) -> list[Path]:
    """At or below each place; by default below sweeps/."""
    return [found for root in roots or [SWEEPS_DIR] for found in walk(root)]


def walk(root: Path) -> Iterator[Path]:
    for path, below, files in os.walk(root):
        if "sweep.json" in files:
            yield Path(path)
        if {"sweep.json", "spec.toml"} & set(files):
            below.clear()
        below.sort()


def is_sweep(path: Path) -> bool:
    return (path / "sweep.json").is_file()


def list_sweeps(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """A summary of each, the newest first. One that cannot be read is listed with its error."""
    rows = []
    for path in paths:
        try:
            rows.append(summarize_sweep(path))
        except (LMWorksError, KeyError, TypeError) as error:
            rows.append({"sweep": path.name, "path": str(path), "status": "unreadable", "error": str(error)})
    return sorted(rows, key=lambda row: row.get("created", ""), reverse=True)


def summarize_sweep(path: Path) -> dict[str, Any]:
    sweep = Sweep.open(path)
    rows = Progress(sweep, 1).update(sweep.trials())
    states, found = counts(rows), best(rows)
    open_ones = states.keys() & ({"queued"} if sweep.is_done else {"queued", "paused"})
    return {
        "sweep": path.name,
        "path": str(path),
        "kind": sweep.kind,
        "status": "running" if "running" in states else "unfinished" if open_ones or not rows else "finished",
        "created": read_json_object(sweep.file, LMWorksError)["created"],
        "keys": sweep.space.keys,
        "trials": states,
        "best": found and found.to_dict(),
    }
