"""Triton, where it is needed: kernels for GPUs, and for tests on a CPU through its interpreter (TRITON_INTERPRET=1)."""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import functools

import torch

from ..spec import LMWorksError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise LMWorksError("kernels on a GPU need Triton, which is not installed here: pip install triton") from error

__all__ = ["multiprocessors", "power_of_two", "tl", "triton"]


def power_of_two(n: int) -> int:
    """The next one that is not below n."""
    return 1 << (n - 1).bit_length()


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """That a program may have on a GPU; without one, a Hopper's."""
    if device.type != "cuda":
        return 232_448
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; the interpreter takes one program after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
