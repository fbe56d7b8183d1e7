"""Trials of a sweep on a GPU: forks of a worker that has PyTorch loaded, two of them at a time on one card."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "sweep"))

from sweeps import SPACE, running, until

from lmworks.spec import dump_toml
from tiny import make_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_trials_share_a_gpu_and_one_is_killed(tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    spec = make_spec(dataset, "cluster.device=cuda", "optim.steps=300", "checkpoint.every=20")
    (tmp_path / "spec.toml").write_text(dump_toml(spec.to_dict()))
    (tmp_path / "space.toml").write_text(SPACE)
    words = ["sweep", "spec.toml", "--space", "space.toml", "--name", "gpu", "--trials-per-gpu", "2", "--json"]
    pipe = subprocess.PIPE
    driver = subprocess.Popen([sys.executable, "-m", "lmworks", *words], stdout=pipe, stderr=pipe, text=True)
    _, _, trial = until(lambda: running("gpu", 5, 250))
    os.kill(trial, signal.SIGKILL)
    out, err = driver.communicate(timeout=300)
    assert driver.returncode == 0, err
    found = json.loads(out)["trials"]
    assert [(one["state"], one["step"], one["error"]) for one in found] == [("finished", 300, "")] * 3
    assert len({one["val_loss"] for one in found}) == 3
