"""Products of matrices that end in more than a bias: the C interface of cuBLASLt, of the library that torch has loaded.

    linear_gelu    pre = x · weightᵀ + bias,  gelu(pre)      both are written, nothing is read for it
    linear_dgelu   (grad · weight) · gelu′(pre)              the backward pass of the same, through the layer after it
    linear_add     onto + x · weightᵀ + bias

PyTorch's own products end with a bias; what follows reads and writes the result once more. cuBLAS counts matrices by
columns: a contiguous (rows, columns) of ours is its (columns, rows), so weights come first and results are turned.

Which way cuBLAS computes a product best is measured, as for any op: "cublas 4" is the fifth that it knows.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...spec import LMWorksError
from ..dispatch import TORCH, pick
from .gelu import by_sigmoid, slope

COMPUTE_32F, R_32F = 68, 0
TYPES = {torch.bfloat16: 14, torch.float16: 2}
TRANSPOSE_A, EPILOGUE, BIAS, AUX, AUX_WIDTH = 3, 7, 8, 11, 12  # attributes of a product
PLAIN, PLAIN_BIAS, GELU_AUX, GELU_AUX_BIAS, DGELU = 1, 4, 160, 164, 192  # its ends
MOST_WORKSPACE, ALIGNMENTS = 1, (5, 6, 7, 8)  # attributes of a preference
TAKEN_FOR_GRANTED, LEAST = 256, 16  # bytes that an address divides by: as cuBLAS supposes, and as we see to
WORKSPACE = 32 * 2**20  # bytes, as cuBLAS advises for Hopper
ALIGNED = LEAST // 2  # numbers of 2 bytes, which rows divide into
WAYS = tuple(f"cublas {way}" for way in range(8))  # to compute a product, that cuBLAS is asked for
IMPLEMENTATIONS = (TORCH, *WAYS)


class Heuristic(ctypes.Structure):
    """How cuBLAS would compute a product."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@dataclass(frozen=True)
class Kind:
    """A product of (rows, inner) and (inner, columns), as we count."""

    rows: int
    columns: int
    inner: int
    turned: bool  # whether the second is given as (columns, inner), as the weight of a linear layer
    end: int
    way: int  # which of those that cuBLAS knows, its own favourite first; beyond the last, the last
    dtype: torch.dtype
    device: int


