"""GEMMs with fused epilogues through the C interface of cuBLASLt, from the library that torch has loaded.

    linear_gelu    pre = x · weightᵀ + bias,  gelu(pre)      both are written
    linear_dgelu   (grad · weight) · gelu′(pre)              the backward pass of the same, through the layer after it
    linear_add     onto + x · weightᵀ + bias

PyTorch's epilogues end with a bias; further operations read and write the result again. cuBLAS is column-major: a
contiguous (rows, columns) of ours is its (columns, rows), so weights come first and results are transposed.

The best algorithm is measured, as for any op: "cublas 4" is the fifth of the heuristic's list.
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
from .gelu import gelu_grad, sigmoid_gelu

COMPUTE_32F, R_32F = 68, 0
TYPES = {torch.bfloat16: 14, torch.float16: 2}
TRANSPOSE_A, EPILOGUE, BIAS, AUX, AUX_WIDTH = 3, 7, 8, 11, 12  # attributes of a matmul descriptor
PLAIN, PLAIN_BIAS, GELU_AUX, GELU_AUX_BIAS, DGELU = 1, 4, 160, 164, 192  # epilogues
MAX_WORKSPACE, ALIGNMENTS = 1, (5, 6, 7, 8)  # attributes of a preference
ASSUMED_ALIGNMENT, MIN_ALIGNMENT = 256, 16  # bytes: what cuBLAS assumes, and what `align` guarantees
WORKSPACE = 32 * 2**20  # bytes, as cuBLAS advises for Hopper
ALIGNED = MIN_ALIGNMENT // 2  # elements of 2 bytes
ALGORITHMS = tuple(f"cublas {algorithm}" for algorithm in range(8))  # requested of the heuristic
IMPLEMENTATIONS = (TORCH, *ALGORITHMS)


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: one algorithm."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@dataclass(frozen=True)
class GemmSpec:
    """(rows, inner) · (inner, columns), row-major."""

    rows: int
    columns: int
    inner: int
    transposed: bool  # the second operand is (columns, inner), as the weight of a linear layer
    epilogue: int
    algorithm: int  # index in the heuristic's list, best first; beyond the last, the last
    dtype: torch.dtype
    device: int


class Gemm:
    """A GEMM of one shape and type, launched with different operands."""

    def __init__(self, spec: GemmSpec) -> None:
        self.spec, self.lock = spec, threading.Lock()
        self.handle = handle_of(spec.device)
        self.description = create("cublasLtMatmulDescCreate", c_int(COMPUTE_32F), c_int(R_32F))
        self.set_attribute(TRANSPOSE_A, c_int32(spec.transposed))
        self.set_attribute(EPILOGUE, c_int32(spec.epilogue))
        self.set_attribute(AUX_WIDTH, c_int64(spec.columns))
        inner, columns = (spec.inner, spec.columns) if spec.transposed else (spec.columns, spec.inner)
        self.weight = layout(spec.dtype, inner, columns)
        self.x, self.out = layout(spec.dtype, spec.inner, spec.rows), layout(spec.dtype, spec.columns, spec.rows)
        self.algorithms: dict[bool, Heuristic] = {}  # by whether operands have the alignment that cuBLAS assumes

    def set_attribute(self, attribute: int, value: ctypes._SimpleCData[int] | ctypes.c_void_p) -> None:
        call(
            "cublasLtMatmulDescSetAttribute", self.description, c_int(attribute), byref(value), c_size_t(sizeof(value))
        )

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
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=x.device)
        added = out if onto is None else onto
        aligned = not any(
            one is not None and one.data_ptr() % ASSUMED_ALIGNMENT for one in (x, weight, added, aux, bias)
        )
        # Epilogue pointers are set before each launch. cuBLAS launches on the current device, whatever the stream's is.
        with self.lock, torch.cuda.device(self.spec.device):
            for attribute, given in ((AUX, aux), (BIAS, bias)):
                if given is not None:
                    self.set_attribute(attribute, c_void_p(given.data_ptr()))
            if aligned not in self.algorithms:
                self.algorithms[aligned] = self.choose(aligned)
            call(
                "cublasLtMatmul", self.handle, self.description, byref(c_float(1)),
                c_void_p(weight.data_ptr()), self.weight, c_void_p(x.data_ptr()), self.x,
                byref(c_float(onto is not None)), c_void_p(added.data_ptr()), self.out,
                c_void_p(out.data_ptr()), self.out,
                byref(self.algorithms[aligned]), c_void_p(workspace.data_ptr()), c_size_t(WORKSPACE),
                c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
            )  # fmt: skip

    def choose(self, aligned: bool) -> Heuristic:
        preference, found, count = create("cublasLtMatmulPreferenceCreate"), (Heuristic * len(ALGORITHMS))(), c_int()
        preferences: list[tuple[int, ctypes._SimpleCData[int]]] = [(MAX_WORKSPACE, c_size_t(WORKSPACE))]
        preferences += [] if aligned else [(attribute, c_uint32(MIN_ALIGNMENT)) for attribute in ALIGNMENTS]
        for attribute, value in preferences:
            size = c_size_t(sizeof(value))
            call("cublasLtMatmulPreferenceSetAttribute", preference, c_int(attribute), byref(value), size)
        call(
            "cublasLtMatmulAlgoGetHeuristic", self.handle, self.description, self.weight, self.x, self.out, self.out,
            preference, c_int(len(ALGORITHMS)), found, byref(count),
        )  # fmt: skip
        call("cublasLtMatmulPreferenceDestroy", preference)
        algorithms = [one for one in found[: count.value] if not one.status]
        if not algorithms:
            raise LMWorksError(f"cuBLAS has no algorithm for {self.spec}")
        return algorithms[min(self.spec.algorithm, len(algorithms) - 1)]


@functools.cache
def gemm(spec: GemmSpec) -> Gemm:
    return Gemm(spec)


@functools.cache
def library() -> ctypes.CDLL | None:
    """None if torch is built for other GPUs, or links cuBLAS statically."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError:
        return None


