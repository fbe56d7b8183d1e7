"""Saves that training does not wait for.

A save is a copy into staging memory; a writer process per rank brings it to the disk. No collective is needed for that:
each rank leaves what its writer wrote, or why it could not, in the store through which the ranks once met. The lead
looks there between steps, and when all are done its writer seals and commits. Whatever goes wrong in a writer (a full
disk, a kill) costs that save alone: the next one finds a new writer, and older checkpoints are as they were.

Where all ranks wait for a save (the last one before a run ends) they tell one another over the process group: that
works without the store, which is gone when the agent that started the ranks was killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..parallel.store_mailbox import StoreMailbox, StoreUnavailable
from ..parallel.world import is_rank_zero, run_on_all_ranks, run_on_rank_zero
from ..record import phase
from ..spec import CheckpointError
from .format import writer_client
from .format.folders import Keep, sweep, work_folder
from .format.manifest import Files, vouched
from .format.writer_client import Writer
from .format.writer_messages import Abandon, Answer, Failed, Seal, Setup, Write
from .save_plan import make
from .staging import Staging

PATIENCE_S = 1800.0  # for the other ranks' disks
TELL_S = 60.0  # that a writer stands still before somebody is told
POLL_S = 0.01


@dataclass(frozen=True)
class Ended:
    """What became of a save. The lead alone hears of it."""

    step: int
    path: Path
    seconds: float  # from the copy to the commit
    bytes: int = 0
    error: str = ""


@dataclass
class Flight:
    """The save under way."""

    step: int
    number: int
    final: Path
    work: Path
    meta: dict[str, Any]
    began: float
    told: bool = False  # that its writer stands still
    files: Files | None = None  # of all ranks, once they are known: it is being sealed


class Background:
    """The saves of one run, one at a time. Every rank has one and calls it at the same places."""

    def __init__(
        self,
        root: Path,
        keep: Keep,
        state: dict[str, Any],
        device: torch.device,
        hash: str = "sha256",
        timeout_s: float = PATIENCE_S,
    ) -> None:
        """Every rank together. Where everything lies is decided here; `state` must never change its layout.

        A writer that stands still for `timeout_s` is given up, with its save.
        """
        self.root, self.keep, self.hash, self.timeout_s = root, keep, hash, timeout_s
        self.plan = make(state)
        self.staging = run_on_all_ranks(lambda: Staging(self.plan, device))
        self.lead = is_rank_zero()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        run_on_rank_zero(lambda: sweep(root))
        self.process = run_on_rank_zero(os.getpid)
        self.writer = run_on_all_ranks(self.start)
        self.count = 0
        self.flight: Flight | None = None
        self.mailbox = StoreMailbox(
            f"save/{run_on_rank_zero(time.time_ns)}", self.rank, self.world
        )  # another for every run

    def start(self) -> Writer:
        index = self.plan.index if self.lead else b""
        setup = Setup(self.rank, self.plan.header, self.plan.bytes, index, self.hash, tuple(writer_client.startup))
        sign = self.root.parent / "watch" / f"writer-{self.rank}.life"
        return Writer(setup, self.staging.descriptor, self.timeout_s, sign)

    def save(self, step: int, state: dict[str, Any], meta: dict[str, Any]) -> None:
        """Copy `state` and let it be written. The save before must have been settled: there is one buffer."""
        if self.flight is not None:
            raise CheckpointError(f"cannot save step {step}: step {self.flight.step} is still being saved")
        self.make_ready()
        phase.enter("save.stage")
        self.staging.take(state)
        final = self.root / f"step-{step:06d}"
        self.count += 1
        work = work_folder(final, self.process, self.count)
        self.flight = Flight(step, self.count, final, work, meta, time.perf_counter())
        phase.enter("save.write")
        self.writer.send(Write(step, work))

    def make_ready(self) -> None:
        """The writer may still be removing a failed save, or have died while it had nothing to do."""
        while self.writer.busy:
            self.writer.answer(POLL_S)
        self.revive()

    def revive(self) -> None:
        if not self.writer.alive():
            self.writer.close()
            self.writer = self.start()

    def poll(self) -> Ended | None:
        """Take the save under way as far as it goes without waiting."""
        return self.advance(0.0) if self.flight else None

    def settle(self) -> Ended | None:
        """Wait until this rank's part of the save under way has ended; the lead's is all of it."""
        give_up = time.monotonic() + PATIENCE_S
        ended = None
        while self.flight is not None:
            ended = self.advance(POLL_S)
            if self.flight is not None and time.monotonic() > give_up:
                raise CheckpointError(f"cannot save {self.flight.final}: no word of it for {PATIENCE_S:g} s")
        return ended

    def finish(self) -> Ended | None:
        """Every rank together: wait for the save under way, all of it. The lead hears what became of it."""
        answer = None
        flight = self.flight
        assert flight is not None, "there is no save to wait for"
        while answer is None:
            answer = self.writer.answer(POLL_S)
            self.tell_of_standstill(flight)
        self.revive()
        messages = gathered(as_message(answer, self.rank))
        if not self.lead:
            self.flight = None
            return None
        return self.conclude(flight, messages) or self.settle()

    def advance(self, patience_s: float) -> Ended | None:
        flight = self.flight
        if flight is None:
            return None
        try:
            return self.continue_after(flight, patience_s)
        except StoreUnavailable as gone:
            if self.lead:
                return self.give_up(flight, str(gone))
            self.flight = None
            return None

    def continue_after(self, flight: Flight, patience_s: float) -> Ended | None:
        if self.writer.busy:
            answer = self.writer.answer(patience_s)
            if answer is None:
                self.tell_of_standstill(flight)
                return None
            self.revive()
            if flight.files is not None:
                return self.sealed(flight, answer)
            self.mailbox.put(flight.number, as_message(answer, self.rank))
            if not self.lead:
                self.flight = None
                return None
        return self.gather(flight, patience_s)

    def tell_of_standstill(self, flight: Flight) -> None:
        """Once, long before it is given up: whoever looks can still see what it waits for."""
        if flight.told or self.writer.still_s < min(TELL_S, self.timeout_s / 2):
            return
        flight.told = True
        who = f"the writer process of rank {self.rank} (pid {self.writer.process.pid})"
        told = f"has stood still for {self.writer.still_s:.0f} s in {flight.final.name}"
        print(f"{who} {told}; it is given up after {self.timeout_s:g} s", file=sys.stderr, flush=True)

    def gather(self, flight: Flight, patience_s: float) -> Ended | None:
        """The lead: once every rank has said how it fared, seal, or give up."""
        if not self.mailbox.complete(flight.number):
            time.sleep(patience_s)
            return None
        return self.conclude(flight, self.mailbox.take(flight.number))

    def conclude(self, flight: Flight, messages: list[str]) -> Ended | None:
        """The lead, once it has the word of every rank."""
        files, errors = understood(messages)
        if errors:
            return self.give_up(flight, "; ".join(errors))
        flight.files = files
        torch_version = str(torch.__version__)
        content = (flight.meta, files, torch_version, self.hash)
        self.writer.send(Seal(flight.step, flight.work, flight.final, *content, self.keep))
        return None

    def sealed(self, flight: Flight, answer: Answer) -> Ended:
        """A writer that was killed after its commit has committed: only that counts."""
        if not isinstance(answer, Failed) or is_there(flight):
            return self.end(flight, "")
        return self.give_up(flight, answer.reason)

    def give_up(self, flight: Flight, reason: str) -> Ended:
        self.make_ready()
        self.writer.send(Abandon(flight.step, flight.work))
        return self.end(flight, reason)

    def end(self, flight: Flight, error: str) -> Ended:
        self.flight = None
        size = sum(entry["bytes"] for entry in (flight.files or {}).values())
        return Ended(flight.step, flight.final, time.perf_counter() - flight.began, size, error)

    def close(self) -> None:
        """What is under way is given up; whoever wants it waits for it before."""
        self.writer.close()
        self.staging.close()


def as_message(answer: Answer, rank: int) -> str:
    """What a rank's writer wrote, or why it could not."""
    where = f" on rank {rank}" if rank else ""
    return json.dumps([{}, f"{answer.reason}{where}"] if isinstance(answer, Failed) else [answer.files, ""])


def gathered(message: str) -> list[str]:
    """Of every rank, on every rank."""
    if not dist.is_initialized():
        return [message]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, message)
    return found


def understood(messages: list[str]) -> tuple[Files, list[str]]:
    """The files of all ranks, and all that went wrong."""
    found = [json.loads(text) for text in messages]
    return {name: entry for files, _ in found for name, entry in files.items()}, [why for _, why in found if why]


def is_there(flight: Flight) -> bool:
    """Whether what is committed is this save, and not an earlier one of the same step, as a rewind saves it again."""
    try:
        manifest = vouched(flight.final)
    except CheckpointError:
        return False
    return manifest.files == flight.files and manifest.meta == json.loads(json.dumps(flight.meta))
