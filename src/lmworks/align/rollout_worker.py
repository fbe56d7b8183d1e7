"""A rollout rank: an engine that samples what the trainer orders, with the weights that the trainer broadcasts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ..data.chat_template import TOKENIZER_FOLDER
from ..data.chat_tokenizer import end_token_ids
from ..parallel.preflight import check_fits_memory, check_gpu_available
from ..parallel.world import root_cause, run_on_all_ranks
from ..record import RunFolder, phase
from ..spec import LMWorksError, RunSpec
from ..spec.files import with_absolute_paths
from ..train.device import make_deterministic, on_device, pick_device
from .environments import load_environment
from .prompts import open_prompts
from .remote_sampler import END_OF_WEIGHTS, HELD_OUT_DRAW, Answers, SampleRequest, answers_key, arrived_key, wire_format
from .rewards import load_rewards
from .rollout_engine import RolloutEngine
from .rollout_link import END, ENDED, READY, RolloutLink
from .sampler import HELD_OUT, EngineSampler


class RolloutWorker:
    """Started as a trainer is: `RolloutWorker(spec, run_dir).run()`. It writes nothing of the run folder."""

    is_rank_zero = False

    def __init__(self, spec: RunSpec, run_dir: str | Path, force: bool = False, **_options: Any) -> None:
        self.force = force  # without the memory check
        self.spec, self.folder = with_absolute_paths(spec), RunFolder(Path(run_dir))
        check_gpu_available(spec.cluster)
        self.device = pick_device(spec.cluster)
        if spec.deterministic:
            make_deterministic()
        align = spec.align
        self.link = RolloutLink(spec.parallel.world, align.rollout_ranks, self.device, spec.watch.timeout_s)

    @classmethod
    def resume(cls, run_dir: str | Path, *, device: str = "", force: bool = False, **_options: Any) -> Self:
        return cls(on_device(RunFolder.open(run_dir).spec(), device), run_dir, force)

    def run(self) -> None:
        """Until the trainer ends."""
        try:
            self.link.wait(lambda: self.link.has(READY) or self.link.has(END))
            if self.link.has(READY):
                # The trainer saves and ends after these signals, and needs the answers under way to save them.
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, lambda *_: None)
                self.build()
                self.serve()
            self.link.count(ENDED, 1)
        except Exception as error:
            cause = root_cause(error)
            self.link.fail(cause)
            if isinstance(cause, LMWorksError) and cause.collective and not cause.reported:
                cause.reported = dist.get_rank() > 0  # the first of the rollout ranks says what all of them raise
                cause.collective = False
            raise cause from error

    def build(self) -> None:
        spec = self.spec
        if self.device.type == "cuda" and not self.force:  # the memory of a CPU is that of all its ranks: checked there
            run_on_all_ranks(lambda: check_fits_memory(spec, self.device))
        prompts, held_out = run_on_all_ranks(lambda: open_prompts(spec))
        names = spec.align.rewards
        rewards = run_on_all_ranks(lambda: load_rewards(names, spec.align.reward_weights) if names else None)
        name = spec.align.environment
        environment = run_on_all_ranks(lambda: load_environment(name)[1] if name else None)
        ends = end_token_ids(self.folder.path / TOKENIZER_FOLDER)
        self.engine = RolloutEngine(spec, prompts.tokenizer, ends, self.device)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.sampler = EngineSampler(spec, self.engine, prompts, held_out, rewards, rank, ranks, environment)
        self.wire = list(wire_format(spec).items())
        self.loaded: set[str] = set()  # later updates may leave out weights that are frozen

    def serve(self) -> None:
        link, number = self.link, 0
        while True:
            link.count(f"idle/{number}", 1)
            phase.enter("rollout_wait")
            key = f"request/{number}"
            idle_s = link.wait(lambda key=key: link.has(key) or link.has(END))  # type: ignore[misc]
            if not link.has(key):
                return
            request: SampleRequest = link.get(key)
            if request.weights:
                self.load_weights()
            self.sampler.version = request.version
            for draw in request.draws:
                answers = self.answer(draw, idle_s)
                idle_s = 0.0
                if self.sampler.rank == 0:
                    link.put(answers_key(number, draw), answers)
                    link.put(arrived_key(number, draw), None)
            number += 1

    def answer(self, draw: int, idle_s: float) -> Answers:
        sampler, held_out = self.sampler, draw == HELD_OUT_DRAW
        sampler.generate_s = 0.0
        rollouts = sampler.answers(sampler.held_out, 0, HELD_OUT) if held_out else sampler.sample(draw)
        return Answers(rollouts, sampler.generate_s, idle_s)

    @torch.no_grad()
    def load_weights(self) -> None:
        phase.enter("hand_over")
        received: set[str] = set()
        self.engine.load(self.received(received), self.loaded)
        self.loaded |= received

    def received(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        index = torch.zeros(1, dtype=torch.int64)
        while True:
            self.link.broadcast(index)
            if int(index) == END_OF_WEIGHTS:
                return
            name, (shape, dtype) = self.wire[int(index)]
            weight = torch.empty(shape, dtype=dtype, device=self.device)
            self.link.broadcast(weight)
            names.add(name)
            yield name, weight
