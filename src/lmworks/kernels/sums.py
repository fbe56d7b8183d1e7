"""Sums that products take along, where no kernel of their own is needed for them.

    x + out(y)              the product begins with x
    q(y), k(y), v(y)        backward, the gradient of y: the second product begins with the first, the third with both

A compiler leaves such sums to the kernel that follows, a norm or a norm's gradient. That reads every term then, and a
norm's gradient of five tensors is far from the pace at which it reads three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cublas

Layer = tuple[Tensor, Tensor | None]  # (out, in), (out)


def add_linear(x: Tensor, y: Tensor, layer: Layer, implementation: str | None = None) -> Tensor:
    """x + linear(y): (…, out), (…, in) → (…, out)."""
    y, weight, bias = cublas.as_autocast(y, *layer)
    shape = {"hidden": weight.shape[0], "inner": weight.shape[1]}
    way = cublas.way_of("linear_sum", implementation, y.device, **shape)
    if way is None or not cublas.takes((x, y), (weight,), (bias,)):
        return x + F.linear(y, weight, bias)
    return AddLinear.apply(x, y.flatten(0, -2), weight, bias, way)


class AddLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, way: int) -> Tensor:
        ctx.save_for_backward(y, weight)
        return cublas.linear_add(y, weight, bias, x, way)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, weight = ctx.saved_tensors
        _, wants_y, wants_weight, wants_bias, _ = ctx.needs_input_grad
        flat = grad.flatten(0, -2)
        return (
            grad,
            flat @ weight if wants_y else None,
            flat.t() @ y if wants_weight else None,
            flat.sum(0) if wants_bias else None,
            None,
        )


def linears(y: Tensor, layers: Sequence[Layer], implementation: str | None = None) -> list[Tensor]:
    """linear(y) of each layer."""
    y, *flat = cublas.as_autocast(y, *(one for layer in layers for one in layer))
    weights, biases = flat[::2], flat[1::2]
    shape = {"hidden": y.shape[-1], "wide": sum(weight.shape[0] for weight in weights)}
    way = cublas.way_of("input_gradient", implementation, y.device, **shape)
    if way is None or not cublas.takes((y,), weights, biases):
        return [F.linear(y, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    found = Linears.apply(y.flatten(0, -2), way, *weights, *biases)
    return [one.unflatten(0, y.shape[:-1]) for one in found]


class Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, way: int, *layers: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = halves(layers)
        ctx.save_for_backward(y, *weights)
        ctx.way = way
        return tuple(F.linear(y, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, *weights = ctx.saved_tensors
        wants_y, _, *wanted = ctx.needs_input_grad
        wants_weight, wants_bias = halves(wanted)
        grad_y = input_gradient(grads, weights, ctx.way) if wants_y else None
        of_weights = [grad.t() @ y if wants else None for grad, wants in zip(grads, wants_weight, strict=True)]
        of_biases = [grad.sum(0) if wants else None for grad, wants in zip(grads, wants_bias, strict=True)]
        return grad_y, None, *of_weights, *of_biases


def input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor], way: int) -> Tensor:
    """Σ grad · weight: (tokens, out) and (out, in) of each layer → (tokens, in)."""
    (first, *grads), (weight, *weights) = grads, weights
    total = first @ weight
    for grad, weight in zip(grads, weights, strict=True):
        total = cublas.product_add(grad, weight, total, way)
    return total


def input_gradient_reference(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Each product by itself, and their sum."""
    first, *others = (grad @ weight for grad, weight in zip(grads, weights, strict=True))
    return sum(others, start=first)


def halves(given: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    return given[: len(given) // 2], given[len(given) // 2 :]
