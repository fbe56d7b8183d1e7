"""SwiGLU's MLP with fp8 products, down(silu(gate(x)) · up(x)), and tensor-wise scales.

Between its products are the widest tensors of a block, and the kernels that a compiler generates for them reach half of
the memory bandwidth: gradients are needed as they are and transposed, for the gradients of inputs and of weights. Here
kernels of `swiglu_fp8_triton` do it; the casts of x and of its gradient are left to the compiler, which fuses them with
the norm before. Formats, scales and saved tensors are those of torchao's layers:

    forward     x, gate, up, down → e4m3        silu(gate(x)) · up(x) → e4m3      saved: x, gate(x), up(x), scales
    backward    gradients → e5m2                weights, x and silu(…) · … again, transposed
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...spec.precision import FP8_ALIGNED
from ..dispatch import pick
from .float8 import E4M3, E5M2, Float8, cast, linear, reference

OP = "swiglu_fp8"
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # see `backward`
IMPLEMENTATIONS = ("torch", "triton")  # torch: torchao's layers


def chosen(x: Tensor, gate: Tensor, implementation: str | None = None) -> bool:
    """Whether to use it: bf16, a supported number of tokens, gradients enabled."""
    shape = {"tokens": x.shape[:-1].numel(), "ffn": gate.shape[0]}
    autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    fits = dtype == gate.dtype == torch.bfloat16 and shape["tokens"] % FP8_ALIGNED == 0 and torch.is_grad_enabled()
    return fits and pick(OP, implementation, IMPLEMENTATIONS, x.device, **shape) == "triton"


def swiglu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """(…, hidden), weights (ffn, hidden), (ffn, hidden) and (hidden, ffn) → (…, hidden)."""
    return SwiGLUMLP.apply(x.to(gate.dtype).flatten(0, -2), gate, up, down).view(x.shape)


class SwiGLUMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        small = reference(x, E4M3)
        small_gate, small_up, small_down = (reference(weight, E4M3) for weight in (gate, up, down))
        gated, upped = (linear(small, weight, x.dtype) for weight in (small_gate, small_up))
        product = Float8(*forward(gated, upped))
        scales = (one.scale for one in (small, small_gate, small_up, small_down, product))
        ctx.save_for_backward(x, gate, up, down, gated, upped, *scales)
        return linear(product, small_down, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, gate, up, down, gated, upped, *scales = ctx.saved_tensors
        of_x, of_gate, of_up, of_down, of_product = scales
        small = reference(grad, E5M2)
        small_transposed, x_transposed = transposed(small), transposed(Float8(cast(x, of_x, E4M3), of_x))
        weights = (gate, of_gate), (up, of_up), (down, of_down)
        gate, up, down = (Float8(cast_transposed(weight, scale), scale) for weight, scale in weights)
        grad_product = linear(small, down, x.dtype, gradient=True)
        *values, product_transposed, of_grad_gate, of_grad_up = backward(grad_product, gated, upped, of_product)
        of_both = of_grad_gate, of_grad_gate, of_grad_up, of_grad_up
        grad_gate, gate_transposed, grad_up, up_transposed = map(Float8, values, of_both)
        return (
            linear(grad_gate, gate, x.dtype, gradient=True) + linear(grad_up, up, x.dtype, gradient=True),
            linear(gate_transposed, x_transposed, x.dtype, gradient=True),
            linear(up_transposed, x_transposed, x.dtype, gradient=True),
            linear(small_transposed, Float8(product_transposed, of_product), x.dtype, gradient=True),
        )


def transposed(x: Float8) -> Float8:
    return Float8(x.values.t().contiguous(), x.scale)


# --- torch operators, opaque to the compiler -------------------------------------------------------------


@torch.library.custom_op("lmworks::swiglu_fp8", mutates_args=(), device_types="cuda")
def forward(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) · up in e4m3, and its scale."""
    from . import swiglu_fp8_triton

    return swiglu_fp8_triton.forward(gate, up)


@forward.register_kernel("cpu")
def forward_reference(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return reference(silu_mul(gate, up), E4M3)


@forward.register_fake
def _(gate: Tensor, _up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape, dtype=E4M3), gate.new_empty((), dtype=torch.float32)


@torch.library.custom_op("lmworks::swiglu_fp8_backward", mutates_args=(), device_types="cuda")
def backward(grad: Tensor, gate: Tensor, up: Tensor, scale: Tensor) -> Gradients:
    """Gradients of gate and up in e5m2, each as it is and transposed; silu(gate) · up in e4m3 with this scale,
    transposed; and the scales of both gradients.
    """
    from . import swiglu_fp8_triton

    return swiglu_fp8_triton.backward(grad, gate, up, scale)


@backward.register_kernel("cpu")
def backward_reference(grad: Tensor, gate: Tensor, up: Tensor, scale: Tensor) -> Gradients:
    product = cast(silu_mul(gate, up), scale, E4M3)
    grad, gate, up = grad.float(), gate.float(), up.float()
    s = torch.sigmoid(gate)
    of_gate, of_up = reference(grad * up * s * (1 + gate * (1 - s)), E5M2), reference(grad * gate * s, E5M2)
    values = of_gate.values, transposed(of_gate).values, of_up.values, transposed(of_up).values
    return *values, product.t().contiguous(), of_gate.scale, of_up.scale


@backward.register_fake
def _(_grad: Tensor, gate: Tensor, _up: Tensor, scale: Tensor) -> Gradients:
    rows, columns = gate.shape
    as_is = [gate.new_empty(gate.shape, dtype=E5M2) for _ in range(2)]
    flat = [gate.new_empty(columns, rows, dtype=dtype) for dtype in (E5M2, E5M2, E4M3)]
    return as_is[0], flat[0], as_is[1], flat[1], flat[2], scale.new_empty(()), scale.new_empty(())


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate.float()) * up.float()


@torch.library.custom_op("lmworks::cast_transposed", mutates_args=(), device_types="cuda")
def cast_transposed(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale in e4m3, transposed: (rows, columns) → (columns, rows)."""
    from .float8_triton import cast as launch

    return launch(x, scale, E4M3, transposed=True)


@cast_transposed.register_kernel("cpu")
def cast_transposed_reference(x: Tensor, scale: Tensor) -> Tensor:
    return cast(x, scale, E4M3).t().contiguous()


@cast_transposed.register_fake
def _(x: Tensor, _scale: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0], dtype=E4M3)
