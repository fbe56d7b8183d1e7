"""A few steps of a real run, with all that it computed kept: what one rank of a layout is compared by.

The trainer is the one of `lmworks train`. Each rank keeps its own pieces of gradients and weights together with where
they lie in the whole; nothing is gathered here, so a collective that is wrong cannot hide what it did.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..model.moe import MoE
from ..parallel.comm_counter import Row, Traffic
from ..parallel.data_parallel import Shard
from ..parallel.parallel_model import ParallelModel
from ..plan.exact.residency import Resident
from ..spec import OptimSpec, RunSpec
from ..train import Trainer
from ..train.rank_memory import STEPS_BEFORE, ResidencyReader, train_one_step

STEPS = 5
STEPPING = "parity steps"  # from here on memory counts: what `build` does to warm up PyTorch is none of the model's


@dataclass(frozen=True)
class Piece:
    """A rank's part of one weight."""

    name: str
    index: Tensor  # where its elements lie in the flattened whole weight


@dataclass
class Trial:
    """What one rank saw."""

    losses: list[float] = field(default_factory=list)  # of the global batch, by step
    norms: list[float] = field(default_factory=list)  # of the whole gradient, by step
    tokens: int = 0  # trained on in all steps
    pieces: list[Piece] = field(default_factory=list)
    gradients: list[list[Tensor]] = field(default_factory=list)  # by step, of each piece; before clipping
    weights: list[Tensor] = field(default_factory=list)  # after the last step, of each piece
    buffers: dict[str, Tensor] = field(default_factory=dict)  # likewise, by name: state without a gradient
    loads: list[dict[str, Tensor]] = field(default_factory=list)  # by step, how often experts were chosen, by block
    collectives: list[Row] = field(default_factory=list)  # of one step
    device: Resident = Resident()  # just before an update
    host: Resident = Resident()  # likewise, with offload
    peak_bytes: int = 0  # allocated for model, optimizer and steps, at their highest


def run_trials(
    rank: int, spec: RunSpec, folder: Path, rules: dict[str, dict[str, Any]], observe: bool
) -> dict[str, Trial]:
    """Train from the start with each of `rules` (changes to `optim`), by the same ranks; observe the last."""
    trainer = Trainer(spec, folder, quiet=True, force=True)  # parity has counted what it keeps as well
    *_, last = rules
    return {rule: run_trial(trainer, spec.optim.replace(**rules[rule]), observe and rule == last) for rule in rules}


def run_trial(trainer: Trainer, optim: OptimSpec, observe: bool) -> Trial:
    """Five steps with their gradients; with `observe` the highest memory instead, as what is kept would count.

    The step whose bytes and traffic are read is the one by which all strategies have learnt what to send.
    """
    trial = Trial()
    trainer.spec = trainer.spec.replace(optim=optim)
    trainer.step = trainer.cursor = 0
    with peak_of(trial) if observe else contextlib.nullcontext():
        trainer.build()
        if not observe:
            watch_gradients(trainer, trial.gradients)
        with torch.profiler.record_function(STEPPING):
            for _ in range(STEPS_BEFORE):
                record_step(trainer, trial)
            reader = ResidencyReader(trainer)
            with Traffic(trainer.mesh) as traffic:
                record_step(trainer, trial)
    for _ in range(STEPS_BEFORE + 1, STEPS):
        record_step(trainer, trial)
    parallel_model = trainer.parallel_model
    trial.collectives, trial.device, trial.host = traffic.table(), reader.device, reader.host
    trial.pieces = [Piece(shard.name, where(shard, parallel_model)) for shard in parallel_model.shards]
    trial.weights = [shard.leaf.detach().clone() for shard in parallel_model.shards]
    trial.buffers = parallel_model.buffers()
    return trial


def record_step(trainer: Trainer, trial: Trial) -> None:
    values = train_one_step(trainer)
    trial.losses.append(values["loss"])
    trial.norms.append(values["grad_norm"])
    trial.tokens += values["tokens"]
    trial.loads.append(expert_loads(trainer.parallel_model))


def expert_loads(parallel_model: ParallelModel) -> dict[str, Tensor]:
    """How often each expert was chosen in the last step, by the number of its block."""
    blocks = [(number, block) for part in parallel_model.parts.values() for number, block in part.blocks.items()]
    return {
        number: moe.load.clone()
        for number, block in blocks
        for moe in block.modules()
        if isinstance(moe, MoE) and moe.load is not None
    }


def watch_gradients(trainer: Trainer, kept: list[list[Tensor]]) -> None:
    """Keep every gradient as the optimizer would see it without clipping."""
    parallel_model = trainer.parallel_model
    finish = parallel_model.finish

    def finish_and_keep() -> None:
        finish()
        scale = trainer.loss_scale.scale
        kept.append([gradient_of(shard) / scale for shard in parallel_model.shards])

    parallel_model.finish = finish_and_keep  # type: ignore[method-assign]


def gradient_of(shard: Shard) -> Tensor:
    return torch.zeros_like(shard.leaf) if shard.leaf.grad is None else shard.leaf.grad.detach().clone()


@contextlib.contextmanager
def peak_of(trial: Trial) -> Iterator[None]:
    """Bytes that PyTorch's allocator gave out inside, less those given back, at their highest.

    The resident set of a process would count the interpreter and its libraries, which outweigh a small model.
    """
    with silence(), torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profiler:
        yield
    results = profiler.kineto_results
    assert results is not None
    events: list[Any] = results.events()
    began = next(event.start_ns() for event in events if event.name() == STEPPING)
    live = 0
    for start, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        live += size
        if start >= began:
            trial.peak_bytes = max(trial.peak_bytes, live)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """The profiler's native code talks on standard error; of a rank's own failures its parent hears another way."""
    with open(os.devnull, "w") as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def where(shard: Shard, parallel_model: ParallelModel) -> Tensor:
    """Cut a tensor of places as the weight was cut."""
    whole = parallel_model.sharding.shape(shard.name, shard.shape)
    index = torch.arange(whole.numel()).view(whole)
    if parallel_model.mesh is None:
        return index.flatten()
    index = parallel_model.sharding.part_of(shard.name, index, parallel_model.mesh)
    if shard.rows == "flat":
        lengths: list[Any] = [None] * parallel_model.mesh.size("shard")
        dist.all_gather_object(lengths, shard.leaf.numel(), group=parallel_model.mesh.group("shard"))
        before = sum(lengths[: parallel_model.mesh.rank("shard")])
        return index.flatten()[before : before + shard.leaf.numel()]
    if shard.rows is not None:
        chunks, rank = index.chunk(parallel_model.mesh.size(shard.rows)), parallel_model.mesh.rank(shard.rows)
        index = chunks[rank] if rank < len(chunks) else index[:0]
    return index.flatten()
