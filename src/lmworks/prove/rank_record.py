"""A record of a few training steps on one rank of a layout, for comparison: losses, gradients, weights, collectives.

The trainer is that of `lmworks train`. Each rank records its own shards of gradients and weights with their indices in
the full tensors. Nothing is gathered, so that a wrong collective cannot hide its own error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..align.post_trainer import trainer_class
from ..model.moe import MoE
from ..parallel.comm_counter import CommCounter, Row
from ..parallel.data_parallel import Shard
from ..parallel.parallel_model import ParallelModel
from ..parallel.world import all_gather_object
from ..plan.memory.rank_weights import Resident
from ..spec import OptimSpec, RunSpec
from ..train import Trainer
from ..train.rank_memory import STEPS_BEFORE, ResidencyReader, held_parameters, sizes, train_one_step

STEPS = 5
QUICK_STEPS = STEPS_BEFORE + 1  # the one that is counted, and no more
STEPS_MARKER = "parity steps"  # peak memory counts from here on: the warm-up of PyTorch in `build` is not the model's


@dataclass(frozen=True)
class IndexedShard:
    """The index of a rank's shard in its weight."""

    name: str
    index: Tensor  # of its elements in the flattened full weight


@dataclass
class RankRecord:
    """Everything one rank computed."""

    losses: list[float] = field(default_factory=list)  # of the global batch, by step
    norms: list[float] = field(default_factory=list)  # of the whole gradient, by step
    tokens: int = 0  # trained on in all steps
    shards: list[IndexedShard] = field(default_factory=list)
    gradients: list[list[Tensor]] = field(default_factory=list)  # by step and shard; before clipping
    weights: list[Tensor] = field(default_factory=list)  # after the last step, by shard
    buffers: dict[str, Tensor] = field(default_factory=dict)  # after the last step, by name
    loads: list[dict[str, Tensor]] = field(default_factory=list)  # by step, how often experts were chosen, by block
    collectives: list[Row] = field(default_factory=list)  # of one step
    device: Resident = Resident()  # just before an update
    host: Resident = Resident()  # likewise, with offload
    frozen: dict[str, Resident] = field(default_factory=dict)  # models that are only evaluated, by name
    lengths: list[int] = field(default_factory=list)  # of the rows of each micro-batch of the step with `collectives`
    peak_bytes: int = 0  # allocated for model, optimizer and steps, at their highest


def record_runs(
    rank: int, spec: RunSpec, folder: Path, optimizers: dict[str, dict[str, Any]], measure_memory: bool, steps: int
) -> dict[str, RankRecord]:
    """Train from step 0 with each of `optimizers` (changes to `optim`) on the same ranks; the last measures memory."""
    # Forced: the preflight of parity has counted the records too.
    trainer = trainer_class(spec)(spec, folder, quiet=True, force=True)
    *_, last = optimizers
    return {
        name: record_run(trainer, spec.optim.replace(**changes), measure_memory and name == last, steps)
        for name, changes in optimizers.items()
    }


def record_run(trainer: Trainer, optim: OptimSpec, measure_memory: bool, steps: int) -> RankRecord:
    """So many steps with their gradients; with `measure_memory` peak memory instead, to which records would add.

    Bytes and traffic are read in the first step after the warm-up of all data-parallel strategies.
    """
    record = RankRecord()
    trainer.spec = trainer.spec.replace(optim=optim)
    trainer.step = trainer.cursor = 0
    with track_peak_memory(record) if measure_memory else contextlib.nullcontext():
        trainer.build()
        if not measure_memory:
            capture_gradients(trainer, record.gradients)
        with torch.profiler.record_function(STEPS_MARKER):
            for _ in range(STEPS_BEFORE):
                record_step(trainer, record)
            reader = ResidencyReader(trainer)
            if not trainer.spec.align.online:
                record.lengths = [batch.tokens.shape[1] for batch in trainer.batches.at(trainer.cursor)]
            traffic = CommCounter(trainer.mesh)
            with traffic if trainer.mesh else contextlib.nullcontext():  # it looks at every op, twice a step's time
                record_step(trainer, record)
    for _ in range(STEPS_BEFORE + 1, steps):
        record_step(trainer, record)
    parallel_model = trainer.parallel_model
    record.collectives, record.device, record.host = traffic.table(), reader.device, reader.host
    record.frozen = {name: sizes(held_parameters(model), [], []) for name, model in trainer.frozen.items()}
    record.shards = [IndexedShard(shard.name, shard_indices(shard, parallel_model)) for shard in parallel_model.shards]
    record.weights = [shard.leaf.detach().clone() for shard in parallel_model.shards]
    record.buffers = parallel_model.buffers()
    return record


