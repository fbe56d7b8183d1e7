"""The optimizer: decay on matrices only, the learning rate as a pure function of the step and, under μP, of a weight's
role; AdamW or SGD in 16 bits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..kernels.training.adamw import AdamWConfig, ParamState, adamw
from ..parallel.data_parallel import Shard
from ..spec import LMWorksError, ModelSpec, OptimSpec, PrecisionSpec
from ..spec.parametrization import Scales, scales_by_name


def make_optimizer(
    shards: Iterable[Shard],
    model: ModelSpec,
    optim: OptimSpec,
    precision: PrecisionSpec | None = None,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Weight decay pulls matrices towards zero; gains and biases have no scale to control and are left alone.

    PyTorch's where weights and states are fp32. `seed` is that of random bits, where anything is rounded by them.
    """
    # Of a short weight some ranks have no rows; what is not trained has no gradient.
    leaves = [shard for shard in shards if shard.leaf.numel() and shard.leaf.requires_grad]
    groups, adam = parameter_groups(leaves, model, optim), optim.optimizer == "adamw"
    # fused: one pass over the states, on a CPU too, and it takes `grad_scale` and `found_inf` (see step_scalars.py)
    if precision is not None and precision.low_precision_optimizer(optim.optimizer):
        return LowPrecisionOptimizer(groups, leaves, optim, precision, seed)
    if not adam:
        return torch.optim.SGD(groups, lr=optim.lr, fused=True)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)


def parameter_groups(shards: Iterable[Shard], model: ModelSpec, optim: OptimSpec) -> list[dict[str, Any]]:
    """Weights that are updated alike: matrices, then the rest; under μP those of one learning rate and ε each."""
    alike: dict[tuple[bool, Scales], list[Tensor]] = {}
    for shard in sorted(shards, key=lambda shard: len(shard.shape) < 2):
        alike.setdefault((len(shard.shape) >= 2, scales_by_name(model, shard.name)), []).append(shard.leaf)
    groups = []
    for (matrix, scales), leaves in alike.items():
        scale = scales.learning_rate(optim.optimizer)
        decay = optim.weight_decay / scale if matrix else 0.0  # lr × decay stays
        group = {"params": leaves, "weight_decay": decay, "lr_scale": scale, "lr": optim.lr * scale}
        groups.append(group | ({"eps": optim.eps * scales.grad} if optim.optimizer == "adamw" else {}))
    return groups


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Of every group, for the step to come."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


def learning_rate(optim: OptimSpec, step: int) -> float:
    """The rate of step 0 … steps − 1: a linear rise over `warmup`, then the schedule down to min_lr_ratio × lr.

    The last step has that rate. Where it is 0 the one after the last would: a step at rate 0 trains nothing.
    """
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    floor = optim.min_lr_ratio
    left = max(1, optim.steps - (floor > 0) - optim.warmup)  # steps over which the rate can fall
    done = min((step - optim.warmup) / left, 1.0)  # 0 at the peak, 1 where the rate is lowest
    if optim.schedule == "cosine":
        shape = (1 + math.cos(math.pi * done)) / 2
    elif optim.schedule == "linear":
        shape = 1 - done
    elif optim.schedule == "wsd":  # warm up, stay, decay over the last part of the run
        shape = min(1.0, (1 - done) * left / optim.decay_steps)
    else:
        shape = 1.0
        floor = 0.0
    return optim.lr * (floor + (1 - floor) * shape)


# --- weights or optimizer state in 16 bits ---------------------------------------------------------------


class LowPrecisionOptimizer(torch.optim.Optimizer):
    """AdamW (or plain SGD) over `kernels.training.adamw`.

    The state has the names of PyTorch's AdamW (`step`, `exp_avg`, `exp_avg_sq`), so that a checkpoint of the one can be
    read by the other; `low` are the bits that make a bf16 weight an fp32 number. The state is made with the optimizer,
    not with its first step.

    `grad_scale` and `found_inf` are fp32 scalars, as PyTorch's fused optimizers take them: gradients are divided by
    the one; where the other is 1, weights, states and steps stay as they are. Nothing waits for the device.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        shards: Iterable[Shard],
        optim: OptimSpec,
        precision: PrecisionSpec,
        seed: int,
    ) -> None:
        super().__init__(groups, {"lr": optim.lr})
        self.optim, self.precision = optim, precision
        self.seeds = {shard.leaf: seed_of(seed, shard.name) for shard in shards}
        lows = {shard.leaf: shard.low for shard in shards}
        for leaf in (leaf for group in self.param_groups for leaf in group["params"]):
            self.state[leaf] = self.first_state(leaf, lows[leaf])

    def first_state(self, leaf: Tensor, low: Tensor | None) -> dict[str, Tensor]:
        if not leaf.is_contiguous():
            raise LMWorksError("a weight that is not contiguous cannot be updated in 16 bits; keep it in fp32")
        state = {"step": torch.zeros((), device=leaf.device)}
        if self.optim.optimizer == "adamw":
            dtype = torch.bfloat16 if self.precision.states == "bf16" else torch.float32
            state |= {key: torch.zeros_like(leaf, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")}
        if leaf.dtype == torch.bfloat16 and self.precision.master:
            state["low"] = torch.zeros_like(leaf, dtype=torch.int16) if low is None else low
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            leaves = [leaf for leaf in group["params"] if leaf.grad is not None]
            if not leaves:
                continue
            scale, found_inf = (
                None if scalar is None else scalar.to(leaves[0].device) for scalar in (self.grad_scale, self.found_inf)
            )
            steps = [self.state[leaf]["step"] for leaf in leaves]
            if found_inf is None:
                torch._foreach_add_(steps, 1)
            else:
                torch._foreach_add_(steps, [1 - found_inf] * len(steps))
            config = self.config(group)
            adamw([self.param_state(leaf) for leaf in leaves], config, grad_scale=scale, found_inf=found_inf)

    def config(self, group: dict[str, Any]) -> AdamWConfig:
        optim = self.optim
        stochastic = self.precision.rounding == "stochastic"
        eps = group.get("eps", optim.eps)  # SGD has none
        return AdamWConfig(group["lr"], group["weight_decay"], optim.beta1, optim.beta2, eps, stochastic)

    def param_state(self, leaf: Tensor) -> ParamState:
        state = self.state[leaf]
        assert leaf.grad is not None
        fields = state["step"], self.seeds[leaf], state.get("exp_avg"), state.get("exp_avg_sq"), state.get("low")
        return ParamState(leaf, leaf.grad.contiguous(), *fields)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As it was saved: the base class would cast every state to the format of its weight."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for leaf, number in zip(group["params"], saved["params"], strict=True):
                for key, value in state_dict["state"][number].items():
                    self.state[leaf][key] = value.to(leaf.device, copy=True)


def seed_of(seed: int, name: str) -> int:
    """Of the random bits of one weight: 63 bits that follow from the run's seed and its name."""
    digest = hashlib.blake2b(f"{seed}/{name}/rounding".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
