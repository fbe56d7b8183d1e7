"""Room for weights that are about to be read."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def make_room(model: Module, device: torch.device, dtype: torch.dtype | None = None) -> Module:
    """A model of the meta device, on `device`, with anything in it; its numbers in `dtype`.

    As nn.Module.to_empty, which asks Python code for the layout of each tensor, and that loads a system for symbolic
    mathematics: seconds, when an engine starts.
    """

    def room(tensor: Tensor) -> Tensor:
        wide = dtype if tensor.is_floating_point() and dtype is not None else tensor.dtype
        return torch.empty(tensor.shape, dtype=wide, device=device)

    return model._apply(room)
