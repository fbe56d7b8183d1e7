"""Triton, where it is needed: kernels for GPUs, and for tests on a CPU through its interpreter (TRITON_INTERPRET=1).

Kernels of a decoding step take a few microseconds each, and as much again goes by between one's last program and the
next one's first load. On Hopper and later a kernel may be launched *early*, while the ones before it still run
("programmatic dependent launch"): its programs are placed, and wait there. On an H200 a step of an 8B model took
4.13 ms instead of 4.25 in bf16; letting the next kernel in before the wait (4.28 ms), or fetching weights to the L2
cache meanwhile (4.31), lost time.

Every kernel that is launched with the options of `early` calls `wait` in all of its programs, before it reads or writes
anything that another kernel reads or writes. A wait is for the kernel before alone, which has ended only when its own
wait has: one kernel without it would let all that come after run ahead of all that came before.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..spec import LMWorksError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise LMWorksError("kernels on a GPU need Triton, which is not installed here: pip install triton") from error

__all__ = [
    "MANY",
    "compiled_kernels",
    "early",
    "multiprocessors",
    "power_of_two",
    "shared_bytes",
    "split_counters",
    "tl",
    "triton",
    "wait",
]  # fmt: skip

MANY = 2**10  # programs of one launch: more than are on a GPU at once, so that the next ones have no place to wait in


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


@contextmanager
def compiled_kernels() -> Iterator[list[str]]:
    """The kernels that are compiled meanwhile, or read from Triton's cache: their first launch waits for that."""
    names: list[str] = []

    def listen(*, metadata: dict[str, Any], **_: Any) -> None:
        names.append(metadata["name"])

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = listen
        yield names


@functools.cache
def split_counters(device: torch.device) -> Tensor:
    """Zeros that programs with one result count themselves with; each launch leaves zeros. One stream at a time."""
    return torch.zeros(2**16, dtype=torch.int32, device=device)


@functools.cache
def launches_early(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip or triton.knobs.runtime.interpret:
        return False
    from triton.backends.nvidia.compiler import CUDAOptions

    return torch.cuda.get_device_capability(device) >= (9, 0) and hasattr(CUDAOptions, "launch_pdl")


def early(device: torch.device, gains: bool = True) -> dict[str, bool]:
    """Options of a launch: `EARLY` for the kernel, and for Triton what goes with it."""
    return {"EARLY": True, "launch_pdl": True} if gains and launches_early(device) else {"EARLY": False}


@triton.jit
def wait(EARLY: tl.constexpr):
    """Until all kernels before this one have ended and their results are there; then let the next be launched."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
