"""The memory sheet of one rank of our own trainer, in bytes: what is always there, and the moment at which most is.

Weights, master weights and optimizer states are exact (`residency.py`). What a step needs beside them is worked out for
the few moments that can be the highest: activations and the loss (`peak_memory.py`), gradients and what data
parallelism has on its way (`dp_buffers.py`). Every moment is a list of rows; the peak is the largest sum. On a GPU it
is what tensors hold, as `max_memory_allocated` counts it: context and allocator come on top (`reserve.py`). On a CPU it
is the growth of the resident set, so what the allocator cannot use again is a row as well.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass

from ...spec import Grid, RunSpec
from ...spec.layout import SPLIT_BACKWARD
from ..exact.residency import Resident, resident
from ..exact.shards import strategy_of, weight_bytes
from ..network import Network, network
from ..ops import Workload
from ..pipelines.stages import stages_of_rank
from ..policies import policies
from ..saved_activations import saved_bytes, total
from .dp_buffers import dp_buffers
from .host_need import HostNeed, host_need
from .peak_memory import Row, candidate_peaks, row
from .reserve import WORKSPACES

MASTER = {4: "fp32 copies of what this rank updates", 2: "2 B for each weight updated, with which it is an fp32 number"}
OVERHEAD = ("allocator holes", "cuBLAS workspaces", "copy for a save")  # rows that are not tensors


@dataclass(frozen=True)
class MemorySheet:
    """Rows add up to `total`, the predicted peak; `peaks` has the sum of each moment."""

    moment: str
    rows: tuple[Row, ...]
    peaks: dict[str, int]
    notes: tuple[str, ...] = ()
    host_parts: HostNeed = HostNeed()  # what it keeps in host memory

    @property
    def total(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def host(self) -> int:
        return self.host_parts.total

    @property
    def tensors(self) -> int:
        """What tensors hold; exact for dense models on one rank, see tests/plan/test_memory.py."""
        return sum(row.bytes for row in self.rows if row.name not in OVERHEAD)


def memory(spec: RunSpec, device: str = "cpu", rank: int = 0, copies: int = 0) -> MemorySheet:
    """`copies` of a message on its way: 2 on a CPU, where gloo makes one more."""
    net = network(Workload.of(spec, device))
    state = resident(spec, rank)
    gathered = strategy_of(spec).startswith("fsdp")
    away = host_need(spec, rank, device)
    static = [*static_rows(spec, net, state, rank), *overhead_rows(spec, net, rank)]
    if device == "cpu":
        static.append(row("activations on the host", away.activations, "which is the device"))
        static.append(row("copy for a save", away.staging, "that is written while training goes on"))
    work = candidate_peaks(spec, rank, device, gathered)
    beside = dp_buffers(spec, rank, state, copies or (2 if device == "cpu" else 1))
    sheets = {
        moment: tuple(one for one in (*static, *rows, *work.get(moment, [])) if one.bytes)
        for moment, rows in beside.items()
    }
    sums = {moment: sum(one.bytes for one in rows) for moment, rows in sheets.items()}
    moment = max(sums, key=lambda name: sums[name])
    return MemorySheet(moment, sheets[moment], sums, tuple(notes(spec)), away)


def notes(spec: RunSpec) -> Iterable[str]:
    if spec.parallel.compile:
        yield "what torch.compile fuses, and so does not keep, is estimated op by op"
    if spec.model.experts:
        yield "experts are taken as evenly loaded"
    if spec.parallel.schedule in SPLIT_BACKWARD and spec.parallel.pp > 1 and spec.parallel.recompute == "none":
        yield "PyTorch frees a split backward pass late: up to a tenth more than this sheet says"
    if spec.parallel.engine == "deepspeed":
        yield "DeepSpeed's own buckets and copies are taken to be like ours"


def static_rows(spec: RunSpec, net: Network, state: Resident, rank: int) -> list[Row]:
    load, each = net.load, weight_bytes(spec)
    count = state.parameters // each
    ids = 3 if load.documents else 2
    tokens = spec.data.micro_batch * spec.data.seq * (spec.accumulation if spec.parallel.pp > 1 else 1)
    states = state.optimizer / max(1, count)
    found = [
        row("parameters", state.parameters, f"{each} B × {count:,}"),
        row("padding", state.parameter_padding, "allocated with the parameters, and no part of any"),
        row("master weights", state.master, MASTER[each]),
        row("optimizer states", state.optimizer, f"{spec.optim.optimizer}: {states:.3g} B for each weight held"),
        row("batch", 8 * ids * tokens, f"int64 tokens and targets: {8 * ids} B × {tokens:,} tokens"),
    ]
    return [*found, *pipeline_rows(spec, net, rank)]


def pipeline_rows(spec: RunSpec, net: Network, rank: int) -> list[Row]:
    """PyTorch receives every micro-batch's hidden states, and their gradients, in a buffer of its own."""
    if spec.parallel.pp == 1:
        return []
    ends = sum(
        (not s.first) + (not s.last) for s in stages_of_rank(spec, Grid.of(spec.parallel).coordinates(rank)["pp"])
    )
    size = weight_bytes(spec) * net.load.sp_tokens * spec.model.hidden
    return [row("pipeline buffers", ends * spec.accumulation * size, f"{ends} × {spec.accumulation} hidden states")]


def overhead_rows(spec: RunSpec, net: Network, rank: int) -> list[Row]:
    """On a GPU the scratch of matrix products, which PyTorch's allocator counts with the tensors.

    On a CPU glibc serves an aligned block only from a larger one, so a freed tensor leaves a hole that the next tensor
    of the same size cannot take: what every block frees in its forward pass stays resident until all is freed.
    """
    if net.load.device == "cuda":
        return [row("cuBLAS workspaces", WORKSPACES, "32 MiB for the forward and 32 MiB for the backward pass")]
    if platform.libc_ver()[0] != "glibc":
        return []
    size = 0.0
    for stage in stages_of_rank(spec, Grid.of(spec.parallel).coordinates(rank)["pp"]):
        for policy in policies(spec, stage.layers):
            size += max(0.0, total(net.block) + total(net.block, "transient") - saved_bytes(net, policy)[1])
    return [row("allocator holes", size, "freed by each block in its forward pass")]
