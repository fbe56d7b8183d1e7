"""Model and optimizer as one dictionary keyed by parameter name, whatever the layout of either.

Optimizers number their parameters in the order of their groups, an order that another layout (or another
split into decay and no decay) changes. Names do not. What a parameter group is *set* to (betas, decay,
fused …) follows from the spec and the device, so that a checkpoint can move between devices; of it, only the
learning rate is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def training_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """{"model": {name: …}, "optim": {"state.name.exp_avg": …}}: the live tensors, to be saved or loaded into."""
    return {"model": get_model_state_dict(model), "optim": optimizer_state(model, optimizer)}


def restore(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Make model and optimizer what `state` says, e.g. after a checkpoint was loaded into it."""
    set_model_state_dict(model, state["model"])
    saved = dict(state["optim"])
    everything = flat_state(model, optimizer)
    for name, value in everything.items():
        if is_rate(name) and not isinstance(value, torch.Tensor):
            saved[name] = saved[name].item()
    set_optimizer_state_dict(model, optimizer, {**everything, **saved}, options=BY_NAME)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {
        name: value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        for name, value in flat_state(model, optimizer).items()
        if name.startswith("state.") or is_rate(name)
    }


def is_rate(name: str) -> bool:
    return name.startswith("param_groups.") and name.endswith(".lr")


def flat_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The whole optimizer by name; before its first step, what that step would have started from.

    PyTorch creates missing moments by taking a step with zero gradients and zero rate. Two things are put
    right around it: it skips this where gradients exist, and it leaves the step count at 1, which would shift
    the bias correction of the whole run.
    """
    if optimizer.state:
        return get_optimizer_state_dict(model, optimizer, options=BY_NAME)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=BY_NAME)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for name, value in state.items():
        if name.startswith("state.") and name.endswith(".step"):
            value.zero_()
    return state