def is_available(device: torch.device) -> bool:
    """Whether the operations below run; on a CPU they are formulas."""
    return device.type == "cpu" or library() is not None


is_available._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as `dispatch.fastest`


def pick_algorithm(op: str, wanted: str | None, device: torch.device, **shape: int) -> int | None:
    """The cuBLAS algorithm for `op`; None if PyTorch computes it."""
    chosen = pick(op, wanted, IMPLEMENTATIONS, device, **shape)
    return None if chosen == TORCH else ALGORITHMS.index(chosen)


def supports(states: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    """One 16-bit dtype and aligned rows, with gradients enabled: passes without gradients are left to PyTorch."""
    dtype = states[0].dtype
    alike = dtype in TYPES and all(one is None or one.dtype == dtype for one in (*states, *weights, *biases))
    whole = states[0].numel() > 0 and not any(size % ALIGNED for weight in weights for size in weight.shape)
    return alike and whole and torch.is_grad_enabled() and is_available(states[0].device)


def as_autocast(first: Tensor, *others: Tensor | None) -> list[Any]:
    """Cast as autocast would: it does not know these operations."""
    given = [first, *others]
    if not torch.is_autocast_enabled(first.device.type):
        return given
    dtype = torch.get_autocast_dtype(first.device.type)
    return [None if one is None else one.to(dtype) for one in given]


@functools.cache
def handle_of(device: int) -> c_void_p:
    with torch.cuda.device(device):
        return create("cublasLtCreate")


def layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
    return create("cublasLtMatrixLayoutCreate", c_int(TYPES[dtype]), c_uint64(rows), c_uint64(columns), c_int64(rows))


def create(function: str, *given: object) -> c_void_p:
    """A handle that a cuBLAS function creates. Never freed: there is one per GemmSpec."""
    handle = c_void_p()
    call(function, byref(handle), *given)
    return handle


def call(function: str, *given: object) -> None:
    if (cublas := library()) is None:
        raise LMWorksError(f"torch {torch.__version__} has no libcublasLt beside it: {function} cannot be called")
    if status := getattr(cublas, function)(*given):
        raise LMWorksError(f"{function} of cuBLAS failed with status {status}")


def align(given: Tensor) -> Tensor:
    """Contiguous and aligned to MIN_ALIGNMENT; copied if necessary."""
    given = given.contiguous()
    return given.clone() if given.data_ptr() % MIN_ALIGNMENT else given


# --- torch operators, opaque to the compiler -------------------------------------------------------------


@torch.library.custom_op("lmworks::linear_gelu", mutates_args=(), device_types="cuda")
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, algorithm: int) -> tuple[Tensor, Tensor]:
    """(tokens, in), (out, in), (out) → gelu(pre), pre."""
    (rows, inner), columns = x.shape, weight.shape[0]
    x, weight, bias = (
        align(x),
        align(weight),
        None if bias is None else align(bias),
    )
    result, pre = x.new_empty(rows, columns), x.new_empty(rows, columns)
    spec = GemmSpec(
        rows, columns, inner, True, GELU_AUX if bias is None else GELU_AUX_BIAS, algorithm, x.dtype, x.device.index
    )
    gemm(spec)(x, weight, result, aux=pre, bias=bias)
    return result, pre


