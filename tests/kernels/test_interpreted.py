"""Runs the tests of Triton kernels on a CPU.

Triton decides when it is first imported whether kernels are compiled or interpreted, so they get a process of their
own: in this one PyTorch may have imported it already.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FILES = (
    "test_adamw_triton.py",
    "test_cross_entropy_triton.py test_float8_triton.py",  # one process for both
    "test_flash_triton.py",
    "test_paged_triton.py",
    "test_sample_kernel.py",
    "test_small_linear.py",
    "test_elementwise_triton.py",
)


RUNS: list[Any] = [(file, "not slow") for file in FILES]
LONG = ("test_flash_triton.py", "test_elementwise_triton.py")  # more shapes, and compilers; recompute
RUNS += [pytest.param(file, "slow", marks=pytest.mark.slow) for file in LONG]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, tests/gpu runs the kernels there")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the kernels are interpreted already")
@pytest.mark.parametrize(("file", "which"), RUNS)
def test_kernels_interpreted(file: str, which: str) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:schemathesis",
        "-m",
        which,
        *(str(Path(__file__).with_name(name)) for name in file.split()),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
