"""One process of a job under test: `lmworks …` with a fault trigger and a log of the samples of every step.

The sample log is what a run folder does not record. A number is drawn from every random generator at each step, so
that a resume that does not restore one of them is detected.

Injectors of numeric faults (NaN, bit flips), slow ranks and mismatched collectives. They run inside a rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import runpy
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...checkpoint.format import writer_client
from ...data import Batch
from ...data.loader import BatchSource
from ...record import phase
from ...report import run_report
from ...train import Trainer
from ...train.prefetcher import BatchStream
from . import fault_injection
from .fault_injection import Announce, FaultTrigger, Injection, Injector, ProcessContext

SLOW_S = 0.8  # many times a step's duration: the straggler detector averages over seconds


def slow(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    """From now on this phase takes longer on this rank."""
    announce(f"rank {injection.rank} is slow")

    def sleep_in_phase(name: str, _step: int) -> None:
        if name == injection.phase:
            time.sleep(SLOW_S)

    phase.listeners.append(sleep_in_phase)


def mismatch(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    """One rank calls a collective that the others do not."""
    announce(f"rank {injection.rank} calls an all_gather of its own")
    dist.all_gather([torch.zeros(7) for _ in range(dist.get_world_size())], torch.zeros(7))


# --- numbers --------------------------------------------------------------------------------------------


def nan_loss(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    """The output of a block is NaN for the rest of this step, also when the step is rerun."""
    announce(f"NaN in the forward pass of rank {injection.rank}")
    blocks = [block for part in context.trainer.parallel_model.parts.values() for block in part.blocks.values()]
    now = phase.step

    def poison(_module: Any, _inputs: Any, output: Any) -> Any:
        return output * torch.nan if phase.step == now and isinstance(output, torch.Tensor) else output

    random.Random(injection.seed).choice(blocks).register_forward_hook(poison)


def nan_gradient(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    """One element of one gradient, after the reduction."""
    announce(f"NaN in a gradient of rank {injection.rank}")
    parallel_model, finish = context.trainer.parallel_model, context.trainer.parallel_model.finish
    draw, now = random.Random(injection.seed), phase.step

    def finish_and_poison() -> None:
        finish()
        if phase.step == now:
            gradient = draw.choice(
                [s.leaf.grad for s in parallel_model.shards if s.leaf.grad is not None and s.leaf.numel()]
            )
            flat_memory(gradient)[draw.randrange(flat_memory(gradient).numel())] = torch.nan

    parallel_model.finish = finish_and_poison


def flip_parameter(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    announce(f"a bit of a parameter of rank {injection.rank}")
    flip_number([shard.leaf for shard in context.trainer.parallel_model.shards], injection)


def flip_gradient(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    announce(f"a bit of a gradient of rank {injection.rank}")
    flip_number(
        [shard.leaf.grad for shard in context.trainer.parallel_model.shards if shard.leaf.grad is not None], injection
    )


def flip_optimizer(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    announce(f"a bit of the optimizer's state of rank {injection.rank}")
    states = context.trainer.optimizer.state.values()
    flip_number([value for state in states for key, value in state.items() if key.startswith("exp_avg")], injection)


def flip_number(tensors: list[torch.Tensor], injection: Injection) -> None:
    """The highest bit of a mantissa: the value changes and stays finite."""
    draw = random.Random(injection.seed)
    with torch.no_grad():
        bits = flat_memory(draw.choice(tensors)).view(torch.int32)
        bits[draw.randrange(bits.numel())] ^= 1 << 22


def flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The local memory of a tensor or DTensor as a vector."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().view(-1)


NUMERIC_INJECTORS: dict[str, Injector] = {
    "nan-loss": nan_loss,
    "nan-gradient": nan_gradient,
    "flip-parameter": flip_parameter,
    "flip-gradient": flip_gradient,
    "flip-optimizer": flip_optimizer,
    "slow": slow,
    "mismatch": mismatch,
}


# --- the process -----------------------------------------------------------------------------------------


SampleLog = dict[int, tuple[int, list[str]]]  # step → (data-parallel ranks, a digest of each sample of this rank)


def run_rank(folder: Path, arguments: list[str]) -> None:
    """Run `lmworks …arguments` in this process; exits as the command does."""
    context = ProcessContext(folder, int(os.environ.get("RANK", 0)))
    context.pid_file(context.rank).write_text(str(os.getpid()))
    phase.listeners.append(FaultTrigger(context, {**fault_injection.INJECTORS, **NUMERIC_INJECTORS}))
    writer_client.startup.append(partial(fault_injection.install_in_writer, folder, context.rank))
    phase.listeners.append(advance_generators)
    samples = folder / f"samples-{context.rank}.jsonl"
    capture_trainer(context, samples)
    run_report.write_report = lambda folder: folder.report_path  # plots take longer than the job
    record_samples(samples)
    for listener in phase.listeners:
        listener("start", 0)
    sys.argv = ["lmworks", *arguments]
    runpy.run_module("lmworks", run_name="__main__")


def advance_generators(name: str, _step: int) -> None:
    if name == "data":
        random.random()
        np.random.random()
        torch.rand(1)


def capture_trainer(context: ProcessContext, samples: Path) -> None:
    build = Trainer.build

    def build_and_capture(self: Trainer) -> None:
        build(self)
        context.trainer = self
        if self.spec.align.online:
            record_answers(self, samples)

    Trainer.build = build_and_capture  # type: ignore[method-assign]


def record_samples(path: Path) -> None:
    stream = BatchSource.stream

    def stream_and_record(self: BatchSource, *arguments: Any) -> Iterator[list[Batch]]:
        with path.open("a", encoding="utf-8") as notes:
            for batches in stream(self, *arguments):
                rows = [row for batch in batches for row in sample_digests(batch)]
                notes.write(json.dumps([phase.step, self.world, rows]) + "\n")
                notes.flush()
                yield batches

    BatchSource.stream = stream_and_record  # type: ignore[method-assign,assignment]


def record_answers(trainer: Trainer, path: Path) -> None:
    """The sampled answers of an online method, which come from its rounds."""
    open_stream, world = trainer.batch_stream, trainer.parallel_model.size("dp")

    def recorded() -> BatchStream:
        stream = open_stream()
        take = stream.take

        def take_and_record(cursor: int, ahead: int) -> list[Batch]:
            batches = take(cursor, ahead)
            rows = [row for batch in batches for row in sample_digests(batch)]
            with path.open("a", encoding="utf-8") as notes:
                notes.write(json.dumps([phase.step, world, rows]) + "\n")
            return batches

        stream.take = take_and_record  # type: ignore[method-assign]
        return stream

    trainer.batch_stream = recorded  # type: ignore[method-assign]


def sample_digests(batch: Batch) -> list[str]:
    rows = torch.cat([batch.tokens, batch.targets], dim=1).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=6).hexdigest() for row in rows]


def read_samples(folder: Path) -> dict[int, SampleLog]:
    """By rank: the samples of each step in its last attempt."""
    found: dict[int, SampleLog] = {}
    for path in folder.glob("samples-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("]]")]
        found[int(path.stem.removeprefix("samples-"))] = {step: (world, rows) for step, world, rows in lines}
    return found
