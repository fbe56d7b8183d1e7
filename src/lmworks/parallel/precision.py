"""What weights are kept in, what products run in, and the loss scale that fp16 needs and all ranks agree on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..spec import PrecisionSpec
from ..spec.precision import LARGEST_SCALE

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cast_weights(precision: PrecisionSpec, model: nn.Module) -> None:
    """Weights in the format that the run keeps them in; on the meta device, before anything cuts or shards them.

    All of them, norms and biases too: FSDP2 gathers tensors of one format, and with a master nothing is lost. Buffers
    stay fp32.
    """
    if precision.weights == "fp32":
        return
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(weight.to(DTYPES[precision.weights]), weight.requires_grad))


def autocast_forward(precision: PrecisionSpec, model: nn.Module, device: torch.device) -> None:
    """Matrix products of the forward pass in `dtype`, sums and norms in fp32; what weights are kept in stays.

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
