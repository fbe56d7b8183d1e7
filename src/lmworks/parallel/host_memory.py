"""Host memory is refused before any of it is taken: to pin too much would end some process of the machine, and not
always this one."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ..plan.memory.host import available_bytes, ranks_on_host
from ..plan.memory.host_fit import refusal
from ..plan.memory.host_need import machine_need
from ..spec import RunSpec, SpecError
from .activation_checkpointing import with_device


def refuse_full_host(spec: RunSpec, device: torch.device) -> None:
    """Every rank asks for all of its machine, while none has taken anything."""
    ranks = ranks_here(spec)
    if why := refusal(spec, machine_need(with_device(spec, device), ranks, device.type), len(ranks), available_bytes()):
        raise SpecError(why)


def ranks_here(spec: RunSpec) -> Sequence[int]:
    """On this machine: as whoever started them says, or as the spec does."""
    first = int(os.environ.get("RANK") or 0) - int(os.environ.get("LOCAL_RANK") or 0)
    count = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks_on_host(spec))
    return range(first, min(first + count, spec.parallel.world))
