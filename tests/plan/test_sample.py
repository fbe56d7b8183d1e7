"""A sample of measured products and collectives, priced with the code and the constants of today.

`sample/gemm.csv`: rows that no fit has seen, spread evenly over FLOPs. `sample/collectives.csv`: inside a machine,
every collective on each GPU, from 16 KiB to 256 MiB; the median of several NCCL versions, and the fit has seen them.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmworks.plan.devices.links import Fabric
from lmworks.plan.devices.rates import gemm_rate, gemm_seconds
from lmworks.spec import Cluster, catalogue


def rows(name: str) -> list[dict[str, str]]:
    with (Path(__file__).parent / "sample" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["A100-SXM-80GB", "H100-SXM-80GB", "B200-SXM"])
def test_products(name: str) -> None:
    some = [row for row in rows("products.csv") if row["gpu"] == name]
    m, n, k, milliseconds = (np.array([float(row[key]) for row in some]) for key in ("m", "n", "k", "latency_ms"))
    rate = replace(gemm_rate(catalogue()[name], "bf16"), sustained=1.0)  # a benchmark is not sustained work
    errors = gemm_seconds(m, k, n, rate) / (milliseconds * 1e-3) - 1
    assert len(some) == 14
    assert np.median(np.abs(errors)) < 0.08
    assert np.mean(np.abs(errors)) < 0.08
    assert np.max(np.abs(errors)) < 0.2
    assert abs(np.mean(errors)) < 0.03


def test_collectives() -> None:
    some = rows("collectives.csv")
    predicted = [
        Fabric.of(Cluster(gpus_per_node=8), catalogue()[row["gpu"]]).seconds(
            row["kind"], float(row["message_bytes"]), int(row["ranks"])
        )
        for row in some
    ]
    errors = np.abs(np.array(predicted) / [float(row["latency_ms"]) * 1e-3 for row in some] - 1)
    assert len(some) == 12
    assert np.median(errors) < 0.04
    assert np.mean(errors) < 0.08
    assert np.max(errors) < 0.4  # a gather of 1 MiB on A100s, where NCCL changes protocol
