"""Room for weights that are about to be read."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def make_room(model: Module, device: torch.device, dtype: torch.dtype) -> Module:
    """A model of the meta device, on `device`, with anything in it; its parameters in `dtype`.

    Buffers keep their formats: the bias of a choice of experts is fp32, quantized weights are integers. As
    nn.Module.to_empty, which asks Python code for the layout of each tensor, and that loads a system for symbolic
    mathematics: seconds, when an engine starts.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
