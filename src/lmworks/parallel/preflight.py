"""What a layout asks of this machine: refused at once where it is missing, not when the model is laid out."""

from __future__ import annotations

import torch

from ..kernels.training.flash_attention import runs_on
from ..plan.pipelines.stages import split_layers
from ..plan.policies import within_budget
from ..spec import RunSpec, SpecError
from .deepspeed import load_deepspeed
from .memory_preflight import refuse_oversized
from .pipeline import refuse_split_backward
from .tensor_parallel import refuse_async_tp


def refuse_impossible(spec: RunSpec, device: torch.device, force: bool = False) -> None:
    """`force`: what does not fit into memory is tried all the same."""
    layout = spec.parallel
    if spec.model.attention == "flash" and not runs_on(device):
        raise SpecError(
            f"model.attention = 'flash' needs a GPU, and this run is on {device.type}; use 'sdpa' or 'auto'"
        )
    if layout.async_tp:
        refuse_async_tp(device.type)
    if layout.pp > 1:
        refuse_split_backward(layout.schedule)
    if layout.engine == "deepspeed":
        load_deepspeed(device.type)
    if spec.precision.dtype == "fp8":
        from .float8 import refuse_float8

        refuse_float8(spec, device)
    if layout.recompute == "budget":
        stages = split_layers(spec.model, spec.data.seq, layout.pp * layout.virtual_stages)
        within_budget(spec, max(len(stage.layers) for stage in stages))
    if not force:
        refuse_oversized(spec, device)
