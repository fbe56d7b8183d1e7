"""Memory of a GPU: what does not fit is refused before it is taken, and what runs out all the same is named as OOM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Larger than any one GPU of today: a dense model and one with experts.
OVERSIZED = {"dense": "llama3-70b", "experts": "qwen3-30b-a3b"}


def lmworks(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lmworks", *words], cwd=cwd, capture_output=True, text=True, timeout=300
    )


def words_for(model: str) -> tuple[str, ...]:
    return (model, "data.path=stdlib:bytes", "data.seq=2048", "data.micro_batch=1", "optim.steps=2", "--run-dir", "run")


@pytest.mark.parametrize("kind", OVERSIZED)
def test_oversized_run_is_rejected_before_allocation(kind: str, tmp_path: Path) -> None:
    ended = lmworks("train", *words_for(OVERSIZED[kind]), cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("\n") == 1 and "GPU memory" in ended.stderr and "parameters" in ended.stderr
    assert "--force" in ended.stderr and not (tmp_path / "run").exists()


def test_oom_reports_predicted_and_measured_memory(tmp_path: Path) -> None:
    """A model that fits, in a micro-batch whose activations do not."""
    total = torch.cuda.get_device_properties(0).total_memory
    batch = total // (24 * 1024 * 768 * 2)  # of GPT-2: a few tensors of its blocks alone are more than there is
    shape = ("gpt2-small", "data.path=stdlib:bytes", "data.seq=1024", f"data.micro_batch={batch}", "optim.steps=2")
    ended = lmworks("train", *shape, "--run-dir", "run", "--force", cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("lmworks: error:")]
    assert len(lines) == 1 and "out of memory in" in lines[0] and "predicted" in lines[0] and "(cuda)" in lines[0]
    assert "Traceback" not in ended.stderr
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    (failed,) = [event for event in events if event["kind"] == "fail"]
    assert failed["cause"] == "oom" and failed["predicted_bytes"] > 0.9 * total
    ended = lmworks("bench", "train", *shape, "--steps", "1", "--force", cwd=tmp_path)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr
    assert "out of memory in" in ended.stderr and "predicted" in ended.stderr and "data.micro_batch" in ended.stderr


def test_spec_with_this_gpu_trains(tmp_path: Path) -> None:
    words = ("configs/tiny.toml", "cluster.gpu=h200", "optim.steps=2", "log.eval_batches=1", "--json")
    ended = lmworks("train", *words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["step"] == 2
