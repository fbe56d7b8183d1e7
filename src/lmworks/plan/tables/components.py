"""Errors of the pieces that a step is priced from: matrix products, collectives, a serving engine's steps.

The fits of these wrote down their errors on rows they had not seen and on whole systems left out; those are read
here. Where the measurements themselves are at hand, they are replayed with the constants as they are now.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...spec import Cluster, catalogue
from ..devices.curves import LINKS
from ..devices.gemm import gemm_seconds
from ..devices.links import Fabric
from ..devices.rates import gemm_rate

GEMM_TABLE = "aiconfigurator_gemm_bf16_measured.csv.gz"
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
    parts = [*recorded_products(), *recorded_collectives(), *recorded_serving(), *between_machines()]
    table = data / GEMM_TABLE if data else None
    return [*parts, *replayed_products(table)] if table and table.exists() else parts


def constants(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parents[1] / name).read_text(encoding="utf-8"))


def recorded_products() -> Iterator[Part]:
    for gpu, fit in constants("devices/gemm.toml")["gpus"].items():
        for how, key in (("unseen rows", "unseen_rows"), ("left out", "left_out")):
            figures = {name: value / 100 for name, value in fit[key].items()}
            yield Part(f"products {gpu}", how, **figures)


def recorded_collectives() -> Iterator[Part]:
    for key, figures in constants("devices/links.toml")["errors"].items():
        system = key.removeprefix("without_")
        how = "left out" if key.startswith("without_") else "unseen rows"
        yield Part(f"collectives {'' if key == 'held_out' else system}".strip(), how, **kept(figures))


def recorded_serving() -> Iterator[Part]:
    for name, median in constants("serving/serving.toml")["errors"].items():
        yield Part(f"serving {name.upper()}", "left out", median)


def kept(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: figures[name] for name in ("median", "mape", "p90", "rows")}


def between_machines() -> Iterator[Part]:
    """Published NCCL runs over several machines. The model of networks was chosen with some of them in view."""
    errors: dict[int, list[float]] = defaultdict(list)
    with (LINKS.parent / "nccl_multinode.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["algorithm"] != "auto":
                continue
            nodes, each = int(row["nodes"]), int(row["gpus_per_node"])
            cluster = Cluster(nodes=nodes, gpus_per_node=each, nic_gbs=float(row["nic_gbs"]), network=row["network"])
            fabric = Fabric.of(cluster, catalogue()[row["gpu"]])
            seconds = float(fabric.seconds(row["kind"], float(row["message_bytes"]), nodes * each))
            errors[nodes].append(seconds / (float(row["time_us"]) * 1e-6) - 1)
    for nodes, found in sorted(errors.items()):
        yield Part.of(f"collectives over {nodes} machines", "replayed", found)


def replayed_products(table: Path) -> Iterator[Part]:
    """The fifth of the rows that `benchmarks/fit_gemm.py` keeps out of its fit. A benchmark is not sustained work."""
    rows: dict[str, list[list[float]]] = defaultdict(list)
    with gzip.open(table, "rt", encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            key = ",".join(row[name] for name in ("system", "m", "n", "k"))
            if int(hashlib.sha256(key.encode()).hexdigest(), 16) % 5 == 0:
                figures = [float(row[name]) for name in ("m", "n", "k", "latency_ms")]
                rows[SYSTEMS[row["system"]]].append(figures)
    for name, found in rows.items():
        m, n, k, milliseconds = np.array(found).T
        rate = replace(gemm_rate(catalogue()[name], "bf16"), sustained=1.0)
        errors = gemm_seconds(m, k, n, rate) / (milliseconds * 1e-3) - 1
        yield Part.of(f"products {name}", "replayed", errors)
