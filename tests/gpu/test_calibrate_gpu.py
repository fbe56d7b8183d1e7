"""Calibration where there is a GPU: the catalogue's law and what was measured are of the same world."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmworks.bench.calibrate import calibrate, save
from lmworks.plan.devices.machine import Machine
from lmworks.plan.devices.profile import load_profile
from lmworks.plan.ops import Kernel, gemm
from lmworks.spec import recognise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_calibration_profile(tmp_path: Path) -> None:
    save(calibrate(torch.device("cuda"), quick=True), tmp_path / "profile.toml")
    profile = load_profile(tmp_path / "profile.toml")
    machine, gpu = profile.machine, recognise(torch.cuda.get_device_name())
    assert (profile.curve is not None) == (torch.cuda.device_count() > 1)
    assert 1e-7 < machine.launch_s < 1e-4
    if gpu is None or not gpu.bandwidth_gbs:
        pytest.skip("the catalogue does not know this GPU")
    law = Machine.of(gpu)
    for kernel in (gemm(8192, 4096, 4096), Kernel("stream", bytes=1e9), Kernel("optimizer", bytes=3e9)):
        assert 0.5 < machine.seconds(kernel, "fp16") / law.seconds(kernel, "fp16") < 2, kernel
