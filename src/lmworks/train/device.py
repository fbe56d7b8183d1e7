"""The device of a run, and its peak memory."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import sys
import warnings
from pathlib import Path

import torch

from ..model import GPT
from ..parallel.single_rank import SingleRank
from ..record import oom
from ..spec import Cluster, Gpu, ModelSpec, OptimSpec, RunSpec, SpecError, TrainingError, recognise
from .optim import make_optimizer


def pick_device(cluster: Cluster) -> torch.device:
    if cluster.device == "cuda" and not torch.cuda.is_available():
        raise SpecError("cluster.device = 'cuda', but there is no CUDA device; use 'cpu' or 'auto'")
    use_cuda = cluster.device != "cpu" and torch.cuda.is_available()
    if not use_cuda:
        return torch.device("cpu")
    local, here = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= here:
        raise TrainingError(
            f"rank {local} of this machine has no GPU: there are {here}; start fewer ranks here, or use "
            "cluster.device=cpu"
        )
    use_expandable_segments()
    return torch.device("cuda", local)


def on_device(spec: RunSpec, device: str) -> RunSpec:
    """The run on the `device` of a command line; empty: as its spec says."""
    return spec.replace(cluster=spec.cluster.replace(device=device)) if device else spec


def use_expandable_segments() -> None:
    """Use expandable segments, unless the user has configured the allocator; before CUDA starts.

    They avoid fragmentation: memory that is reserved but never allocated. PyTorch reads the older variable first.
    """
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def find_gpu(cluster: Cluster, device: torch.device) -> Gpu | None:
    """The catalogue's entry for the device; None where it is unknown, and then MFU is unknown too."""
    if device.type != "cuda":
        return None
    return cluster.accelerator or recognise(torch.cuda.get_device_name(device), cluster.catalogue)


def with_gpu_name(spec: RunSpec, device: torch.device) -> RunSpec:
    """With the name of the local GPU, if recompute = "budget" needs its memory size."""
    gpu = find_gpu(spec.cluster, device)
    if gpu is None or spec.parallel.recompute != "budget" or spec.parallel.recompute_budget:
        return spec
    return spec.replace(cluster=spec.cluster.replace(gpu=gpu.name))


def warn_slow_bf16(spec: RunSpec, device: torch.device, quiet: bool) -> None:
    """One line for a CPU that emulates bf16, in place of PyTorch's warning, which is a C++ stack."""
    if device.type != "cpu" or spec.precision.dtype not in ("bf16", "fp8") or has_bf16():
        return
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    if not quiet:
        print(
            f"this CPU has no bf16 instructions: precision.dtype = '{spec.precision.dtype}' is many times slower here "
            "than 'fp32'",
            file=sys.stderr,
            flush=True,
        )


def has_bf16() -> bool:
    """Whether the CPU multiplies in bf16; True where PyTorch does not know."""
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return is_supported is None or bool(is_supported())


def make_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with fixed workspaces
    torch.use_deterministic_algorithms(True)


class PeakMemory:
    """Bytes that the run added at its highest: allocated on a GPU, resident above the starting point on a CPU.

    On a CPU the starting point is after a tiny training step: code and workspaces that PyTorch loads on first use
    (some 50 MB) belong to the runtime, not to the run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        warm_runtime()
        self.base = self.highest = reset_resident_peak()

    def read(self) -> int:
        if self.device.type == "cuda":
            # What max_memory_allocated reads, without putting together its hundred other figures in every step.
            statistics = torch.cuda.memory_stats_as_nested_dict(self.device)
            return int(statistics["allocated_bytes"]["all"]["peak"])
        self.highest = max(self.highest, resident_peak())  # Linux counts in parts: its own peak may read lower later
        return self.highest - self.base


@functools.cache  # once in a process
def warm_runtime() -> None:
    """Every kind of kernel that a step calls, once."""
    model = GPT(ModelSpec.from_preset("tiny"))
    optimizer = make_optimizer(SingleRank(model).shards(), model.spec, OptimSpec())
    tokens = torch.zeros(2, 64, dtype=torch.long)
    model(tokens, tokens, keep_logits=False)[1].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def reset_resident_peak() -> int:
    """Where the resident set stands; on Linux its high-water mark starts again from here."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()


def resident_peak() -> int:
    """Highest resident set of this process, in bytes."""
    if (known := oom.resident_peak()) is not None:
        return known
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
