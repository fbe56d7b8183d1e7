"""Interleaved steps of several specs on the same ranks, so that other load on the machine affects all equally."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from ..spec import RunSpec
from ..train import Trainer
from ..train.rank_memory import train_one_step

WARM_UP = 3  # rounds that are not counted: they create optimizer states and buckets


def time_interleaved_steps(rank: int, specs: dict[str, RunSpec], folder: Path, rounds: int) -> dict[str, list[float]]:
    """For `on_ranks`, or one process: seconds of each spec's step in every round, measured to the slowest rank."""
    trainers = {}
    for name, spec in specs.items():
        trainers[name] = Trainer(
            spec, folder / name.replace(" ", "-"), quiet=True, force=True
        )  # the caller checks memory for all of them
        trainers[name].build()
    seconds: dict[str, list[float]] = {name: [] for name in specs}
    names = list(specs)
    for index in range(WARM_UP + rounds):
        first = index % len(names)  # rotate the order: none always follows the same one
        for name in names[first:] + names[:first]:
            synchronize(trainers[name].device)
            began = time.perf_counter()
            train_one_step(trainers[name])
            synchronize(trainers[name].device)
            if index >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()
