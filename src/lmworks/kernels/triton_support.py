"""Triton's import, launch options and compilation: kernels run on GPUs, and on a CPU in tests (TRITON_INTERPRET=1).

**Programmatic dependent launch.** Kernels of a decoding step take a few microseconds each, and as much again passes
between the last program of one and the first load of the next. On Hopper and later a kernel may be launched while the
ones before it still run: its programs are scheduled and wait. On an H200 a step of an 8B model took 4.13 ms instead of
4.25 in bf16; triggering the next kernel before the wait (4.28 ms), or prefetching weights to the L2 cache meanwhile
(4.31), lost time.

Every kernel that is launched with `pdl_options` calls `pdl_wait` in all of its programs, before it reads or writes what
another kernel reads or writes. A wait is for the previous kernel alone, which has ended only when its own wait has: one
kernel without it would let all later kernels overtake all earlier ones.

**Compilation.** Triton compiles a kernel at its first launch, which blocks. Under `compile_only` a thread runs through
its launches without waiting, and each new kernel is compiled by a thread of its own, which holds the interpreter lock
for a fifth of that time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
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
    "PDL_MAX_PROGRAMS",
    "compile_only",
    "compiled_kernels",
    "hash_triton_version",
    "multiprocessors",
    "pdl_options",
    "pdl_wait",
    "power_of_two",
    "shared_bytes",
    "split_k_counters",
    "tl",
    "triton",
]  # fmt: skip

PDL_MAX_PROGRAMS = 2**10  # beyond, a kernel fills the GPU and the next one cannot be scheduled early


def power_of_two(n: int) -> int:
    """The smallest power of two ≥ n."""
    return 1 << (n - 1).bit_length()


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory of a program; without a GPU, that of Hopper."""
    if device.type != "cuda":
        return 232_448
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 for the interpreter, which runs programs one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@contextmanager
def compiled_kernels() -> Iterator[list[str]]:
    """Names of kernels that are compiled in the block, or read from Triton's cache: their first launches block."""
    names: list[str] = []

    def listen(*, metadata: dict[str, Any], **_: Any) -> None:
        names.append(metadata["name"])

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = listen
        yield names


@functools.cache
def split_k_counters(device: torch.device) -> Tensor:
    """Counters of finished programs of each tile; every launch leaves zeros. For one stream at a time."""
    return torch.zeros(2**16, dtype=torch.int32, device=device)


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip or triton.knobs.runtime.interpret:
        return False
    from triton.backends.nvidia.compiler import CUDAOptions

    return torch.cuda.get_device_capability(device) >= (9, 0) and hasattr(CUDAOptions, "launch_pdl")


def pdl_options(device: torch.device, gains: bool = True) -> dict[str, bool]:
    """Launch options of programmatic dependent launch."""
    return {"PDL": True, "launch_pdl": True} if gains and supports_pdl(device) else {"PDL": False}


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until all previous kernels have finished, then let the next one be launched."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


# --- compilation ahead of launches ------------------------------------------------------------------------

this_thread = threading.local()  # `compile_only`: whether its launches only compile


@functools.cache
def patch_launches() -> None:
    """Replace Triton's launch function for all threads; `compile_only` is a state of each."""
    launch = triton.runtime.jit.JITFunction.run

    def run(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(kernel, *args, warmup=warmup or getattr(this_thread, "compile_only", False), **kwargs)

    triton.runtime.jit.JITFunction.run = run


def hash_triton_version() -> None:
    """Compute Triton's hash of its own files, which is cached for the process."""
    triton.runtime.cache.triton_key()


@contextmanager
def compile_only() -> Iterator[None]:
    """Launches of this thread only compile their kernels, in parallel; outputs stay uninitialised.

    All kernels are compiled when the block is left. Other threads launch as usual.
    """
    patch_launches()
    with triton.AsyncCompileMode(CompileExecutor()):
        this_thread.compile_only = True
        try:
            yield
        finally:
            this_thread.compile_only = False


class CompileExecutor(Executor):
    """A daemon thread for each kernel: a process that exits does not wait for them."""

    def submit(self, compile: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                kernel = compile(*args, **kwargs)
                kernel.run  # noqa: B018  # builds its launcher, and loads it
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(kernel)

        threading.Thread(target=work, name="triton-compile", daemon=True).start()
        return future