class Product:
    """One kind of product, ready to be launched with other numbers."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.lock = kind, threading.Lock()
        self.handle = handle_of(kind.device)
        self.describe = made("cublasLtMatmulDescCreate", c_int(COMPUTE_32F), c_int(R_32F))
        self.say(TRANSPOSE_A, c_int32(kind.turned))
        self.say(EPILOGUE, c_int32(kind.end))
        self.say(AUX_WIDTH, c_int64(kind.columns))
        inner, columns = (kind.inner, kind.columns) if kind.turned else (kind.columns, kind.inner)
        self.weight = layout(kind.dtype, inner, columns)
        self.x, self.out = layout(kind.dtype, kind.inner, kind.rows), layout(kind.dtype, kind.columns, kind.rows)
        self.ways: dict[bool, Heuristic] = {}  # for numbers that are aligned as cuBLAS supposes, and for others

    def say(self, attribute: int, value: ctypes._SimpleCData[int] | ctypes.c_void_p) -> None:
        call("cublasLtMatmulDescSetAttribute", self.describe, c_int(attribute), byref(value), c_size_t(sizeof(value)))

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        aux: Tensor | None = None,
        bias: Tensor | None = None,
        onto: Tensor | None = None,
    ) -> None:
        room = torch.empty(WORKSPACE, dtype=torch.uint8, device=x.device)
        added = out if onto is None else onto
        aligned = not any(
            one is not None and one.data_ptr() % TAKEN_FOR_GRANTED for one in (x, weight, added, aux, bias)
        )
        # What a product ends in is said before each. cuBLAS launches on the current device, whatever the stream's is.
        with self.lock, torch.cuda.device(self.kind.device):
            for attribute, given in ((AUX, aux), (BIAS, bias)):
                if given is not None:
                    self.say(attribute, c_void_p(given.data_ptr()))
            if aligned not in self.ways:
                self.ways[aligned] = self.choose(aligned)
            call(
                "cublasLtMatmul", self.handle, self.describe, byref(c_float(1)),
                c_void_p(weight.data_ptr()), self.weight, c_void_p(x.data_ptr()), self.x,
                byref(c_float(onto is not None)), c_void_p(added.data_ptr()), self.out,
                c_void_p(out.data_ptr()), self.out,
                byref(self.ways[aligned]), c_void_p(room.data_ptr()), c_size_t(WORKSPACE),
                c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
            )  # fmt: skip

    def choose(self, aligned: bool) -> Heuristic:
        preference, found, count = made("cublasLtMatmulPreferenceCreate"), (Heuristic * len(WAYS))(), c_int()
        wishes: list[tuple[int, ctypes._SimpleCData[int]]] = [(MOST_WORKSPACE, c_size_t(WORKSPACE))]
        wishes += [] if aligned else [(attribute, c_uint32(LEAST)) for attribute in ALIGNMENTS]
        for attribute, wish in wishes:
            size = c_size_t(sizeof(wish))
            call("cublasLtMatmulPreferenceSetAttribute", preference, c_int(attribute), byref(wish), size)
        call(
            "cublasLtMatmulAlgoGetHeuristic", self.handle, self.describe, self.weight, self.x, self.out, self.out,
            preference, c_int(len(WAYS)), found, byref(count),
        )  # fmt: skip
        call("cublasLtMatmulPreferenceDestroy", preference)
        ways = [one for one in found[: count.value] if not one.status]
        if not ways:
            raise LMWorksError(f"cuBLAS knows no way to compute {self.kind}")
        return ways[min(self.kind.way, len(ways) - 1)]


@functools.cache
def product(kind: Kind) -> Product:
    return Product(kind)


@functools.cache
def library() -> ctypes.CDLL | None:
    """None where torch is made for other GPUs, or has cuBLAS within itself."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError:
        return None


def there(device: torch.device) -> bool:
    """Whether the operations below run: on a CPU they are formulas."""
    return device.type == "cpu" or library() is not None


there._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as `choose.fastest`


def way_of(op: str, wanted: str | None, device: torch.device, **shape: int) -> int | None:
    """In which way cuBLAS computes `op`; None where PyTorch does."""
    chosen = pick(op, wanted, IMPLEMENTATIONS, device, **shape)
    return None if chosen == TORCH else WAYS.index(chosen)


