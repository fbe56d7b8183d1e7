"""Triton, where it is needed: kernels for GPUs, and for tests on a CPU through its interpreter (TRITON_INTERPRET=1)."""

# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"

from __future__ import annotations

import functools

import torch

from ..spec import LMWorksError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise LMWorksError("kernels on a GPU need Triton, which is not installed here: pip install triton") from error

__all__ = ["early", "multiprocessors", "power_of_two", "tl", "triton", "wait"]


EARLY = False  # until it is measured


def power_of_two(n: int) -> int:
    """The next one that is not below n."""
    return 1 << (n - 1).bit_length()


@functools.cache
def early(device: torch.device) -> dict[str, bool]:
    """Options of a launch: the kernel is set up while the one before it ends (on Hopper and later), and must `wait`."""
    able = EARLY and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": able, "launch_pdl": able}


@triton.jit
def wait(EARLY: tl.constexpr) -> None:
    """Until all that earlier kernels wrote can be read; from then on the next one may be set up.

    Every program of a kernel that is launched `early` calls it, before it reads what the kernel before it wrote and
    before it writes anything. What is older than that may be read before.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; the interpreter takes one program after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
