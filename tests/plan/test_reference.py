"""The reference configurations: specs that load, use their whole cluster, and fit on it by today's figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.plan.case import Case
from lmworks.plan.memory.budget import budget
from lmworks.plan.memory.reserve import safe_bytes
from lmworks.spec import load_run

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "reference").glob("*.toml"))
SIZES = {"7b": (7e9, 8e9), "70b": (70e9, 71e9), "405b": (400e9, 410e9), "moe-1t": (0.9e12, 1.1e12)}


def test_every_size_on_every_gpu() -> None:
    wanted = {"7b-8", *(f"70b-{n}" for n in (64, 128, 256)), *(f"405b-{n}" for n in (512, 1024, 2048)), "moe-1t-4096"}
    assert {path.stem for path in CONFIGS} == {f"{name}-{gpu}" for name in wanted for gpu in ("a100", "h100", "b200")}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_reference(path: Path) -> None:
    spec = load_run(path)
    size, gpus, _ = path.stem.rsplit("-", 2)
    gpu = spec.cluster.accelerator
    assert gpu is not None
    low, high = SIZES[size]
    assert low < spec.model.params < high
    assert spec.parallel.world == spec.cluster.gpus == int(gpus)
    assert float(budget(Case.of(spec, gpu)).reserved) <= safe_bytes(gpu, risk=0.1)
