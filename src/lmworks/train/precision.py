"""Compute precision: what a forward pass runs in, and the loss scale that fp16 needs."""

from __future__ import annotations

import torch

from ..spec import PrecisionSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: PrecisionSpec, device: torch.device) -> torch.autocast:
    """Matrix products in `dtype`, sums and norms in fp32; weights stay fp32."""
    return torch.autocast(device.type, dtype=DTYPES[precision.dtype], enabled=precision.dtype != "fp32")


def make_scaler(precision: PrecisionSpec, device: torch.device) -> torch.amp.GradScaler:
    """fp16 gradients underflow below 6e-8: the loss is scaled up, and down again before the step. Else a no-op."""
    return torch.amp.GradScaler(
        device.type,
        init_scale=precision.loss_scale,
        growth_interval=precision.loss_scale_window,
        enabled=precision.dtype == "fp16",
    )