def takes(states: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    """Numbers of one type and 2 bytes, and rows that it can begin to read at, while gradients are wanted: a pass
    without them is left as it is.
    """
    dtype = states[0].dtype
    alike = dtype in TYPES and all(one is None or one.dtype == dtype for one in (*states, *weights, *biases))
    whole = states[0].numel() > 0 and not any(size % ALIGNED for weight in weights for size in weight.shape)
    return alike and whole and torch.is_grad_enabled() and there(states[0].device)


def as_autocast(first: Tensor, *others: Tensor | None) -> list[Any]:
    """Cast as autocast would, for operations that it does not know."""
    given = [first, *others]
    if not torch.is_autocast_enabled(first.device.type):
        return given
    dtype = torch.get_autocast_dtype(first.device.type)
    return [None if one is None else one.to(dtype) for one in given]


@functools.cache
def handle_of(device: int) -> c_void_p:
    with torch.cuda.device(device):
        return made("cublasLtCreate")


def layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
    return made("cublasLtMatrixLayoutCreate", c_int(TYPES[dtype]), c_uint64(rows), c_uint64(columns), c_int64(rows))


def made(function: str, *given: object) -> c_void_p:
    """What a function of cuBLAS makes. Never freed: there are as many as kinds of products."""
    handle = c_void_p()
    call(function, byref(handle), *given)
    return handle


def call(function: str, *given: object) -> None:
    if (cublas := library()) is None:
        raise LMWorksError(f"torch {torch.__version__} has no libcublasLt beside it: {function} cannot be called")
    if status := getattr(cublas, function)(*given):
        raise LMWorksError(f"{function} of cuBLAS failed with status {status}")


def fit(given: Tensor) -> Tensor:
    """Contiguous, and where cuBLAS can begin to read; copied where it is not."""
    given = given.contiguous()
    return given.clone() if given.data_ptr() % LEAST else given


# --- as operations of torch, which a compiler takes as they are ------------------------------------------


@torch.library.custom_op("lmworks::linear_gelu", mutates_args=(), device_types="cuda")
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, way: int) -> tuple[Tensor, Tensor]:
    """(tokens, in), (out, in), (out) → gelu(pre), pre."""
    (rows, inner), columns = x.shape, weight.shape[0]
    x, weight, bias = fit(x), fit(weight), None if bias is None else fit(bias)
    result, pre = x.new_empty(rows, columns), x.new_empty(rows, columns)
    kind = Kind(rows, columns, inner, True, GELU_AUX if bias is None else GELU_AUX_BIAS, way, x.dtype, x.device.index)
    product(kind)(x, weight, result, aux=pre, bias=bias)
    return result, pre


@linear_gelu.register_kernel("cpu")
def linear_gelu_reference(x: Tensor, weight: Tensor, bias: Tensor | None, _way: int = 0) -> tuple[Tensor, Tensor]:
    pre = F.linear(x, weight, bias)
    return by_sigmoid(pre), pre


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, _bias: Tensor | None, _way: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("lmworks::linear_dgelu", mutates_args=(), device_types="cuda")
def linear_dgelu(grad: Tensor, weight: Tensor, pre: Tensor, way: int) -> Tensor:
    """(tokens, out), (out, in), (tokens, in) → (grad · weight) · gelu′(pre)."""
    (rows, inner), columns = grad.shape, weight.shape[1]
    grad, weight, pre = fit(grad), fit(weight), fit(pre)
    result = grad.new_empty(rows, columns)
    kind = Kind(rows, columns, inner, False, DGELU, way, grad.dtype, grad.device.index)
    product(kind)(grad, weight, result, aux=pre)
    return result


@linear_dgelu.register_kernel("cpu")
def linear_dgelu_reference(grad: Tensor, weight: Tensor, pre: Tensor, _way: int = 0) -> Tensor:
    return ((grad @ weight) * slope(pre)).to(grad.dtype)


@linear_dgelu.register_fake
def _(grad: Tensor, weight: Tensor, _pre: Tensor, _way: int) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[1])


@torch.library.custom_op("lmworks::linear_add", mutates_args=(), device_types="cuda")
def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor, way: int) -> Tensor:
    """(tokens, in), (out, in), (out), (…, out) → onto + x · weightᵀ + bias, in the shape of `onto`."""
    (rows, inner), columns = x.shape, weight.shape[0]
    x, weight, onto, bias = fit(x), fit(weight), fit(onto), None if bias is None else fit(bias)
    result = x.new_empty(onto.shape)
    kind = Kind(rows, columns, inner, True, PLAIN if bias is None else PLAIN_BIAS, way, x.dtype, x.device.index)
    product(kind)(x, weight, result, bias=bias, onto=onto)
    return result


@linear_add.register_kernel("cpu")
def linear_add_reference(x: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor, _way: int = 0) -> Tensor:
    return onto.contiguous() + F.linear(x, weight, bias).view(onto.shape)


@linear_add.register_fake
def _(x: Tensor, _weight: Tensor, _bias: Tensor | None, onto: Tensor, _way: int) -> Tensor:
    return x.new_empty(onto.shape)
