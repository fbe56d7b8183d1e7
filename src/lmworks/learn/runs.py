"""Runs of a workspace's trainers: what a folder below runs/ shows, and whether it is whole."""

from __future__ import annotations

import json
import math
import statistics
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEAST_STEPS = 10
WARM_UP = 2  # steps that are not timed
FIGURES = ("step", "loss", "grad_norm", "lr", "seconds", "tokens_per_s", "memory")
BYTES = 12  # of a parameter in a checkpoint: fp32, and Adam's two moments


@dataclass(frozen=True)
class Run:
    name: str  # runs/ddp-small-2
    folder: Path
    about: dict[str, Any]  # its run.json
    lines: list[dict[str, Any]]  # its metrics.jsonl
    problem: str  # why it shows nothing; "": it is whole

    def has(self, **wanted: Any) -> bool:
        return all(self.about.get(key) == value for key, value in wanted.items())

    @property
    def ranks(self) -> int:
        return self.number("world_size")

    def number(self, key: str) -> int:
        """0 where there is none: somebody may have edited the file."""
        value = self.about.get(key)
        return value if isinstance(value, int) else 0

    @property
    def fallen(self) -> bool:
        """The loss: the mean of its last quarter is below that of its first."""
        losses = [line["loss"] for line in self.lines]
        quarter = max(1, len(losses) // 4)
        return statistics.mean(losses[-quarter:]) < statistics.mean(losses[:quarter])

    @property
    def peak(self) -> int:
        return max(int(line["memory"]) for line in self.lines)

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(line["tokens_per_s"] for line in self.lines[WARM_UP:])

    @property
    def devices(self) -> str:
        return f"{self.ranks} × {self.about['device']}"


def find_runs(workspace: Path) -> list[Run]:
    return [read_run(path.parent, workspace) for path in sorted((workspace / "runs").glob("*/run.json"))]


def read_run(folder: Path, workspace: Path) -> Run:
    name = folder.relative_to(workspace).as_posix()
    try:
        about = json.loads((folder / "run.json").read_text())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return Run(name, folder, {}, [], "run.json or metrics.jsonl cannot be read")
    if not isinstance(about, dict):
        return Run(name, folder, {}, [], "run.json cannot be read")
    try:
        problem = problem_of(about, lines) or checkpoint_problem(folder / "checkpoint.pt", int(about["parameters"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        problem = "run.json or metrics.jsonl is not as the course's trainers write it"
    return Run(name, folder, about, lines, problem)


def problem_of(about: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    steps = int(about["max_steps"])
    if steps < LEAST_STEPS:
        return f"{steps} steps; {LEAST_STEPS} or more show something"
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        return f"{len(lines)} of {steps} steps are logged"
    if missing := sorted(set(FIGURES) - set(lines[-1])):
        return f"{', '.join(missing)} not logged"
    losses = [float(line["loss"]) for line in lines]
    if not all(map(math.isfinite, losses)):
        return "a loss is not finite"
    if len(set(losses)) == 1:
        return "the loss is the same at every step"
    tokens = about["batch_size"] * about["seq_len"] * about["grad_accum_steps"] * about["world_size"]
    if not all(math.isclose(line["tokens_per_s"] * line["seconds"], tokens, rel_tol=0.01) for line in lines):
        return f"tokens/s and seconds do not give the {tokens} tokens of a step"
    return ""


def checkpoint_problem(file: Path, parameters: int) -> str:
    """PyTorch's files are ZIP archives that are not compressed."""
    if not file.exists():
        return "no checkpoint.pt"
    if not zipfile.is_zipfile(file):
        return "checkpoint.pt is none of PyTorch's"
    with zipfile.ZipFile(file) as archive:
        held = sum(one.file_size for one in archive.infolist())
    return "" if held >= BYTES * parameters else "checkpoint.pt is smaller than the weights and Adam's moments"
