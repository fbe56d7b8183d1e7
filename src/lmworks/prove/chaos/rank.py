"""One process of a job under test: it takes notes, lies in wait for its act, and is `lmworks …` in every other way.

The notes are what the command line does not keep: which samples each step was given. And a number is drawn from every
random generator at each step, so that a resume which forgot one of them would be found out.
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
from .trigger import Place, Waiting

Log = dict[int, tuple[int, list[str]]]  # step → data-parallel ranks, and a digest of every sample this one was given


def be_rank(folder: Path, arguments: list[str]) -> None:
    """Run `lmworks …arguments` here; ends the process as the command does."""
    place = Place(folder, int(os.environ.get("RANK", 0)))
    place.pid_file(place.rank).write_text(str(os.getpid()))
    phase.listeners.append(Waiting(place, {**fault_injection.FAULTS, **numeric_faults.FAULTS}))
    writer_client.startup.append(partial(fault_injection.wait_in_writer, folder, place.rank))
    phase.listeners.append(draw_numbers)
    remember_trainer(place)
    run_report.write_report = lambda folder: folder.report_path  # takes longer to draw than the job
    note_samples(folder / f"samples-{place.rank}.jsonl")
    for listener in phase.listeners:
        listener("start", 0)
    sys.argv = ["lmworks", *arguments]
    runpy.run_module("lmworks", run_name="__main__")


def draw_numbers(name: str, _step: int) -> None:
    if name == "data":
        random.random()
        np.random.random()
        torch.rand(1)


def remember_trainer(place: Place) -> None:
    build = Trainer.build

    def building(self: Trainer) -> None:
        build(self)
        place.trainer = self

    Trainer.build = building  # type: ignore[method-assign]


def note_samples(path: Path) -> None:
    stream = Batches.stream

    def noting(self: Batches, *arguments: Any) -> Iterator[list[Batch]]:
        with path.open("a", encoding="utf-8") as notes:
            for batches in stream(self, *arguments):
                rows = [row for batch in batches for row in rows_of(batch)]
                notes.write(json.dumps([phase.step, self.world, rows]) + "\n")
                notes.flush()
                yield batches

    Batches.stream = noting  # type: ignore[method-assign,assignment]


def rows_of(batch: Batch) -> list[str]:
    rows = torch.cat([batch.tokens, batch.targets], dim=1).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=6).hexdigest() for row in rows]


def read_samples(folder: Path) -> dict[int, Log]:
    """Of every rank: the samples of each step, as it was given them last."""
    found: dict[int, Log] = {}
    for path in folder.glob("samples-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("]]")]
        found[int(path.stem.removeprefix("samples-"))] = {step: (world, rows) for step, world, rows in lines}
    return found
