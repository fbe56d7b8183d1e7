"""Runs of online methods that are killed in generation, scoring and update, again and again, and end bitwise like one
that was not."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from post_training import make_spec
from tiny import differences, saved, write_spec

PHASES = ("hand_over", "generate", "reward", "score", "forward", "backward", "optimizer", "save.write", "save.commit")
# A rank that kills itself when it enters a phase for the n-th time.
RANK = """
import os, signal, sys
from pathlib import Path
from lmworks.align.post_trainer import trainer_class
from lmworks.record import phase
from lmworks.spec import load_run
spec, run, name, left = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
def listener(entered, _step):
    global left
    left -= entered == name
    if left == 0 and entered == name:
        os.kill(os.getpid(), signal.SIGKILL)
phase.listeners.append(listener)
loaded = load_run(spec)
kind = trainer_class(loaded)
trainer = kind.resume(run, quiet=True) if (run / "spec.toml").exists() else kind(loaded, run, quiet=True)
trainer.run()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_ten_kills_in_every_phase_are_bitwise_equal(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spec = make_spec(tmp_path, method, "optim.steps=48", "checkpoint.every=1", "align.beta=0.05")
    path = write_spec(spec, tmp_path / "spec.toml")

    def start(run: str, phase: str, count: int) -> int:
        return subprocess.run([sys.executable, "-c", RANK, path, tmp_path / run, phase, str(count)]).returncode

    assert start("whole", "never", 1) == 0
    draw, killed = random.Random(method), []
    while len(killed) < 10:
        phase = draw.choice([one for one in PHASES if one not in killed[-3:]])
        code = start("killed", phase, draw.randint(1, 3))
        assert code == -9, (phase, code, killed)
        killed.append(phase)
    assert len(set(killed)) >= 5, killed
    assert start("killed", "never", 1) == 0
    others = ("critic", "critic_optim") if method == "ppo" else ()
    assert not differences(saved(tmp_path / "whole", 48, *others), saved(tmp_path / "killed", 48, *others))
