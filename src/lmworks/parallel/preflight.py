"""Preflight checks, before a run takes memory: the device that the spec names, what the layout needs, enough memory.

`lmworks train`, `resume`, `bench train`, `parity` and `study` run them; `--force` skips the memory check.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ..kernels.training.flash_attention import runs_on
from ..plan.memory import host_need
from ..plan.memory.fit import Limits, OtherMemory, no_other_memory, refusal
from ..plan.memory.host import available_bytes, process_bytes, ranks_on_host
from ..plan.memory.host_need import machine_need
from ..plan.memory.peak_memory import Row
from ..plan.pipelines.stages import split_layers
from ..plan.policies import within_budget
from ..spec import Cluster, RunSpec, SpecError
from .deepspeed import load_deepspeed
from .parallelize import with_device
from .precision import refuse_float8
from .tensor_parallel import refuse_async_tp


def refuse_impossible(spec: RunSpec, device: torch.device, force: bool = False) -> None:
    """`force`: what does not fit into memory is tried all the same."""
    layout = spec.parallel
    if spec.model.attention == "flash" and not runs_on(device):
        raise SpecError(
            f"model.attention = 'flash' needs a GPU, and this run is on {device.type}; use 'sdpa' or 'auto'"
        )
    if layout.async_tp:
        refuse_async_tp(device.type)
    if layout.pp > 1:
        from .pipeline import refuse_split_backward  # PyTorch's pipelining takes seconds to import

        refuse_split_backward(layout.schedule)
    if layout.engine == "deepspeed":
        load_deepspeed(device.type)
    if spec.precision.dtype == "fp8":
        refuse_float8(spec, device)
    if layout.recompute == "budget":
        stages = split_layers(spec.model, spec.data.seq, layout.pp * layout.virtual_stages)
        within_budget(spec, max(len(stage.layers) for stage in stages))
    if not force:
        refuse_oversized(spec, device)


# --- memory ----------------------------------------------------------------------------------------------

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


def refuse_full_host(spec: RunSpec, device: torch.device) -> None:
    """Of all ranks of this machine. To pin too much host memory would make the kernel kill some process."""
    ranks = ranks_here(spec)
    need = machine_need(with_device(spec, device), ranks, device.type)
    if why := host_need.refusal(spec, need, len(ranks), available_bytes()):
        raise SpecError(why)


def ranks_here(spec: RunSpec) -> Sequence[int]:
    """On this machine: as whoever started them says, or as the spec does."""
    first = int(os.environ.get("RANK") or 0) - int(os.environ.get("LOCAL_RANK") or 0)
    count = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks_on_host(spec))
    return range(first, min(first + count, spec.parallel.world))
