"""RMSNorm as `torch.ops.lmworks.rms_norm_native`: what PyTorch needs of an operator beside its kernels.

The schema and the kernels come with the library (rms_norm.cpp, rms_norm.cu). Tracing needs output shapes
(`register_fake`), autograd the gradient operator (`register_autograd`). With both it works in compiled graphs, under
fake tensors and with activation checkpointing, like PyTorch's own operators.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...spec import LMWorksError
from . import build

NAME = "rms_norm_native"
SOURCES = tuple(Path(__file__).with_name(f"rms_norm.{kind}") for kind in ("cpp", "cu"))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `kernels.rms_norm.reference`. The library must be loaded before torch.compile traces it."""
    if not torch.compiler.is_compiling():
        cuda = load().cuda
        if x.device.type == "cuda" and not cuda:
            raise LMWorksError(f"{NAME} was built for the CPU only: no nvcc was found (set CUDA_HOME to its toolkit)")
    normed, _ = torch.ops.lmworks.rms_norm_native(x, weight, eps)
    return normed


@functools.cache
def load() -> build.Build:
    """Load the operator; the first time it is built (up to a minute)."""
    made = build.plan_build(NAME, SOURCES)
    build.load_library(made)
    torch.library.register_fake(f"lmworks::{NAME}", forward_fake)
    torch.library.register_fake(f"lmworks::{NAME}_backward", backward_fake)
    torch.library.register_autograd(f"lmworks::{NAME}", backward, setup_context=setup_context)
    return made


def forward_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


def backward_fake(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    _, r = output
    ctx.mark_non_differentiable(r)
    ctx.save_for_backward(x, weight, r)


def backward(ctx: Any, grad: Tensor, _grad_r: Tensor) -> tuple[Tensor, Tensor, None]:
    grad_x, grad_weight = torch.ops.lmworks.rms_norm_native_backward(grad, *ctx.saved_tensors)
    return grad_x, grad_weight, None
