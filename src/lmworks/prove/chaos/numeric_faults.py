"""Faults of numbers and of collectives, as they are done inside a rank."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import torch.distributed as dist

from ...record import phase
from .injection_plan import Act
from .trigger import Place, Say, Strike

SLOW_S = 0.8  # many times what a step takes, and long enough in all: who is slow is told over seconds


def slow(place: Place, act: Act, say: Say) -> None:
    """From now on this rank needs longer for this phase."""
    say(f"rank {act.rank} is slow")

    def sleeping(name: str, _step: int) -> None:
        if name == act.phase:
            time.sleep(SLOW_S)

    phase.listeners.append(sleeping)


def mismatch(place: Place, act: Act, say: Say) -> None:
    """One rank calls a collective that the others do not."""
    say(f"rank {act.rank} calls an all_gather of its own")
    dist.all_gather([torch.zeros(7) for _ in range(dist.get_world_size())], torch.zeros(7))


# --- numbers --------------------------------------------------------------------------------------------


def nan_loss(place: Place, act: Act, say: Say) -> None:
    """What a block gives is not a number, for the rest of this step: a rerun of it finds the same."""
    say(f"NaN in the forward pass of rank {act.rank}")
    blocks = [block for part in place.trainer.parallel_model.parts.values() for block in part.blocks.values()]
    now = phase.step

    def spoil(_module: Any, _inputs: Any, output: Any) -> Any:
        return output * torch.nan if phase.step == now and isinstance(output, torch.Tensor) else output

    random.Random(act.draw).choice(blocks).register_forward_hook(spoil)


def nan_gradient(place: Place, act: Act, say: Say) -> None:
    """One number of one gradient, when all of them are whole."""
    say(f"NaN in a gradient of rank {act.rank}")
    parallel_model, finish = place.trainer.parallel_model, place.trainer.parallel_model.finish
    draw, now = random.Random(act.draw), phase.step

    def spoiled() -> None:
        finish()
        if phase.step == now:
            gradient = draw.choice(
                [s.leaf.grad for s in parallel_model.shards if s.leaf.grad is not None and s.leaf.numel()]
            )
            numbers(gradient)[draw.randrange(numbers(gradient).numel())] = torch.nan

    parallel_model.finish = spoiled


def flip_parameter(place: Place, act: Act, say: Say) -> None:
    say(f"a bit of a parameter of rank {act.rank}")
    flip_number([shard.leaf for shard in place.trainer.parallel_model.shards], act)


def flip_gradient(place: Place, act: Act, say: Say) -> None:
    say(f"a bit of a gradient of rank {act.rank}")
    flip_number([shard.leaf.grad for shard in place.trainer.parallel_model.shards if shard.leaf.grad is not None], act)


def flip_optimizer(place: Place, act: Act, say: Say) -> None:
    say(f"a bit of the optimizer's state of rank {act.rank}")
    states = place.trainer.optimizer.state.values()
    flip_number([value for state in states for key, value in state.items() if key.startswith("exp_avg")], act)


def flip_number(tensors: list[torch.Tensor], act: Act) -> None:
    """The highest bit of a mantissa: the number is another one, and still a number."""
    draw = random.Random(act.draw)
    with torch.no_grad():
        bits = numbers(draw.choice(tensors)).view(torch.int32)
        bits[draw.randrange(bits.numel())] ^= 1 << 22


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor (of this rank's part of it) in one row."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().view(-1)


FAULTS: dict[str, Strike] = {
    "nan-loss": nan_loss,
    "nan-gradient": nan_gradient,
    "flip-parameter": flip_parameter,
    "flip-gradient": flip_gradient,
    "flip-optimizer": flip_optimizer,
    "slow": slow,
    "mismatch": mismatch,
}