def record_step(trainer: Trainer, record: RankRecord) -> None:
    values = train_one_step(trainer)
    record.losses.append(values["loss"])
    record.norms.append(values["grad_norm"])
    record.tokens += values["tokens"]
    record.loads.append(expert_loads(trainer.parallel_model))


def expert_loads(parallel_model: ParallelModel) -> dict[str, Tensor]:
    """How often each expert was chosen in the last step, by the number of its block."""
    blocks = [(number, block) for part in parallel_model.parts.values() for number, block in part.blocks.items()]
    return {
        number: moe.load.clone()
        for number, block in blocks
        for moe in block.modules()
        if isinstance(moe, MoE) and moe.load is not None
    }


def capture_gradients(trainer: Trainer, kept: list[list[Tensor]]) -> None:
    """Copy every gradient as the optimizer would see it without clipping."""
    parallel_model = trainer.parallel_model
    finish = parallel_model.finish

    def finish_and_capture() -> None:
        finish()
        scale = trainer.loss_scale.scale
        kept.append([gradient_of(shard) / scale for shard in parallel_model.shards])

    parallel_model.finish = finish_and_capture  # type: ignore[method-assign]


def gradient_of(shard: Shard) -> Tensor:
    return torch.zeros_like(shard.leaf) if shard.leaf.grad is None else shard.leaf.grad.detach().clone()


@contextlib.contextmanager
def track_peak_memory(record: RankRecord) -> Iterator[None]:
    """Peak of the bytes allocated by PyTorch.

    The resident set size would include the interpreter and libraries, which outweigh a small model.
    """
    with suppress_stderr(), torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profiler:
        yield
    results = profiler.kineto_results
    assert results is not None
    events: list[Any] = results.events()
    began = next(event.start_ns() for event in events if event.name() == STEPS_MARKER)
    live = 0
    for start, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        live += size
        if start >= began:
            record.peak_bytes = max(record.peak_bytes, live)


@contextlib.contextmanager
def suppress_stderr() -> Iterator[None]:
    """The profiler's native code prints to stderr; failures of a rank reach its parent another way."""
    with open(os.devnull, "w") as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def shard_indices(shard: Shard, parallel_model: ParallelModel) -> Tensor:
    """Shard a tensor of indices as the weight was sharded."""
    whole = parallel_model.sharding.shape(shard.name, shard.shape)
    index = torch.arange(whole.numel()).view(whole)
    if parallel_model.mesh is None:
        return index.flatten()
    index = parallel_model.sharding.local_part(shard.name, index, parallel_model.mesh)
    if shard.rows == "flat":
        lengths = all_gather_object(shard.leaf.numel(), parallel_model.mesh.group("shard"))
        before = sum(lengths[: parallel_model.mesh.rank("shard")])
        return index.flatten()[before : before + shard.leaf.numel()]
    if shard.rows is not None:
        chunks, rank = index.chunk(parallel_model.mesh.size(shard.rows)), parallel_model.mesh.rank(shard.rows)
        index = chunks[rank] if rank < len(chunks) else index[:0]
    return index.flatten()
