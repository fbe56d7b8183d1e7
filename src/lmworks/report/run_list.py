"""Several runs: find them, list them, hold them against one another."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..record import RunFolder
from ..record.run_summary import summarize
from ..spec import LMWorksError, SpecError

HOME = Path("runs")  # where `lmworks train` puts a run that was not told otherwise


def find_runs(places: Sequence[Path]) -> list[RunFolder]:
    """The run folders at or below each place. The default place may be missing: then there are no runs yet."""
    for place in places:
        if not place.is_dir():
            raise SpecError(f"no runs at {place}: " + ("it is a file" if place.exists() else "it does not exist"))
    return [run for place in places or ([HOME] if HOME.is_dir() else []) for run in walk(place)]


def walk(place: Path) -> Iterator[RunFolder]:
    for path, below, files in os.walk(place):
        if "spec.toml" in files:
            below.clear()  # a run holds no other run, but many checkpoints
            yield RunFolder(Path(path))
        below.sort()


def locate(run: Path) -> RunFolder:
    """A run by its folder, or by its name below runs/."""
    return RunFolder.open(HOME / run if not run.exists() and (HOME / run).exists() else run)


def list_runs(folders: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """A summary each, the newest first. A run that cannot be read is listed with the reason: it hides no other."""
    rows = []
    for folder in folders:
        try:
            rows.append(summarize(folder).to_dict())
        except LMWorksError as error:
            row = {"name": folder.path.name, "path": str(folder.path), "status": "unreadable", "error": str(error)}
            rows.append(row)
    return sorted(rows, key=lambda row: row.get("started", ""), reverse=True)


def compare_runs(folders: Sequence[RunFolder]) -> dict[str, Any]:
    """`runs`: a summary each, in the order given; `differs`: spec keys that are not the same in all, value by value."""
    specs = [dict(flatten(folder.spec().to_dict())) for folder in folders]
    keys = list(dict.fromkeys(key for spec in specs for key in spec if key != "name"))
    columns = {key: [spec.get(key) for spec in specs] for key in keys}
    return {
        "runs": [summarize(folder).to_dict() for folder in folders],
        "differs": {key: values for key, values in columns.items() if any(value != values[0] for value in values)},
    }


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys, as an override writes them."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
