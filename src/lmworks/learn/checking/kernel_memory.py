"""What interpreted kernels read and write, looked at before it happens.

A kernel computes addresses. Here those of a tensor begin 2⁴⁰ bytes after the ones before: each address tells for which
tensor it was meant, and one outside of it is refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .expect import Mismatch

SPACE = 1 << 40  # bytes of addresses for a tensor, with the tensor in the middle
SHOWN = 6  # elements outside of a tensor
# What the interpreter accesses memory by: where the pointers stand among the arguments, and where the mask.
ACCESSES = {
    "create_masked_load": ("load", 0, 1),
    "create_masked_store": ("store", 0, 2),
    "create_atomic_rmw": ("atomic operation", 1, 3),
    "create_atomic_cas": ("atomic operation", 0, None),
}


@dataclass
class Traffic:
    """Of kernels with one tensor, in elements."""

    name: str  # of the kernel's parameter
    tensor: Tensor
    read: int = 0
    written: int = 0
    most_read: int = 0  # by one load of one program

    @property
    def extent(self) -> int:
        """Elements from the first to the last in memory."""
        sizes = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        return 1 + sum((size - 1) * stride for size, stride in sizes)

    def count(self, what: str, elements: int) -> None:
        if what == "load":
            self.read += elements
            self.most_read = max(self.most_read, elements)
        else:
            self.written += elements


class Memory:
    """Of the kernels that are launched while it is watched. `case` names what is run."""

    def __init__(self, case: str) -> None:
        self.case = case
        self.places: dict[int, int] = {}  # address → place in `traffic`
        self.traffic: list[Traffic] = []
        self.arguments: dict[str, Any] = {}  # of the last launch

    def of(self, tensor: Tensor) -> Traffic:
        """Of a tensor that a kernel was given; nothing, where it was not."""
        place = self.places.get(tensor.data_ptr())
        return Traffic("", tensor) if place is None else self.traffic[place]

    def bytes(self) -> tuple[int, int]:
        """Read and written, of all tensors."""
        return (
            sum(one.read * one.tensor.itemsize for one in self.traffic),
            sum(one.written * one.tensor.itemsize for one in self.traffic),
        )

    def launch(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        for name, value in arguments.items():
            tensor = getattr(value, "base", value)  # of a tensor descriptor
            if isinstance(tensor, Tensor) and tensor.data_ptr() not in self.places:
                self.places[tensor.data_ptr()] = len(self.traffic)
                self.traffic.append(Traffic(name, tensor))

    def address(self, tensor: Tensor) -> int:
        """As the kernel has it."""
        return self.places[tensor.data_ptr()] * SPACE + SPACE // 2

    def real(self, addresses: Any, mask: Any, what: str) -> Any:
        """As this process has them; what the mask lets through is counted."""
        addresses = addresses.astype(np.int64)
        found = np.zeros_like(addresses)
        used = np.broadcast_to(mask, addresses.shape)
        for place in np.unique(addresses[used] // SPACE):
            if not 0 <= place < len(self.traffic):
                raise Mismatch(f"{self.case}: addresses of a {what}", "in a tensor", "in none")
            one = self.traffic[place]
            here = used & (addresses // SPACE == place)
            offset = addresses[here] - self.address(one.tensor)
            elements = offset // one.tensor.itemsize
            outside = (elements < 0) | (elements >= one.extent)
            if outside.any():
                raise self.outside(one, what, np.unique(elements[outside]))
            found[here] = offset + one.tensor.data_ptr()
            one.count(what, offset.size)
        return found.astype(np.uint64)

    def outside(self, one: Traffic, what: str, elements: Any) -> Mismatch:
        return Mismatch(
            f"{self.case}: elements of {one.name} in a {what}",
            f"0 ≤ element < {one.extent}",
            ", ".join(map(str, elements[:SHOWN])) + (", …" if len(elements) > SHOWN else ""),
            remark=f"a {what} outside of the tensor; a mask leaves out what is not there",
        )


class EmptyIsNaN(TorchFunctionMode):
    """What is allocated begins as NaN, not as what lay there before."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        found = function(*arguments, **(named or {}))
        empty = function in (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)
        return found.fill_(torch.nan) if empty and found.is_floating_point() else found


@contextmanager
def watch(case: str) -> Iterator[Memory]:
    """Kernels that are launched within are watched. A load without `other` gives NaN for what its mask leaves out: on
    a GPU that is undefined."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    memory, launch, convert = Memory(case), interpreter.GridExecutor.__call__, interpreter._implicit_cvt

    def watched_launch(executor: Any, *arguments: Any, **named: Any) -> None:
        memory.launch({**dict(zip(executor.arg_names, arguments, strict=False)), **named})
        try:
            launch(executor, *arguments, **named)
        except interpreter.InterpreterError as error:
            raise first_cause(error) from None

    def first_cause(error: BaseException) -> BaseException:
        inner = error.__cause__
        return first_cause(inner) if isinstance(error, interpreter.InterpreterError) and inner else error

    def converted(argument: Any) -> Any:
        found = convert(argument)
        if isinstance(argument, Tensor):
            found.handle.data = np.array([memory.address(argument)], dtype=np.uint64)
        return found

    with ExitStack() as patches:
        patches.enter_context(patch.object(interpreter.GridExecutor, "__call__", watched_launch))
        patches.enter_context(patch.object(interpreter, "_implicit_cvt", converted))
        for name, places in ACCESSES.items():
            access = watched_access(memory, getattr(interpreter.InterpreterBuilder, name), *places)
            patches.enter_context(patch.object(interpreter.InterpreterBuilder, name, access))
        patches.enter_context(EmptyIsNaN())
        patches.enter_context(np.errstate(all="ignore"))  # −∞ − (−∞) is NaN, without a warning as on a GPU
        yield memory


def watched_access(
    memory: Memory, access: Callable[..., Any], what: str, pointers_at: int, mask_at: int | None
) -> Callable[..., Any]:
    def watched(builder: Any, *arguments: Any, **named: Any) -> Any:
        mask = True if mask_at is None else arguments[mask_at].data
        pointers = arguments[pointers_at]
        real = replace(pointers, data=memory.real(pointers.data, mask, what))
        found = access(builder, *arguments[:pointers_at], real, *arguments[pointers_at + 1 :], **named)
        has_no_other = what == "load" and arguments[2] is None
        return undefined(found, mask) if has_no_other and found.dtype.is_floating() else found

    return watched


def undefined(loaded: Any, mask: Any) -> Any:
    """NaN where the mask is false; bf16 and fp8 are bits here."""
    nan = np.array(np.nan if loaded.data.dtype.kind == "f" else 0x7FFF).astype(loaded.data.dtype)
    return replace(loaded, data=np.where(mask, loaded.data, nan))
