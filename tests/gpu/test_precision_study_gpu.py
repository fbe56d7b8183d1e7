"""`lmworks bench precision` on a GPU: close looks at formats, gradients and updates where the tensors are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmworks.bench.precision import study as module
from lmworks.bench.precision.single_run import train_one
from lmworks.bench.precision.study import study
from tiny import make_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_precision_study_runs(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "train_in_subprocess", train_one)
    spec = make_spec(dataset, "optim.steps=8", "optim.lr=3e-4", "model.hidden=64", "cluster.device=cuda")
    found = study(spec, tmp_path)
    fp8 = torch.cuda.get_device_capability() >= (8, 9)
    assert not [(one.name, one.training.error) for one in found.outcomes if one.training.error]
    assert found["fp8-rowwise"].training.facts["emulated"] is not fp8
    assert found["fp32"].training.looked[-1]["formats"]["gradients"]["e4m3 rowwise"]
    kept = {one.name: one.metrics.kept for one in found.outcomes}
    assert kept["bf16-master"] == pytest.approx(1, abs=1e-3) == kept["fp32"] and (kept["bf16-nearest"] or 1) < 0.9
    errors = [found[name].metrics.gradient_error or 0.0 for name in ("fp16", "bf16", "fp8-rowwise")]
    assert errors == sorted(errors) and errors[0] > 0, "fewer digits, larger errors"
    assert found["fp16-high"].training.overflows[:2] == [1, 2]
