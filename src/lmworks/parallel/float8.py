"""Linear layers of the blocks in 8 bits, by torchao: products of fp8 numbers, summed in fp32, results in bf16. Where it
was measured to be faster, SwiGLU's three are one operation of ours (`kernels/training/swiglu_fp8.py`).

Every product of a step gets its operands cast just before it: activations and weights to E4M3, gradients to E5M2
(tensorwise) or E4M3 (rowwise), each with a scale that follows from its own largest number. What is kept between passes
stays in bf16, weights stay as `precision.weights` says, and names stay: a checkpoint does not know of it.

A GPU has such products from compute capability 8.9 on (Ada, Hopper); elsewhere they are emulated, slowly, with the same
rounding. Without torch.compile the casts cost more than the products gain.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.training.float8 import has_products
from ..model import GPT
from ..model.gpt import Linear
from ..model.training_fusion import fuse_float8_swiglu
from ..spec import RunSpec, SpecError
from ..spec.precision import FP8_ALIGNED


def refuse_float8(spec: RunSpec, device: torch.device) -> None:
    load_torchao()
    if device.type == "cuda" and not spec.parallel.compile:
        warnings.warn(
            "precision.dtype = 'fp8' without parallel.compile = true is slower than bf16: casts are not fused",
            stacklevel=2,
        )


def load_torchao() -> Any:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # of kernels for other devices, which it does not find
    try:
        import torchao.float8
    except ImportError as error:
        raise SpecError(
            f"precision.dtype = 'fp8' needs torchao, which cannot be imported here ({error}): "
            'pip install "lmworks[fp8]"'
        ) from None
    finally:
        logging.disable(before)
    return torchao.float8


def apply_float8(part: GPT, spec: RunSpec, device: torch.device) -> None:
    """In place, on the meta device, before blocks are compiled or sharded."""
    float8 = load_torchao()
    config = float8.Float8LinearConfig.from_recipe_name(spec.precision.fp8_scaling)
    emulate = not has_products(device)
    for block in part.layers():
        float8.convert_to_float8_training(
            block, module_filter_fn=lambda module, _: fits(module), config=replace(config, emulate=emulate)
        )
        if device.type == "cpu":  # torchao asks for CUDA's autocast alone
            for module in block.modules():
                if isinstance(module, float8.float8_linear.Float8Linear):
                    module.register_forward_pre_hook(cast_input)
        if spec.precision.fp8_scaling == "tensorwise" and not emulate:
            fuse_float8_swiglu(block, float8.float8_linear.Float8Linear)
    if spec.precision.fp8_head:
        part.cross_entropy = partial(part.cross_entropy, fp8=True)


def fits(module: nn.Module) -> bool:
    """Our own linear layers, as wide as the products want. Routers, of another class, decide in bf16."""
    return type(module) is Linear and not any(size % FP8_ALIGNED for size in module.weight.shape)


def cast_input(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0].to(torch.get_autocast_dtype("cpu")), *args[1:]) if torch.is_autocast_enabled("cpu") else args
