"""Other people's measurements of single matrix products and collectives.

The products are a bulk set, read from a file that the user has; the collectives between machines are published figures
and part of LMWorks.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...spec import Cluster, catalogue
from ..devices.curves import LINKS
from ..devices.links import Fabric

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
    with (LINKS.parent / "nccl_multinode.csv").open(encoding="utf-8", newline="") as lines:
        return [exchange(row) for row in csv.DictReader(lines)]


def exchange(row: Mapping[str, str]) -> Exchange:
    nodes, each, nbytes = int(row["nodes"]), int(row["gpus_per_node"]), float(row["message_bytes"])
    cluster = Cluster(nodes=nodes, gpus_per_node=each, nic_gbs=float(row["nic_gbs"]), network=row["network"])
    fabric = Fabric.of(cluster, catalogue()[row["gpu"]])
    if row["algorithm"] == "ring" and fabric.network:
        seconds = fabric.network.ring(row["kind"], nbytes, nodes * each, each, fabric.rates_within[each])
    else:
        seconds = fabric.seconds(row["kind"], nbytes, nodes * each)
    return Exchange(row["gpu"], nodes, row["algorithm"], nbytes, float(row["time_us"]) * 1e-6, float(seconds))
