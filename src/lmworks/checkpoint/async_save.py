"""Asynchronous saves: training waits only for a copy into staging memory.

A writer process per rank writes the copy to disk. No collective is needed: each rank posts what its writer wrote, or
its error, in the store of the process group. Rank 0 polls it between steps; when all ranks are done, its writer writes
the manifest and commits. A failed writer (full disk, kill) costs only that save: the next save starts a new writer, and
older checkpoints are unchanged.

When all ranks wait for a save (the last one of a run), they exchange results over the process group: that works without
the store, which is lost when the agent is killed.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..parallel.store_mailbox import StoreMailbox, StoreUnavailable
from ..parallel.world import all_gather_object, is_rank_zero, run_on_all_ranks, run_on_rank_zero
from ..record import phase
from ..spec import CheckpointError
from .format import writer_client
from .format.folders import RetentionPolicy, remove_leftovers, work_folder
from .format.manifest import Files, read_committed
from .format.writer_client import AbandonJob, Answer, JobFailed, SealJob, WriteJob, WriterClient, WriterSetup
from .save_plan import RankPlan, make_plan, tensor_lookup


class Staging:
    """Staging memory, allocated once: an anonymous file that a rank and its writer process share.

    Nothing is left behind however they end. On CUDA its pages are pinned, and copies run at bus speed.
    """

    def __init__(self, plan: RankPlan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        size = max(1, plan.bytes)
        try:
            self.descriptor = anonymous_file()
            os.ftruncate(self.descriptor, size)
            self.memory = mmap.mmap(self.descriptor, size)
        except OSError as error:
            raise CheckpointError(
                f"no memory for the {size} bytes that an asynchronous save copies on this rank ({error.strerror}); "
                "use checkpoint.asynchronous = false"
            ) from error
        self.buffer = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.buffer.zero_()  # touches its pages before the first save
        if device.type == "cuda" and int(torch.cuda.cudart().cudaHostRegister(self.buffer.data_ptr(), size, 0)):
            raise CheckpointError(
                f"cannot pin the {size} bytes that an asynchronous save copies on this rank (see ulimit -l); "
                "use checkpoint.asynchronous = false"
            )

    def copy_from(self, state: dict[str, Any]) -> None:
        """Copy this rank's pieces of `state`."""
        find = tensor_lookup(state)
        for piece in self.plan.pieces:
            target = self.buffer[piece.start : piece.start + piece.bytes].view(piece.dtype).view(piece.sizes)
            target.copy_(find(piece), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.cudart().cudaHostUnregister(self.buffer.data_ptr())
        os.close(self.descriptor)


def anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("lmworks-staging")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# --- saves -----------------------------------------------------------------------------------------------

RANK_TIMEOUT_S = 1800.0  # for the other ranks to write
STALL_WARNING_S = 60.0  # without progress of a writer, before a warning
POLL_S = 0.01


@dataclass(frozen=True)
class SaveResult:
    """The result of a save, on rank 0."""

    step: int
    path: Path
    seconds: float  # from the copy to the commit
    bytes: int = 0
    error: str = ""


@dataclass
class PendingSave:
    """A save in progress."""

    step: int
    number: int
    final: Path
    work: Path
    meta: dict[str, Any]
    began: float
    warned: bool = False  # that its writer is stalled
    files: Files | None = None  # of all ranks, once known: the manifest is being written


class AsyncSaver:
    """The asynchronous saves of one run, one at a time. All ranks make the same calls."""

    def __init__(
        self,
        root: Path,
        keep: RetentionPolicy,
        state: dict[str, Any],
        device: torch.device,
        hash: str = "sha256",
        timeout_s: float = RANK_TIMEOUT_S,
    ) -> None:
        """A collective call. It fixes the layout of the files; the layout of `state` must never change.

        A writer without progress for `timeout_s` is killed, and its save abandoned.
        """
        self.root, self.keep, self.hash, self.timeout_s = root, keep, hash, timeout_s
        self.plan = make_plan(state)
        self.staging = run_on_all_ranks(lambda: Staging(self.plan, device))
        self.is_rank_zero = is_rank_zero()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        run_on_rank_zero(lambda: remove_leftovers(root))
        self.process = run_on_rank_zero(os.getpid)
        self.writer = run_on_all_ranks(self.start)
        self.count = 0
        self.pending: PendingSave | None = None
        self.mailbox = StoreMailbox(
            f"save/{run_on_rank_zero(time.time_ns)}", self.rank, self.world
        )  # another for every run

    def start(self) -> WriterClient:
        index = self.plan.index if self.is_rank_zero else b""
        setup = WriterSetup(
            self.rank, self.plan.header, self.plan.bytes, index, self.hash, tuple(writer_client.startup)
        )
        heartbeat_path = self.root.parent / "watch" / f"writer-{self.rank}.life"
        return WriterClient(setup, self.staging.descriptor, self.timeout_s, heartbeat_path)

    def save(self, step: int, state: dict[str, Any], meta: dict[str, Any]) -> None:
        """Copy `state` and start writing it. The save before must have ended: there is one buffer."""
        if self.pending is not None:
            raise CheckpointError(f"cannot save step {step}: step {self.pending.step} is still being saved")
        self.wait_until_idle()
        phase.enter("save.stage")
        self.staging.copy_from(state)
        final = self.root / f"step-{step:06d}"
        self.count += 1
        work = work_folder(final, self.process, self.count)
        self.pending = PendingSave(step, self.count, final, work, meta, time.perf_counter())
        phase.enter("save.write")
        self.writer.send(WriteJob(step, work))

    def wait_until_idle(self) -> None:
        """The writer may still be removing a failed save, or have died while idle."""
        while self.writer.busy:
            self.writer.answer(POLL_S)
        self.restart_if_dead()

    def restart_if_dead(self) -> None:
        if not self.writer.alive():
            self.writer.close()
            self.writer = self.start()

    def poll(self) -> SaveResult | None:
        """Advance the pending save without waiting."""
        return self.advance(0.0) if self.pending else None

    def wait(self) -> SaveResult | None:
        """Wait until this rank's part of the pending save has ended; on rank 0, all of it."""
        deadline = time.monotonic() + RANK_TIMEOUT_S
        ended = None
        while self.pending is not None:
            ended = self.advance(POLL_S)
            if self.pending is not None and time.monotonic() > deadline:
                raise CheckpointError(f"cannot save {self.pending.final}: no answer for {RANK_TIMEOUT_S:g} s")
        return ended

    def finish(self) -> SaveResult | None:
        """A collective call: wait for all of the pending save. Rank 0 gets its result."""
        answer = None
        pending = self.pending
        assert pending is not None, "there is no save to wait for"
        while answer is None:
            answer = self.writer.answer(POLL_S)
            self.warn_if_stalled(pending)
        self.restart_if_dead()
        messages = all_gather_object(to_message(answer, self.rank))
        if not self.is_rank_zero:
            self.pending = None
            return None
        return self.commit_or_abandon(pending, messages) or self.wait()

    def advance(self, timeout_s: float) -> SaveResult | None:
        pending = self.pending
        if pending is None:
            return None
        try:
            return self.step_pending(pending, timeout_s)
        except StoreUnavailable as error:
            if self.is_rank_zero:
                return self.abandon(pending, str(error))
            self.pending = None
            return None

    def step_pending(self, pending: PendingSave, timeout_s: float) -> SaveResult | None:
        if self.writer.busy:
            answer = self.writer.answer(timeout_s)
            if answer is None:
                self.warn_if_stalled(pending)
                return None
            self.restart_if_dead()
            if pending.files is not None:
                return self.on_committed(pending, answer)
            self.mailbox.put(pending.number, to_message(answer, self.rank))
            if not self.is_rank_zero:
                self.pending = None
                return None
        return self.gather(pending, timeout_s)

    def warn_if_stalled(self, pending: PendingSave) -> None:
        """Once, long before it is abandoned: its cause can still be examined."""
        if pending.warned or self.writer.stalled_s < min(STALL_WARNING_S, self.timeout_s / 2):
            return
        pending.warned = True
        writer = f"the writer process of rank {self.rank} (pid {self.writer.process.pid})"
        stalled = f"has made no progress for {self.writer.stalled_s:.0f} s in {pending.final.name}"
        print(f"{writer} {stalled}; it is killed after {self.timeout_s:g} s", file=sys.stderr, flush=True)

    def gather(self, pending: PendingSave, timeout_s: float) -> SaveResult | None:
        """Rank 0: once every rank has posted its result, commit or abandon."""
        if not self.mailbox.complete(pending.number):
            time.sleep(timeout_s)
            return None
        return self.commit_or_abandon(pending, self.mailbox.take(pending.number))

    def commit_or_abandon(self, pending: PendingSave, messages: list[str]) -> SaveResult | None:
        """Rank 0, with the results of all ranks."""
        files, errors = parse_messages(messages)
        if errors:
            return self.abandon(pending, "; ".join(errors))
        pending.files = files
        torch_version = str(torch.__version__)
        content = (pending.meta, files, torch_version, self.hash)
        self.writer.send(SealJob(pending.step, pending.work, pending.final, *content, self.keep))
        return None

    def on_committed(self, pending: PendingSave, answer: Answer) -> SaveResult:
        """A writer that was killed after its commit has committed: only that counts."""
        if not isinstance(answer, JobFailed) or is_committed(pending):
            return self.end(pending, "")
        return self.abandon(pending, answer.reason)

    def abandon(self, pending: PendingSave, reason: str) -> SaveResult:
        self.wait_until_idle()
        self.writer.send(AbandonJob(pending.step, pending.work))
        return self.end(pending, reason)

    def end(self, pending: PendingSave, error: str) -> SaveResult:
        self.pending = None
        size = sum(entry["bytes"] for entry in (pending.files or {}).values())
        return SaveResult(pending.step, pending.final, time.perf_counter() - pending.began, size, error)

    def close(self) -> None:
        """A pending save is abandoned, unless it was waited for."""
        self.writer.close()
        self.staging.close()


def to_message(answer: Answer, rank: int) -> str:
    """The files that a rank's writer wrote, or its error."""
    where = f" on rank {rank}" if rank else ""
    return json.dumps([{}, f"{answer.reason}{where}"] if isinstance(answer, JobFailed) else [answer.files, ""])


def parse_messages(messages: list[str]) -> tuple[Files, list[str]]:
    """The files of all ranks, and all errors."""
    found = [json.loads(text) for text in messages]
    return {name: entry for files, _ in found for name, entry in files.items()}, [why for _, why in found if why]


def is_committed(pending: PendingSave) -> bool:
    """Whether this save is committed, and not an earlier one of the same step (a rewind saves a step again)."""
    try:
        manifest = read_committed(pending.final)
    except CheckpointError:
        return False
    return manifest.files == pending.files and manifest.meta == json.loads(json.dumps(pending.meta))
