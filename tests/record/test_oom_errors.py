"""Errors of allocators: recognised by type or text, and final unless a step was taken."""

from __future__ import annotations

import pytest
import torch

from lmworks.record.oom import OutOfMemory, as_oom, is_oom, requested_bytes

GIB = 2**30
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"  # noqa: E501
GPU = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.1 GiB of which 1.2 GiB is free."
)


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (RuntimeError(CPU), 4 * GIB),
        (torch.OutOfMemoryError(GPU), 20 * GIB),
        (RuntimeError("std::bad_alloc"), None),
        (MemoryError(), None),
        (OSError(12, "Cannot allocate memory"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
    ],
)
def test_errors_of_allocators_are_known(error: Exception, asked: int | None) -> None:
    assert is_oom(error) and requested_bytes(error) == asked
    cause = as_oom(error)
    assert isinstance(cause, OutOfMemory) and cause.final and cause.exit_code == 1
    assert str(cause).startswith("out of memory: ") and "\n" not in str(cause)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), OSError(28, "No space left"), ValueError("memory")])
def test_other_errors_are_left_alone(error: Exception) -> None:
    assert not is_oom(error) and as_oom(error) is error
