"""Before a run takes memory: does this machine have the device that the spec names, and do its ranks here fit?

`lmworks train`, `resume`, `bench train`, `parity` and `study` all ask here; `--force` is how not to.
"""

from __future__ import annotations

import os

import torch

from ..plan.memory.fit import Limits, OtherMemory, no_other_memory, refusal
from ..plan.memory.host import available_bytes, process_bytes
from ..plan.memory.peak_memory import Row
from ..spec import Cluster, RunSpec, SpecError
from .activation_checkpointing import with_device
from .host_memory import ranks_here, refuse_full_host

RUNTIME = 300 * 2**20  # bytes of a rank before it holds anything: Python, PyTorch and its libraries, which are shared


def refuse_missing_gpu(cluster: Cluster) -> None:
    """A spec that names a GPU is meant for one: on a CPU it would run for weeks, if it ran at all."""
    if cluster.device == "auto" and cluster.accelerator is not None and not torch.cuda.is_available():
        error = SpecError(
            f"cluster.gpu = '{cluster.gpu}', and this machine has no GPU; --device cpu runs it here all the same, and "
            "`lmworks prove simulate` steps one rank of it without the memory"
        )
        error.collective = int(os.environ.get("LOCAL_RANK") or 0) > 0  # the first rank of each machine says it
        raise error


def refuse_oversized(
    spec: RunSpec,
    device: torch.device,
    *,
    starting: bool = False,
    beside: OtherMemory = no_other_memory,
    own_layout: bool = True,
) -> None:
    """Refuse what does not fit, counting all ranks of this machine, while none of them has taken anything.

    `starting`: asked by the process that will start them. Each of them has its runtime to load as well then, and looks
    for itself at its GPU: to ask that takes a CUDA context, half a GB of it.
    `beside`: what a rank holds beside its training. `own_layout`: data parallelism may be changed, so that it fits.
    """
    refuse_full_host(spec, device)
    if starting and device.type != "cpu":
        return
    if device.type == "cpu":
        ranks = list(ranks_here(spec))
    else:
        ranks = [int(os.environ.get("RANK") or 0)]
    limits = free_for(device)

    def rows(changed: RunSpec, rank: int) -> list[Row]:
        return [*beside(changed, rank), *([Row("runtime", RUNTIME, "Python, PyTorch, libraries")] if starting else [])]

    if why := refusal(with_device(spec, device), ranks, device.type, limits, rows, own_layout):
        raise SpecError(why)


def free_for(device: torch.device) -> Limits:
    """What is free: of a CPU's memory for all processes together, of a GPU's for this one."""
    if device.type == "cpu":
        return Limits(available_bytes(), process_bytes())
    return Limits(each=free_on(device), what="GPU memory")


def free_on(device: torch.device) -> int:
    """Of a GPU, which a rank has for itself: what nobody holds, and what this process's allocator would use again."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
