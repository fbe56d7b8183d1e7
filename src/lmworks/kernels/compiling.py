"""Kernels compiled side by side, before they are launched.

Triton compiles a kernel at its first launch, and who launches it waits: for passes, for an assembler, and for a C
compiler that builds what calls it. Here a thread goes through its launches without waiting for any, and each kernel
that it meets is compiled by a thread of its own, which holds the interpreter for a fifth of that time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

from .triton_support import triton

this = threading.local()  # `only`: whether this thread's launches only compile


def run(kernel: Any, *given: Any, warmup: bool, **named: Any) -> Any:
    """In the place of Triton's own, once for all: threads come and go, and each asks for itself alone."""
    return launch(kernel, *given, warmup=warmup or getattr(this, "only", False), **named)


launch, triton.runtime.jit.JITFunction.run = triton.runtime.jit.JITFunction.run, run


def hash_triton_version() -> None:
    """Triton's, a hash of all its files that is made once in a process."""
    triton.runtime.cache.triton_key()


@contextmanager
def compile_only() -> Iterator[None]:
    """What this thread launches is only compiled: where its results would be, memory holds anything.

    When the block is left, all of it can be launched. Other threads launch as ever.
    """
    with triton.AsyncCompileMode(Compilers()):
        this.only = True
        try:
            yield
        finally:
            this.only = False


class Compilers(Executor):
    """A thread for each kernel. They are daemons: a process that ends does not wait for them."""

    def submit(self, compile: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                kernel = compile(*args, **kwargs)
                kernel.run  # noqa: B018  # builds what calls it, and loads it
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(kernel)

        threading.Thread(target=work, name="compiles", daemon=True).start()
        return future
