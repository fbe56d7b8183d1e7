"""Errors of the pieces that a step is priced from: matrix products, collectives, a serving engine's steps.

The fits of these wrote down their errors on rows they had not seen and on whole systems left out; those are read
here. Where the measurements themselves are at hand, they are replayed with the constants as they are now.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmworks.plan.devices.links import Fabric, read_links, wire_share
from lmworks.plan.devices.rates import gemm_rate, gemm_seconds, table
from lmworks.plan.serving.inference import read_constants
from lmworks.spec import Cluster, catalogue

from .sources import PUBLISHED

# How AIConfigurator calls the accelerators of the catalogue.
SYSTEMS = {
    "a100_sxm": "A100-SXM-80GB",
    "h100_sxm": "H100-SXM-80GB",
    "h200_sxm": "H200-SXM-141GB",
    "b200_sxm": "B200-SXM",
    "b300_sxm": "B300-SXM",
    "gb200": "GB200",
    "gb300": "GB300",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTX PRO 6000 Blackwell Server",
}
PRODUCTS = "aiconfigurator_gemm_bf16_measured.csv.gz"


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
    """The rows that `validation/fit_gemm.py` keeps out of its fit. A benchmark is not sustained work."""
    for name, rows in products(path).items():
        m, n, k, seconds = rows.unseen.T
        rate = replace(gemm_rate(catalogue()[name], "bf16"), sustained=1.0)
        yield Part.of(f"products {name}", "replayed", gemm_seconds(m, k, n, rate) / seconds - 1)


# --- measurements of single products (a bulk set) and of collectives between machines (published) ---------


@dataclass(frozen=True)
class Products:
    """Of one accelerator: columns m, n, k, seconds."""

    fitted: NDArray[Any]
    unseen: NDArray[Any]  # a fifth of the rows, kept out of every fit


def products(path: Path) -> dict[str, Products]:
    """By name in the catalogue."""
    rows: dict[str, tuple[list[list[float]], list[list[float]]]] = defaultdict(lambda: ([], []))
    with gzip.open(path, "rt", encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            figures = [float(row[name]) for name in ("m", "n", "k")] + [float(row["latency_ms"]) * 1e-3]
            rows[SYSTEMS[row["system"]]][is_unseen(row)].append(figures)
    return {gpu: Products(np.array(fitted), np.array(unseen)) for gpu, (fitted, unseen) in rows.items()}


def is_unseen(row: Mapping[str, str]) -> bool:
    """By a hash of system and shape, so that it stays the same when rows are added."""
    key = ",".join(row[name] for name in ("system", "m", "n", "k"))
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % 5 == 0


@dataclass(frozen=True)
class Exchange:
    """One collective of nccl-tests over several machines."""

    gpu: str
    nodes: int
    algorithm: str  # auto: as NCCL chose
    nbytes: float
    seconds: float  # measured
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.seconds - 1


def between_machines() -> list[Exchange]:
    """Published runs. One that asked for the ring is held against the ring."""
    with (PUBLISHED / "nccl_multinode.csv").open(encoding="utf-8", newline="") as lines:
        return [exchange(row) for row in csv.DictReader(lines)]


def exchange(row: Mapping[str, str]) -> Exchange:
    nodes, each, nbytes = int(row["nodes"]), int(row["gpus_per_node"]), float(row["message_bytes"])
    cluster = Cluster(nodes=nodes, gpus_per_node=each, nic_gbs=float(row["nic_gbs"]), network=row["network"])
    fabric = Fabric.of(cluster, catalogue()[row["gpu"]])
    if row["algorithm"] == "ring" and fabric.network:
        wire = nbytes * wire_share(row["kind"], nodes * each)
        seconds = fabric.network.ring(row["kind"], wire, nodes * each, each, fabric.rates_within[each]).seconds
    else:
        seconds = fabric.seconds(row["kind"], nbytes, nodes * each)
    return Exchange(row["gpu"], nodes, row["algorithm"], nbytes, float(row["time_us"]) * 1e-6, float(seconds))
