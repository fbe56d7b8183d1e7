"""Mixed precision: the format of weights, autocast, the loss scale of fp16, fp8 linear layers."""

from __future__ import annotations

import logging
import math
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.training.float8 import has_fp8_matmul
from ..model import GPT
from ..model.gpt import Linear
from ..model.training_fusion import fuse_float8_swiglu
from ..spec import PrecisionSpec, RunSpec, SpecError
from ..spec.precision import FP8_ALIGNED, LARGEST_SCALE

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cast_weights(precision: PrecisionSpec, model: nn.Module) -> None:
    """Weights in the format of `precision.weights`; on the meta device, before anything shards them.

    All of them, norms and biases too: FSDP2 gathers tensors of one format, and with a master nothing is lost. Buffers
    stay fp32.
    """
    if precision.weights == "fp32":
        return
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(weight.to(DTYPES[precision.weights]), weight.requires_grad))


def autocast_forward(precision: PrecisionSpec, model: nn.Module, device: torch.device) -> None:
    """Matrix products of the forward pass in `dtype`, sums and norms in fp32; the format of weights stays.

    Autocast is put around the model's own forward function, so that it holds wherever that is called from: a loop, a
    pipeline's schedule, an evaluation.
    """
    if precision.compute == "fp32" or "forward" in vars(model):
        return
    model.forward = torch.autocast(device.type, dtype=DTYPES[precision.compute])(model.forward)


class LossScale:
    """fp16 gradients underflow below 6e-8: the loss is scaled up, and gradients down again before the step.

    On overflow the step is skipped and the scale halved; after `window` good steps it doubles, up to where no gradient
    would be left. It follows from the norm of the whole gradient, which every rank has, so all of them skip the same
    steps. Other precisions: always 1.
    """

    def __init__(self, precision: PrecisionSpec) -> None:
        self.enabled = precision.dtype == "fp16"
        self.window = precision.loss_scale_window
        self.scale = precision.loss_scale if self.enabled else 1.0
        self.good = 0  # steps since the scale last changed

    def update(self, norm: float) -> None:
        if not self.enabled:
            return
        if not math.isfinite(norm):
            self.scale, self.good = self.scale / 2, 0
            return
        self.good += 1
        if self.good == self.window:
            self.scale, self.good = min(self.scale * 2, LARGEST_SCALE), 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self.good} if self.enabled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.enabled and state:  # none was saved before the run's dtype was changed to fp16
            self.scale, self.good = state["scale"], state["good"]


# --- fp8 -------------------------------------------------------------------------------------------------


def check_float8(spec: RunSpec, device: torch.device) -> None:
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
    """fp8 products in the linear layers of the blocks, by torchao; in place, before blocks are compiled or sharded.

    Products are summed in fp32, results are bf16. Where it was measured to be faster, the three products of
    SwiGLU are one operation of ours (`kernels/training/swiglu_fp8.py`).

    Operands are cast just before each product: activations and weights to E4M3, gradients to E5M2 (tensorwise) or E4M3
    (rowwise), each with a scale from its own largest number. Saved activations stay in bf16, weights in
    `precision.weights`, and names stay, so checkpoints do not change.

    A GPU has fp8 products from compute capability 8.9 on (Ada, Hopper); elsewhere they are emulated, slowly, with the
    same rounding. Without torch.compile the casts cost more than the products gain.
    """
    float8 = load_torchao()
    config = float8.Float8LinearConfig.from_recipe_name(spec.precision.fp8_scaling)
    emulate = not has_fp8_matmul(device)
    for block in part.layers():
        float8.convert_to_float8_training(
            block, module_filter_fn=lambda module, _: fits(module), config=replace(config, emulate=emulate)
        )
        if device.type == "cpu":  # torchao supports CUDA's autocast only
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
