"""Preflight checks, before a run takes memory: the device that the spec names, what the layout needs, enough memory.

`lmworks train`, `resume`, `bench train`, `parity` and `study` run them; `--force` skips the memory check.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ..kernels.training.flash_attention import supports_device
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
from .precision import check_float8


def check_requirements(spec: RunSpec, device: torch.device, force: bool = False) -> None:
    """What the spec needs of this machine. `force`: without the memory check."""
    layout = spec.parallel
    if spec.model.attention == "flash" and not supports_device(device):
        raise SpecError(
            f"model.attention = 'flash' needs a GPU, and this run is on {device.type}; use 'sdpa' or 'auto'"
        )
    if layout.pp > 1:
        from .pipeline import check_split_backward  # PyTorch's pipelining takes seconds to import

        check_split_backward(layout.schedule)
    if layout.engine == "deepspeed":
        load_deepspeed(device.type)
    if spec.precision.dtype == "fp8":
        check_float8(spec, device)
    if layout.recompute == "budget":
        stages = split_layers(spec.model, spec.data.seq, layout.pp * layout.virtual_stages)
        within_budget(spec, max(len(stage.layers) for stage in stages))
    if not force:
        check_fits_memory(spec, device)


# --- memory ----------------------------------------------------------------------------------------------

RUNTIME = 300 * 2**20  # bytes of a rank before it holds anything: Python, PyTorch and its libraries, which are shared


def check_gpu_available(cluster: Cluster) -> None:
    """A spec that names a GPU does not run on a CPU unless asked: it would take weeks."""
    if cluster.device == "auto" and cluster.accelerator is not None and not torch.cuda.is_available():
        error = SpecError(
            f"cluster.gpu = '{cluster.gpu}', and this machine has no GPU; --device cpu runs it here all the same, and "
            "`lmworks prove simulate` steps one rank of it without the memory"
        )
        error.collective = int(os.environ.get("LOCAL_RANK") or 0) > 0  # only the first rank of each machine prints it
        raise error


def check_fits_memory(
    spec: RunSpec,
    device: torch.device,
    *,
    starting: bool = False,
    beside: OtherMemory = no_other_memory,
    own_layout: bool = True,
) -> None:
    """Whether all ranks of this machine fit into its memory, before any has allocated some.

    `starting`: called by the process that will start them. Then each loads its runtime as well, and checks its own GPU:
    that takes a CUDA context of half a GB.
    `beside`: what a rank holds beside its training. `own_layout`: data parallelism may be changed, so that it fits.
    """
    check_host_memory(spec, device)
    if starting and device.type != "cpu":
        return
    if device.type == "cpu":
        ranks = list(ranks_here(spec))
    else:
        ranks = [int(os.environ.get("RANK") or 0)]
    limits = memory_limits(device)

    def rows(changed: RunSpec, rank: int) -> list[Row]:
        return [*beside(changed, rank), *([Row("runtime", RUNTIME, "Python, PyTorch, libraries")] if starting else [])]

    if why := refusal(with_device(spec, device), ranks, device.type, limits, rows, own_layout):
        raise SpecError(why)


def memory_limits(device: torch.device) -> Limits:
    """Free memory: of a CPU for all processes together, of a GPU for this one."""
    if device.type == "cpu":
        return Limits(available_bytes(), process_bytes())
    return Limits(each=free_gpu_bytes(device), what="GPU memory")


def free_gpu_bytes(device: torch.device) -> int:
    """Unused memory, and what this process's allocator has reserved and not allocated."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def check_host_memory(spec: RunSpec, device: torch.device) -> None:
    """Of all ranks of this machine that train. To pin too much host memory would make the kernel kill some process."""
    ranks = [rank for rank in ranks_here(spec) if rank < spec.parallel.world]
    need = machine_need(with_device(spec, device), ranks, device.type)
    if why := host_need.refusal(spec, need, len(ranks), available_bytes()):
        raise SpecError(why)


def ranks_here(spec: RunSpec) -> Sequence[int]:
    """Ranks on this machine, with those that only sample: from the environment of the launcher, or from the spec."""
    first = int(os.environ.get("RANK") or 0) - int(os.environ.get("LOCAL_RANK") or 0)
    count = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks_on_host(spec))
    return range(first, min(first + count, spec.ranks))
