"""The optimizer: decay on matrices only, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ..parallel.data_parallel import Shard
from ..spec import OptimSpec, PrecisionSpec
from .adamw import NarrowOptimizer


def make_optimizer(
    shards: Iterable[Shard], optim: OptimSpec, precision: PrecisionSpec | None = None, seed: int = 0
) -> torch.optim.Optimizer:
    """Weight decay pulls matrices towards zero; gains and biases have no scale to control and are left alone.

    PyTorch's where weights and states are fp32. `seed` is that of random bits, where anything is rounded by them.
    """
    # Of a short weight some ranks have no rows; what is not trained has no gradient.
    leaves = [shard for shard in shards if shard.leaf.numel() and shard.leaf.requires_grad]
    matrices = [shard.leaf for shard in leaves if len(shard.shape) >= 2]
    others = [shard.leaf for shard in leaves if len(shard.shape) < 2]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups, adam = [group for group in groups if group["params"]], optim.optimizer == "adamw"
    # fused: one pass over the states, on a CPU too, and it takes `grad_scale` and `found_inf` (see step_scalars.py)
    if precision is not None and (precision.weights == "bf16" or (adam and precision.states == "bf16")):
        return NarrowOptimizer(groups, leaves, optim, precision, seed)
    if not adam:
        return torch.optim.SGD(groups, lr=optim.lr, fused=True)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)


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
