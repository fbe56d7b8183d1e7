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

import pytest
import torch

FILES = (
    "test_adamw_triton.py",
    "test_cross_entropy_triton.py",
    "test_elementwise_triton.py",
    "test_experts_triton.py",
    "test_flash_triton.py",
    "test_float8_triton.py",
    "test_latent_triton.py",
    "test_paged_triton.py",
    "test_sample_kernel.py",
    "test_decode_linear.py",
    "test_swiglu_fp8.py::test_kernels_equal_references",  # the others of this file interpret nothing
    "test_swiglu_fp8.py::test_rows_must_be_multiple_of_four",
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, tests/gpu runs the kernels there")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the kernels are interpreted already")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_interpreted(which: str) -> None:
    """All of them in one process: to import PyTorch and Triton takes longer than most."""
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
        *(str(Path(__file__).with_name(name)) for name in FILES),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
