"""Find, list and compare runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..record import RunFolder
from ..record.run_summary import summarize
from ..spec import LMWorksError, SpecError

RUNS_DIR = Path("runs")  # the default folder of `lmworks train`


def find_runs(roots: Sequence[Path]) -> list[RunFolder]:
    """The run folders at or below each place. The default place may be missing: then there are no runs yet."""
    for root in roots:
        if not root.is_dir():
            raise SpecError(f"no runs at {root}: " + ("it is a file" if root.exists() else "it does not exist"))
    return [run for root in roots or ([RUNS_DIR] if RUNS_DIR.is_dir() else []) for run in walk(root)]


def walk(root: Path) -> Iterator[RunFolder]:
    for path, below, files in os.walk(root):
        if "spec.toml" in files:
            below.clear()  # runs are not nested; skip checkpoints
            yield RunFolder(Path(path))
        below.sort()


def locate(run: Path) -> RunFolder:
    """A run by its folder, or by its name below runs/."""
    return RunFolder.open(RUNS_DIR / run if not run.exists() and (RUNS_DIR / run).exists() else run)


def list_runs(folders: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """A summary of each, newest first. An unreadable run is listed with its error."""
    rows = []
    for folder in folders:
        try:
            rows.append(summarize(folder).to_dict())
        except LMWorksError as error:
            row = {"name": folder.path.name, "path": str(folder.path), "status": "unreadable", "error": str(error)}
            rows.append(row)
    return sorted(rows, key=lambda row: row.get("started", ""), reverse=True)


def compare_runs(folders: Sequence[RunFolder]) -> dict[str, Any]:
    """`runs`: summaries in the given order; `differs`: spec keys with different values."""
    specs = [dict(flatten(folder.spec().to_dict())) for folder in folders]
    keys = list(dict.fromkeys(key for spec in specs for key in spec if key != "name"))
    columns = {key: [spec.get(key) for spec in specs] for key in keys}
    return {
        "runs": [summarize(folder).to_dict() for folder in folders],
        "differs": {key: values for key, values in columns.items() if any(value != values[0] for value in values)},
    }


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys, as in overrides."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
