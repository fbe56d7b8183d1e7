"""Every exercise's check: a function of the learner's module that raises Mismatch at the smallest case that fails."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from . import (
    batching,
    communication,
    data,
    ddp,
    fsdp,
    gpt,
    inference,
    kernels,
    memory,
    parallelism,
    post_training,
    precision,
    profiling,
    studies,
)

CHECKS: dict[str, Callable[[ModuleType], None]] = {
    **gpt.CHECKS,
    **ddp.CHECKS,
    **fsdp.CHECKS,
    **memory.CHECKS,
    **communication.CHECKS,
    **parallelism.CHECKS,
    **kernels.CHECKS,
    **inference.CHECKS,
    **batching.CHECKS,
    **post_training.CHECKS,
    **precision.CHECKS,
    **data.CHECKS,
    **studies.CHECKS,
    **profiling.CHECKS,
}

# What a file's exercises import on first use: before the fork, so that each check of a process has it.
PRELOAD = {
    "src/models/gpt.py": ("torch._dynamo",),
    "src/training/ddp_trainer.py": ("torch._dynamo", "torch.distributed"),
    "src/communication/collectives.py": ("torch._dynamo",),  # by the first optimizer that is made
    "src/precision/scaling.py": ("torch._dynamo",),
    "src/training/fsdp_trainer.py": ("torch._dynamo", "torch.distributed.fsdp"),
}
