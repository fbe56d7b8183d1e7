"""AdamW with decay on matrices only, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..spec import OptimSpec


def make_optimizer(model: nn.Module, optim: OptimSpec) -> torch.optim.AdamW:
    """Weight decay pulls matrices towards zero; gains and biases have no scale to control and are left alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=True,  # one pass over the states, on a CPU too
    )


def learning_rate(optim: OptimSpec, step: int) -> float:
    """The rate of step 0 … steps − 1: a linear rise over `warmup`, then the schedule down to min_lr_ratio × lr."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    floor = optim.min_lr_ratio
    left = max(1, optim.steps - 1 - optim.warmup)  # steps over which the rate can fall
    done = min((step - optim.warmup) / left, 1.0)  # 0 at the peak, 1 at the last step
    if optim.schedule == "cosine":
        shape = (1 + math.cos(math.pi * done)) / 2
    elif optim.schedule == "linear":
        shape = 1 - done
    elif optim.schedule == "wsd":  # warm up, stay, decay over the last part of the run
        decay_steps = min(left, max(1, round(optim.decay_ratio * optim.steps)))
        shape = min(1.0, (1 - done) * left / decay_steps)
    else:
        shape = 1.0
        floor = 0.0
    return optim.lr * (floor + (1 - floor) * shape)
