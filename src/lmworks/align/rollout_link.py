"""Trainer and rollout ranks: two worlds of one launch, and what connects them.

Ranks below `parallel.world` train, those above only sample. Each side has a default process group of its own, so that
the collectives of the trainer are those of a run without rollout ranks. Weights are broadcast over a group of the
trainer's rank 0 and all rollout ranks. Everything else is an entry of the rendezvous store that the other side polls:
no rank waits for the work of the other side inside of a collective, where the watchdog would call it a hang.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ..parallel.rendezvous import AGENT_KILLED, agent_died, private_store, record_agent, uses_agent_store
from ..parallel.world import (
    BACKENDS,
    as_rank_error,
    collective_error,
    group_timeout,
    launched,
    post_error,
    read_error,
    remote_error,
)
from ..record.heartbeat import Heartbeat, own_heartbeat, process_state
from ..spec import LMWorksError, SpecError, TrainingError

T = TypeVar("T")
POLL_S = 0.01
HEARTBEAT_S = 2.0  # every rank counts up an entry of the store this often
CHECK_S = 1.0  # between looks at the other side's ranks while waiting for them
HEARTBEAT_TIMEOUT_S = 60.0  # without a heartbeat: the rank has ended, is stopped or cannot be reached
# Entries: the run folder is there; the trainer has ended; so many rollout ranks have.
READY, END, ENDED = "ready", "end", "ended"


class RolloutLink:
    """Of one rank. Made by all ranks of both sides, before any other process group."""

    def __init__(self, trainers: int, rollouts: int, device: torch.device, timeout_s: float) -> None:
        self.trainers, self.rollouts, self.device = trainers, rollouts, device
        check_started(trainers, rollouts)
        self.rank = int(os.environ["RANK"])
        self.trains = self.rank < trainers
        self.limit = group_timeout(timeout_s)
        record_agent()
        root = private_store(self.limit) if uses_agent_store() else next(rendezvous("env://", timeout=self.limit))[0]
        self.init_side(root)
        self.store = PrefixStore("link", root)
        # Backends without a global group of both worlds, which torch.distributed cannot have beside the default group.
        members = [0, *range(trainers, trainers + rollouts)]
        self.groups: dict[str, Any] = {}
        if self.rank in members:
            place = members.index(self.rank), len(members)
            self.groups["cpu"] = dist.ProcessGroupGloo(PrefixStore("gloo", self.store), *place, timeout=self.limit)
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self.limit
                self.groups["cuda"] = dist.ProcessGroupNCCL(PrefixStore("nccl", self.store), *place, options)
        self.peers = range(trainers, trainers + rollouts) if self.trains else range(trainers)
        self.beats = {peer: (0, time.monotonic()) for peer in self.peers}  # count, and when it was seen to change
        self.processes: dict[int, Heartbeat] = {}
        self.put(f"process/{self.rank}", own_heartbeat(self.rank))
        threading.Thread(target=self.send_heartbeats, name="rollout-heartbeat", daemon=True).start()

    def init_side(self, root: Store) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        first, size, name = (0, self.trainers, "trainer") if self.trains else (self.trainers, self.rollouts, "rollouts")
        dist.init_process_group(
            BACKENDS[self.device.type],
            timeout=self.limit,
            store=PrefixStore(name, root),
            rank=self.rank - first,
            world_size=size,
        )

    def broadcast(self, tensor: Tensor) -> None:
        """From the trainer's rank 0 to all rollout ranks; other ranks of the trainer do not call it."""
        self.groups[tensor.device.type].broadcast(tensor, 0).wait()

    # --- entries of the store ------------------------------------------------------------------------------

    def put(self, key: str, value: Any) -> None:
        self.call(self.store.set, key, pickle.dumps(value))

    def has(self, key: str) -> bool:
        return bool(self.call(self.store.check, [key]))

    def get(self, key: str) -> Any:
        return pickle.loads(self.call(self.store.get, key))

    def delete(self, key: str) -> None:
        self.call(self.store.delete_key, key)

    def count(self, key: str, more: int = 0) -> int:
        """Add to a number that all ranks see; returns the sum."""
        return int(self.call(self.store.add, key, more))

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        if agent_died():
            raise self.lost(AGENT_KILLED)
        try:
            return function(*arguments)
        except RuntimeError:  # with a C++ stack for its text
            raise self.lost("the process that hosts the rendezvous store has ended") from None

    # --- waiting for the other side -------------------------------------------------------------------------

    def wait(self, arrived: Callable[[], bool], what: str = "", limit_s: float = 0.0) -> float:
        """Poll until `arrived`; returns the seconds. Raises the error of a rank of the other side, or that it is lost.

        `limit_s`: raise after so long, with `what` did not come.
        """
        began = checked = time.monotonic()
        while not arrived():
            now = time.monotonic()
            if now - checked > CHECK_S:
                checked, problem = now, self.problem()
                if problem is not None:
                    if arrived():  # just before it
                        break
                    raise problem
            if limit_s and now - began > limit_s:
                raise collective_error(TrainingError(f"{what} did not come within watch.timeout_s = {limit_s:g} s"))
            time.sleep(POLL_S)
        return time.monotonic() - began

    def problem(self) -> LMWorksError | None:
        """Why the other side will not answer any more."""
        posted = read_error(self.store)
        if posted is not None:
            error = remote_error(posted)
            error.reported = error.rank_lost = True
            return error
        now = time.monotonic()
        for peer in self.peers:
            if peer not in self.processes:
                if not self.has(f"process/{peer}"):
                    continue  # it has not joined yet
                self.processes[peer], self.beats[peer] = self.get(f"process/{peer}"), (0, now)
            beats = self.count(f"beat/{peer}")
            if beats != self.beats[peer][0]:
                self.beats[peer] = beats, now
            if process_state(self.processes[peer]) == "gone" or now - self.beats[peer][1] > HEARTBEAT_TIMEOUT_S:
                kind = "rollout rank" if self.trains else "rank"
                return self.lost(f"{kind} {peer} on {self.processes[peer].host} has ended or does not answer")
        return None

    def lost(self, why: str) -> LMWorksError:
        error = TrainingError(f"{why}; the run can be resumed")
        error.rank_lost = True
        error.reported = not self.trains  # by the trainer, or by what started it
        collective_error(error)
        return error

    def send_heartbeats(self) -> None:
        with suppress(LMWorksError):
            while True:
                self.count(f"beat/{self.rank}", 1)
                time.sleep(HEARTBEAT_S)

    # --- the end --------------------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Tell the other side."""
        post_error(self.store, as_rank_error(error, self.rank))

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Around the trainer's run: the rollout ranks end with it."""
        try:
            yield
        except BaseException:
            with suppress(LMWorksError):
                self.put(END, None)
            raise
        self.put(END, None)
        self.wait(lambda: self.count(ENDED) == self.rollouts)  # the store may end with this process


def check_started(trainers: int, rollouts: int) -> None:
    need = f"{trainers} ranks of the layout and align.rollout_ranks = {rollouts} are {trainers + rollouts} ranks"
    if not launched():
        raise SpecError(f"{need}, and none was started; use `lmworks train`, torchrun or `lmworks launch`")
    if dist.is_initialized():
        raise SpecError(f"{need} with process groups of their own, but there is one already; use align.rollout_ranks=0")
    if (started := int(os.environ["WORLD_SIZE"])) != trainers + rollouts:
        raise collective_error(SpecError(f"{need}, but {started} were started"))
