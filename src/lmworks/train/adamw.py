"""AdamW (or plain SGD) with weights or optimizer state in 16 bits, over `kernels.training.adamw`.

The optimizer state has the names of PyTorch's AdamW (`step`, `exp_avg`, `exp_avg_sq`), so that a checkpoint of the one
can be read by the other; `low` are the bits that make a bf16 weight an fp32 number. They are made with the optimizer,
not with its first step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..kernels.training.adamw import Rule, Slot, adamw
from ..parallel.data_parallel import Shard
from ..spec import LMWorksError, OptimSpec, PrecisionSpec


class NarrowOptimizer(torch.optim.Optimizer):
    """`grad_scale` and `found_inf` are fp32 scalars, as PyTorch's fused optimizers take them: gradients are divided by
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
            rule = self.rule(group)
            adamw([self.slot(leaf) for leaf in leaves], rule, grad_scale=scale, found_inf=found_inf)

    def rule(self, group: dict[str, Any]) -> Rule:
        optim = self.optim
        stochastic = self.precision.rounding == "stochastic"
        return Rule(group["lr"], group["weight_decay"], optim.beta1, optim.beta2, optim.eps, stochastic)

    def slot(self, leaf: Tensor) -> Slot:
        state = self.state[leaf]
        assert leaf.grad is not None
        kept = state["step"], self.seeds[leaf], state.get("exp_avg"), state.get("exp_avg_sq"), state.get("low")
        return Slot(leaf, leaf.grad.contiguous(), *kept)

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
