"""Injectors of numeric faults (NaN, bit flips), slow ranks and mismatched collectives. They run inside a rank."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import torch.distributed as dist

from ...record import phase
from .trigger import Announce, Injection, Injector, ProcessContext

SLOW_S = 0.8  # many times a step's duration: the straggler detector averages over seconds


def slow(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    """From now on this phase takes longer on this rank."""
    announce(f"rank {injection.rank} is slow")

    def sleep_in_phase(name: str, _step: int) -> None:
        if name == injection.phase:
            time.sleep(SLOW_S)

    phase.listeners.append(sleep_in_phase)


def mismatch(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    """One rank calls a collective that the others do not."""
    announce(f"rank {injection.rank} calls an all_gather of its own")
    dist.all_gather([torch.zeros(7) for _ in range(dist.get_world_size())], torch.zeros(7))


# --- numbers --------------------------------------------------------------------------------------------


def nan_loss(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    """The output of a block is NaN for the rest of this step, also when the step is rerun."""
    announce(f"NaN in the forward pass of rank {injection.rank}")
    blocks = [block for part in context.trainer.parallel_model.parts.values() for block in part.blocks.values()]
    now = phase.step

    def poison(_module: Any, _inputs: Any, output: Any) -> Any:
        return output * torch.nan if phase.step == now and isinstance(output, torch.Tensor) else output

    random.Random(injection.seed).choice(blocks).register_forward_hook(poison)


def nan_gradient(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    """One element of one gradient, after the reduction."""
    announce(f"NaN in a gradient of rank {injection.rank}")
    parallel_model, finish = context.trainer.parallel_model, context.trainer.parallel_model.finish
    draw, now = random.Random(injection.seed), phase.step

    def finish_and_poison() -> None:
        finish()
        if phase.step == now:
            gradient = draw.choice(
                [s.leaf.grad for s in parallel_model.shards if s.leaf.grad is not None and s.leaf.numel()]
            )
            flat_memory(gradient)[draw.randrange(flat_memory(gradient).numel())] = torch.nan

    parallel_model.finish = finish_and_poison


def flip_parameter(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    announce(f"a bit of a parameter of rank {injection.rank}")
    flip_number([shard.leaf for shard in context.trainer.parallel_model.shards], injection)


def flip_gradient(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    announce(f"a bit of a gradient of rank {injection.rank}")
    flip_number(
        [shard.leaf.grad for shard in context.trainer.parallel_model.shards if shard.leaf.grad is not None], injection
    )


def flip_optimizer(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    announce(f"a bit of the optimizer's state of rank {injection.rank}")
    states = context.trainer.optimizer.state.values()
    flip_number([value for state in states for key, value in state.items() if key.startswith("exp_avg")], injection)


def flip_number(tensors: list[torch.Tensor], injection: Injection) -> None:
    """The highest bit of a mantissa: the value changes and stays finite."""
    draw = random.Random(injection.seed)
    with torch.no_grad():
        bits = flat_memory(draw.choice(tensors)).view(torch.int32)
        bits[draw.randrange(bits.numel())] ^= 1 << 22


def flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The local memory of a tensor or DTensor as a vector."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().view(-1)


INJECTORS: dict[str, Injector] = {
    "nan-loss": nan_loss,
    "nan-gradient": nan_gradient,
    "flip-parameter": flip_parameter,
    "flip-gradient": flip_gradient,
    "flip-optimizer": flip_optimizer,
    "slow": slow,
    "mismatch": mismatch,
}
