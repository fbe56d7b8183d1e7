"""Steps of several strategies in turns, by the same ranks: what slows the machine down meets all of them alike."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from ..spec import RunSpec
from ..train import Trainer
from ..train.rank_memory import train_one_step

WARM_UP = 3  # rounds that are not counted: states and buckets are made in them


def take_turns(rank: int, specs: dict[str, RunSpec], folder: Path, rounds: int) -> dict[str, list[float]]:
    """For `on_ranks`, or one process: seconds of each spec's step in every round, until the last rank has taken it."""
    trainers = {}
    for name, spec in specs.items():
        trainers[name] = Trainer(
            spec, folder / name.replace(" ", "-"), quiet=True, force=True
        )  # who calls has counted them all
        trainers[name].build()
    seconds: dict[str, list[float]] = {name: [] for name in specs}
    names = list(specs)
    for index in range(WARM_UP + rounds):
        first = index % len(names)  # nobody always follows the same neighbour into a cold cache
        for name in names[first:] + names[:first]:
            all_done(trainers[name].device)
            began = time.perf_counter()
            train_one_step(trainers[name])
            all_done(trainers[name].device)
            if index >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def all_done(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()
