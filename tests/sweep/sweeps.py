"""Sweeps of a tiny model, and what their trials computed."""

from __future__ import annotations

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