@linear_gelu.register_kernel("cpu")
def linear_gelu_reference(x: Tensor, weight: Tensor, bias: Tensor | None, _algorithm: int = 0) -> tuple[Tensor, Tensor]:
    pre = F.linear(x, weight, bias)
    return sigmoid_gelu(pre), pre


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, _bias: Tensor | None, _algorithm: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("lmworks::linear_dgelu", mutates_args=(), device_types="cuda")
def linear_dgelu(grad: Tensor, weight: Tensor, pre: Tensor, algorithm: int) -> Tensor:
    """(tokens, out), (out, in), (tokens, in) → (grad · weight) · gelu′(pre)."""
    (rows, inner), columns = grad.shape, weight.shape[1]
    grad, weight, pre = align(grad), align(weight), align(pre)
    result = grad.new_empty(rows, columns)
    spec = GemmSpec(rows, columns, inner, False, DGELU, algorithm, grad.dtype, grad.device.index)
    gemm(spec)(grad, weight, result, aux=pre)
    return result


@linear_dgelu.register_kernel("cpu")
def linear_dgelu_reference(grad: Tensor, weight: Tensor, pre: Tensor, _algorithm: int = 0) -> Tensor:
    return ((grad @ weight) * gelu_grad(pre)).to(grad.dtype)


@linear_dgelu.register_fake
def _(grad: Tensor, weight: Tensor, _pre: Tensor, _algorithm: int) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[1])


@torch.library.custom_op("lmworks::linear_add", mutates_args=(), device_types="cuda")
def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor, algorithm: int) -> Tensor:
    """(tokens, in), (out, in), (out), (…, out) → onto + x · weightᵀ + bias, in the shape of `onto`."""
    (rows, inner), columns = x.shape, weight.shape[0]
    x, weight, onto, bias = (
        align(x),
        align(weight),
        align(onto),
        None if bias is None else align(bias),
    )
    result = x.new_empty(onto.shape)
    spec = GemmSpec(
        rows, columns, inner, True, PLAIN if bias is None else PLAIN_BIAS, algorithm, x.dtype, x.device.index
    )
    gemm(spec)(x, weight, result, bias=bias, onto=onto)
    return result


@linear_add.register_kernel("cpu")
def linear_add_reference(x: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor, _algorithm: int = 0) -> Tensor:
    return onto.contiguous() + F.linear(x, weight, bias).view(onto.shape)


@linear_add.register_fake
def _(x: Tensor, _weight: Tensor, _bias: Tensor | None, onto: Tensor, _algorithm: int) -> Tensor:
    return x.new_empty(onto.shape)
