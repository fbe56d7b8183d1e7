"""Answers of rollout ranks: what the trainer asks of them, and when its weights travel.

Round r trains on answers that were sampled with the weights of version r − align.max_staleness, the weights that round
r − align.max_staleness trained first (those of version 0 where that is negative). So a run is a function of its seed,
however fast either side is:

    max_staleness = 1        rollout ranks   │ round 0 (v0) │ round 1 (v0) │ round 2 (v1) │ round 3 (v2) │
                             trainer         │     waits    │ update on 0  │ update on 1  │ update on 2  │ …
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import committed
from ..checkpoint.format.manifest import read_committed
from ..engine.core.model_runner import DTYPES
from ..engine.quantization.quantized_model import MetaModel
from ..parallel.comm_counter import CommCounter
from ..parallel.parallel_model import ParallelModel
from ..parallel.world import is_rank_zero, run_on_all_ranks, run_on_rank_zero
from ..record import phase
from ..spec import RunSpec
from .rollout_engine import HandOver, engine_dtype, gathered_bytes
from .rollout_link import READY, RolloutLink
from .rollouts import KEPT_ROUNDS, Rollout, load_round, save_round
from .weight_updates import WeightUpdates

HELD_OUT_DRAW = -1
END_OF_WEIGHTS = -1
UNKNOWN = -1  # version of weights that no round begins with


@dataclass(frozen=True)
class SampleRequest:
    """What all rollout ranks do next."""

    draws: tuple[int, ...]
    version: int  # of the weights
    weights: bool  # whether they are broadcast first


@dataclass(frozen=True)
class Answers:
    """Of one draw, from all rollout ranks."""

    rollouts: list[Rollout]
    seconds: float = 0.0  # of sampling; 0 where a run before this one had them
    idle_s: float = 0.0  # that the rollout ranks had waited for the request


def wire_format(spec: RunSpec) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and type of every weight as it is broadcast; both sides number them in this order."""
    model, dtype = MetaModel(spec.model).shape(), DTYPES[engine_dtype(spec)]
    weights = {name: (weight.shape, dtype) for name, weight in model.named_parameters()}
    return weights | {name: (buffer.shape, buffer.dtype) for name, buffer in model.named_buffers()}


def no_times() -> dict[str, float]:
    times = ("rollout_wait_s", "rollout_idle_s", "generate_s")
    return HandOver(0.0, 0).metrics() | dict.fromkeys(times, 0.0)


def ready_of(checkpoint: Path) -> list[int]:
    """The draws that were sampled ahead of a checkpoint."""
    found: list[int] = read_committed(checkpoint).meta["align"]["sampler"]["ready"]
    return found


def answers_key(request: int, draw: int) -> str:
    return f"answers/{request}/{draw}"


def arrived_key(request: int, draw: int) -> str:
    """Stays when the answers were taken: ranks of the trainer see it at different times."""
    return f"arrived/{request}/{draw}"


