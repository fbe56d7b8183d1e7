"""One process of a job under test: `lmworks …` with a fault trigger and a log of the samples of every step.

The sample log is what a run folder does not record. A number is drawn from every random generator at each step, so
that a resume that does not restore one of them is detected.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import runpy
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...checkpoint.format import writer_client
from ...data import Batch, Batches
from ...record import phase
from ...report import run_report
from ...train import Trainer
from . import fault_injection, numeric_faults
from .trigger import FaultTrigger, ProcessContext

SampleLog = dict[int, tuple[int, list[str]]]  # step → (data-parallel ranks, a digest of each sample of this rank)


def run_rank(folder: Path, arguments: list[str]) -> None:
    """Run `lmworks …arguments` in this process; exits as the command does."""
    context = ProcessContext(folder, int(os.environ.get("RANK", 0)))
    context.pid_file(context.rank).write_text(str(os.getpid()))
    phase.listeners.append(FaultTrigger(context, {**fault_injection.INJECTORS, **numeric_faults.INJECTORS}))
    writer_client.startup.append(partial(fault_injection.install_in_writer, folder, context.rank))
    phase.listeners.append(advance_generators)
    capture_trainer(context)
    run_report.write_report = lambda folder: folder.report_path  # plots take longer than the job
    record_samples(folder / f"samples-{context.rank}.jsonl")
    for listener in phase.listeners:
        listener("start", 0)
    sys.argv = ["lmworks", *arguments]
    runpy.run_module("lmworks", run_name="__main__")


def advance_generators(name: str, _step: int) -> None:
    if name == "data":
        random.random()
        np.random.random()
        torch.rand(1)


def capture_trainer(context: ProcessContext) -> None:
    build = Trainer.build

    def build_and_capture(self: Trainer) -> None:
        build(self)
        context.trainer = self

    Trainer.build = build_and_capture  # type: ignore[method-assign]


def record_samples(path: Path) -> None:
    stream = Batches.stream

    def stream_and_record(self: Batches, *arguments: Any) -> Iterator[list[Batch]]:
        with path.open("a", encoding="utf-8") as notes:
            for batches in stream(self, *arguments):
                rows = [row for batch in batches for row in sample_digests(batch)]
                notes.write(json.dumps([phase.step, self.world, rows]) + "\n")
                notes.flush()
                yield batches

    Batches.stream = stream_and_record  # type: ignore[method-assign,assignment]


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
