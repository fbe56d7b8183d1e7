"""`ulimit -v` too small for PyTorch: one line and exit code 2, whatever fails first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from variations import with_slow

MIB = 2**20
LIMIT = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv.pop(1)),) * 2); "
COMMAND = "from lmworks.__main__ import command; command()"


def lmworks(limit_mib: int, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LIMIT + COMMAND, str(limit_mib * MIB), *words],
        cwd=cwd,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # each maps a buffer of its own
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("limit_mib", with_slow([70, 400, 700], [700]))
def test_too_small_a_limit_is_one_line(limit_mib: int, tmp_path: Path) -> None:
    ended = lmworks(limit_mib, "train", "configs/tiny.toml", "optim.steps=2", cwd=tmp_path)
    assert ended.returncode == 2 and ended.stdout == "", ended
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("lmworks: error: the limit of this process (ulimit -v or -d) leaves it ")
    assert "`ulimit -v unlimited` lifts it" in ended.stderr
    assert not list(tmp_path.iterdir())


def test_commands_without_pytorch_need_less(tmp_path: Path) -> None:
    ended = lmworks(600, "plan", "memory", "llama3-8b", "--cluster", "8xh100", cwd=tmp_path)
    assert ended.returncode == 0 and ended.stderr == "", ended


@pytest.mark.slow  # imports PyTorch in a new process
def test_a_large_limit_does_not_matter() -> None:
    load = "from lmworks.cli.main import check_address_space; check_address_space(); import torch"
    ended = subprocess.run([sys.executable, "-c", LIMIT + load, str(100_000 * MIB)], capture_output=True, text=True)
    assert ended.returncode == 0, ended