class RemoteSampler:
    """The `Sampler` of a trainer with rollout ranks; a checkpoint has the answers that were sampled ahead of it."""

    def __init__(self, spec: RunSpec, parallel_model: ParallelModel, link: RolloutLink, folder: Path) -> None:
        self.spec, self.link, self.folder = spec, link, folder
        self.updates = WeightUpdates(spec, parallel_model)
        self.wire = wire_format(spec)
        self.indices = {name: index for index, name in enumerate(self.wire)}
        self.requests = 0
        self.version = UNKNOWN  # of the rollout ranks' weights
        self.pending: dict[int, int] = {}  # draw → its request
        self.ready: dict[int, Answers] = {}  # sampled ahead
        self.number = 0  # of the round at hand
        self.staleness: list[int] = []  # of its answers
        self.metrics = no_times()
        if is_rank_zero():
            link.put(READY, None)  # run folder and tokens are there

    # --- rounds ---------------------------------------------------------------------------------------------

    def begin_round(self, number: int) -> None:
        self.number, self.staleness = number, []
        self.metrics = no_times()
        if not self.is_known(draw := self.first_draw(number)):
            self.request_draws([draw], number)

    def sample(self, draw: int) -> list[Rollout]:
        if not self.is_known(draw):  # a further draw of dynamic sampling
            self.request_draws([draw], self.number)
        answers = self.ready.pop(draw, None) or self.receive(draw)
        self.metrics["generate_s"] += answers.seconds
        self.metrics["rollout_idle_s"] += answers.idle_s
        self.staleness += [self.number - rollout.version for rollout in answers.rollouts]
        return answers.rollouts

    def end_round(self, number: int, last: int) -> None:
        """Let the next rounds be sampled while this one is trained on."""
        ahead = range(number + 1, min(number + self.spec.align.max_staleness, last) + 1)
        if missing := [draw for draw in map(self.first_draw, ahead) if not self.is_known(draw)]:
            self.request_draws(missing, number)
        self.metrics["staleness/mean"] = sum(self.staleness) / len(self.staleness)
        self.metrics["staleness/max"] = float(max(self.staleness))

    def sample_held_out(self) -> list[Rollout]:
        self.request_draws([HELD_OUT_DRAW], UNKNOWN)  # maybe in the middle of a round
        return self.receive(HELD_OUT_DRAW).rollouts

    def first_draw(self, number: int) -> int:
        return number * (1 + self.spec.align.dynamic_sampling)

    def is_known(self, draw: int) -> bool:
        return draw in self.ready or draw in self.pending

    # --- requests ---------------------------------------------------------------------------------------------

    def request_draws(self, draws: Sequence[int], version: int) -> None:
        """Called by all ranks of the trainer: the weights are gathered where the rollout ranks have others."""
        link, number, weights = self.link, self.requests, version != self.version or version == UNKNOWN
        self.wait_for(lambda: link.count(f"idle/{number}") == link.rollouts, "rollout ranks that are idle")
        if is_rank_zero():
            if number:
                link.delete(f"request/{number - 1}")  # all have read it
            link.put(f"request/{number}", SampleRequest(tuple(draws), version, weights))
        self.pending |= dict.fromkeys(draws, number)
        self.requests += 1
        if weights:
            self.send_weights()
            self.version = version

    @torch.no_grad()
    def send_weights(self) -> None:
        phase.enter("hand_over")
        began, size = time.perf_counter(), 0
        with CommCounter() as counter:
            for name, weight in self.updates.changed():
                if is_rank_zero():
                    self.link.broadcast(torch.tensor([self.indices[name]]))
                    sent = weight.to(self.link.device, self.wire[name][1]).contiguous()
                    self.link.broadcast(sent)
                    size += sent.nbytes
        if is_rank_zero():
            self.link.broadcast(torch.tensor([END_OF_WEIGHTS]))
        moved = HandOver(time.perf_counter() - began, size, gathered_bytes(counter))
        for name, value in moved.metrics().items():
            self.metrics[name] += value

    def receive(self, draw: int) -> Answers:
        link, request = self.link, self.pending[draw]
        self.wait_for(lambda: link.has(arrived_key(request, draw)), "answers of the rollout ranks")
        answers: Answers = run_on_rank_zero(lambda: self.take(answers_key(request, draw)))
        del self.pending[draw]
        return answers

    def take(self, key: str) -> Answers:
        found: Answers = self.link.get(key)
        self.link.delete(key)
        return found

    def wait_for(self, arrived: Callable[[], bool], what: str) -> None:
        phase.enter("rollout_wait")
        self.metrics["rollout_wait_s"] += self.link.wait(arrived, what, self.spec.watch.timeout_s)

    # --- checkpoints ----------------------------------------------------------------------------------------

    def finish_pending(self) -> None:
        """Wait for the answers under way and write them: the weights that sample them are not in the checkpoint."""
        self.ready |= {draw: self.receive(draw) for draw in list(self.pending)}
        run_on_rank_zero(self.save_ready)

    def save_ready(self) -> None:
        self.folder.mkdir(exist_ok=True)
        for draw, answers in self.ready.items():
            save_round(self.path(draw), draw, answers.rollouts)
        needed = {self.path(draw) for path in committed(self.folder.parent / "checkpoints") for draw in ready_of(path)}
        recent = self.path(self.first_draw(max(0, self.number - KEPT_ROUNDS)))
        for old in self.folder.glob("ahead-*.npz"):
            if old < recent and old not in needed:
                old.unlink()

    def path(self, draw: int) -> Path:
        return self.folder / f"ahead-{draw:06d}.npz"

    def state_dict(self) -> dict[str, Any]:
        return {"ready": sorted(self.ready)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for draw in list(self.pending):  # of rounds that a rewind takes back
            self.receive(draw)
        self.version = UNKNOWN
        self.ready = run_on_all_ranks(lambda: {draw: Answers(load_round(self.path(draw))) for draw in state["ready"]})

    def close(self) -> None:
        """The rollout ranks end with the run (`RolloutLink.ending`)."""
