"""A rank of an engine over two ranks is killed, or fails, in a step of it: the run ends, and is resumed bitwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from post_training import make_spec
from tiny import differences, saved, write_spec

# One of two ranks that are one engine, which kills itself or raises in a step of it.
GROUP_RANK = """
import os, signal, sys
from pathlib import Path
from lmworks.align.post_trainer import trainer_class
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.spec import load_run
spec, run, victim, left, how = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
states = ModelRunner.states
def counted(self, batch):
    global left
    left -= os.environ["RANK"] == victim
    if left == 0 and how == "raises":
        raise RuntimeError("the kernel failed")
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return states(self, batch)
ModelRunner.states = counted
loaded = load_run(spec)
kind = trainer_class(loaded)
trainer = kind.resume(run, quiet=True) if (run / "spec.toml").exists() else kind(loaded, run, quiet=True)
trainer.run()
"""


@pytest.mark.slow
def test_a_killed_rank_of_an_engine_ends_the_run_which_is_resumed_bitwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    layout = ["parallel.dp=2", "parallel.strategy=fsdp2", "align.engine_tp=2"]
    spec = write_spec(make_spec(tmp_path, "grpo", "optim.steps=8", "checkpoint.every=1", *layout), tmp_path / "a.toml")
    (tmp_path / "rank.py").write_text(GROUP_RANK)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    def start(run: str, victim: str, step: int, how: str = "is killed") -> subprocess.CompletedProcess[str]:
        command = [*ranks, str(tmp_path / "rank.py"), spec, str(tmp_path / run), victim, str(step), how]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert start("whole", "none", 1).returncode == 0
    # A follower and the leader, in the first round and in later ones.
    for victim, step, how in (("1", 3, "is killed"), ("0", 4, "raises"), ("0", 20, "is killed"), ("1", 4, "raises")):
        failed = start("killed", victim, step, how)
        says = "the kernel failed" if how == "raises" else "Signal 9 (SIGKILL)"
        assert failed.returncode != 0 and says in failed.stderr, failed.stderr
    assert start("killed", "none", 1).returncode == 0
    assert not differences(saved(tmp_path / "whole", 8), saved(tmp_path / "killed", 8))
