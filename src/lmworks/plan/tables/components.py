"""Errors of the pieces that a step is priced from: matrix products, collectives, a serving engine's steps.

The fits of these wrote down their errors on rows they had not seen and on whole systems left out; those are read
here. Where the measurements themselves are at hand, they are replayed with the constants as they are now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...spec import catalogue
from ..devices.curves import read_links
from ..devices.gemm import gemm_seconds
from ..devices.rates import gemm_rate, table
from ..serving.inference import read_constants
from .kernels import PRODUCTS, between_machines, products


@dataclass(frozen=True)
class Part:
    """|predicted / measured − 1|, as fractions; the aim is the median."""

    name: str
    how: str  # unseen rows, left out, or replayed
    median: float
    mape: float | None = None
    p90: float | None = None
    rows: int | None = None

    @classmethod
    def of(cls, name: str, how: str, errors: Sequence[float]) -> Part:
        size = np.abs(np.asarray(errors))
        return cls(name, how, float(np.median(size)), float(size.mean()), float(np.quantile(size, 0.9)), len(size))

    @property
    def spread(self) -> tuple[float | None, ...]:
        return self.median, self.mape, self.p90

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def components(data: Path | None = None) -> list[Part]:
    parts = [*recorded_products(), *recorded_collectives(), *recorded_serving(), *replayed_collectives()]
    path = data / PRODUCTS if data else None
    return [*parts, *replayed_products(path)] if path and path.exists() else parts


def recorded_products() -> Iterator[Part]:
    for gpu, fit in table("gemm.toml")["gpus"].items():
        for how, key in (("unseen rows", "unseen_rows"), ("left out", "left_out")):
            figures = {name: value / 100 for name, value in fit[key].items()}
            yield Part(f"products {gpu}", how, **figures)


def recorded_collectives() -> Iterator[Part]:
    for key, figures in read_links()["errors"].items():
        system = key.removeprefix("without_")
        how = "left out" if key.startswith("without_") else "unseen rows"
        kept = {name: figures[name] for name in ("median", "mape", "p90", "rows")}
        yield Part(f"collectives {'' if key == 'held_out' else system}".strip(), how, **kept)


def recorded_serving() -> Iterator[Part]:
    for name, median in read_constants()["errors"].items():
        yield Part(f"serving {name.upper()}", "left out", median)


def replayed_collectives() -> Iterator[Part]:
    """Published NCCL runs over several machines. The model of networks was chosen with some of them in view."""
    errors: dict[int, list[float]] = defaultdict(list)
    for run in between_machines():
        if run.algorithm == "auto":
            errors[run.nodes].append(run.error)
    for nodes, found in sorted(errors.items()):
        yield Part.of(f"collectives over {nodes} machines", "replayed", found)


def replayed_products(path: Path) -> Iterator[Part]:
    """The rows that `benchmarks/fit_gemm.py` keeps out of its fit. A benchmark is not sustained work."""
    for name, rows in products(path).items():
        m, n, k, seconds = rows.unseen.T
        rate = replace(gemm_rate(catalogue()[name], "bf16"), sustained=1.0)
        yield Part.of(f"products {name}", "replayed", gemm_seconds(m, k, n, rate) / seconds - 1)
