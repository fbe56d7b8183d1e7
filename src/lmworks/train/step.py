"""One optimizer step: the forward and backward passes of a global batch, one exchange of figures, the update.

The update is launched before the host has read the figures (step_scalars.py), and so are the passes of the next step
(async_step.py): a GPU never waits for its host.
`Stepper` is what a step needs and nothing of the loop around it: the trainer is one, and so is a simulated rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..data import Batch, Batches
from ..model import GPT
from ..model.moe import expert_load
from ..parallel.deepspeed import DeepSpeedEngine
from ..parallel.grad_norm import squared_norm
from ..parallel.mesh import Mesh
from ..parallel.parallel_model import ParallelModel
from ..parallel.precision import LossScale
from ..record import MetricsWriter, RunFolder, phase
from ..spec import RunSpec
from .async_step import Failed, Started, look_ahead, regain, started
from .device import PeakMemory
from .health.bad_step import Health
from .health.bad_step_recovery import Passed, face, tell
from .health.stats import BlockStats
from .optim import learning_rate
from .signals import StopSignals
from .step_scalars import Gate, Reader, make_gate
from .watch import Watchdog


class Stepper:
    """A model laid over the ranks, with its optimizer, that can take a step."""

    spec: RunSpec
    device: torch.device
    mesh: Mesh | None
    folder: RunFolder
    lead: bool
    parallel_model: ParallelModel
    optimizer: torch.optim.Optimizer
    engine: DeepSpeedEngine | None
    loss_scale: LossScale
    health: Health
    reader: Reader
    batches: Batches
    memory: PeakMemory
    stop: StopSignals
    step: int  # optimizer steps taken
    cursor: int  # where the data stands: steps taken + windows skipped on purpose
    stop_asked: int  # the signal that any rank was sent
    attempt = 0  # at this run, counted from 0
    watchdog: Watchdog | None = None  # where there are others to wait for
    ahead: Started | Failed | None = None  # passes of the next step, under way

    @property
    def model(self) -> GPT:
        """The whole model, where one rank holds it."""
        (part,) = self.parallel_model.parts.values()
        return part

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        if self.lead:
            self.folder.event(kind, self.step if step is None else step, **fields)

    def train_step(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """One optimizer step over the micro-batches of a global batch; passes of `following` are left under way."""
        began = time.perf_counter()
        if self.engine is not None:
            return self.engine_step(self.engine, batches, self.count_tokens(batches), began)
        now = started(self, batches)
        launching = time.perf_counter()
        gate = self.gate(now.sums, now.tokens)
        early = now.stats is None  # statistics compare with the weights from before, of a step that is surely taken
        if early:
            self.optimize(gate.divisor, gate.held)
        launched = time.perf_counter() - launching
        reading = time.perf_counter()
        then = self.following() if early else None
        data = time.perf_counter() - reading
        if then is not None:
            look_ahead(self, then)
        self.meanwhile()
        passed = self.read(gate)
        taken = early and not passed.held
        if not taken:
            passed = self.held(now, passed)
        computed = time.perf_counter()
        lr = self.rate()  # which an answer to trouble may have lowered
        self.update(passed, now.stats, taken)
        values = {"loss": passed.loss, "lr": lr, "grad_norm": passed.norm, "tokens": now.tokens, "data_s": data}
        values |= {"memory_bytes": passed.memory}
        values["forward_backward_s"] = computed - began - launched - data
        values["optimizer_s"] = time.perf_counter() - computed + launched
        if self.loss_scale.enabled:
            values |= {"loss_scale": passed.scale, "overflows": self.health.memory.overflows}
        if self.watchdog is not None:
            values["step_skew"] = self.watchdog.skew.largest
        if self.spec.model.experts:  # the busiest expert's tokens over the mean, of the layers that are here
            values["expert_load"] = max(expert_load(part) for part in self.parallel_model.parts.values())
        return values

    def following(self) -> Sequence[Batch] | None:
        """What the step after this one trains on, where its passes need not wait for this one's figures."""
        return None

    def held(self, now: Started, passed: Passed) -> Passed:
        """The device has held the update back: the passes to make it with all the same, or NotTaken, or an error."""

        def again() -> Passed:
            return self.read(self.gate(self.passes(now.batches, now.tokens), now.tokens))

        if self.ahead is not None:
            passed = regain(self, now, passed, again)
        troubles = self.health.judge(passed.loss, passed.norm, self.loss_scale.scale > 1)
        return face(self, troubles, passed, again, now.drawn) if troubles else passed

    def is_due(self, every: int) -> bool:
        """Whether the step being taken is one of every so many."""
        return every > 0 and (self.step + 1) % every == 0

    def meanwhile(self) -> None:
        """What the host can do while the device computes; the trainer reads the next batch."""

    def passes(self, batches: Sequence[Batch], tokens: int) -> Tensor:
        """Forward and backward of all micro-batches, and what the ranks have to know of each other's."""
        loss_sum = self.parallel_model.forward_backward(batches, self.loss_scale.scale / max(1, tokens))
        phase.enter("reduce")
        self.parallel_model.finish()
        return self.sum_over_ranks(loss_sum, squared_norm(self.parallel_model.shards, self.parallel_model.replicas))

    def gate(self, sums: Tensor, tokens: int) -> Gate:
        """Have the device compare with health's limits; the figures are on their way to the host then."""
        clip, home = self.spec.optim.clip, self.parallel_model.shards[0].leaf.device
        gate, figures = make_gate(sums, tokens, self.loss_scale.scale, clip, self.health.limits(), home)
        self.reader.start(torch.cat([figures, sums[2:]]))
        return gate

    def read(self, gate: Gate) -> Passed:
        """Wait for the figures of the passes, not for the update behind them."""
        loss, norm, held, *said = self.reader.finish()
        return Passed(loss, norm, self.loss_scale.scale, self.hear(said), bool(held), gate.divisor)

    def rate(self) -> float:
        """The learning rate of the step being taken."""
        return learning_rate(self.spec.optim, self.step) * self.health.factor(self.step)

    def optimize(self, divisor: Tensor | None, held: Tensor | None = None) -> None:
        """Launch the update of the weights; it does nothing where `held` is 1."""
        phase.enter("optimizer", self.step + 1)
        rate = self.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for name, given in (("grad_scale", divisor), ("found_inf", held)):  # as torch.amp.GradScaler does it
            setattr(self.optimizer, name, given)
        self.optimizer.step()
        for name in ("grad_scale", "found_inf"):
            setattr(self.optimizer, name, None)  # who else steps it means what the gradients say

    def update(self, passed: Passed, stats: BlockStats | None, taken: bool) -> None:
        """All that a step changes, less what the device has done already (`taken`)."""
        overflow = not math.isfinite(passed.norm)  # of fp16: the weights are left alone, and the scale is halved
        if stats is not None:
            stats.before_update(passed.scale)
        if not overflow:
            if not taken:
                self.optimize(passed.divisor)
            if self.ahead is None:
                self.parallel_model.after_step()
        if stats is not None:
            self.write_stats(stats)
        self.loss_scale.update(passed.norm)
        if self.ahead is None:  # else the gradients are those of the next step
            self.parallel_model.clear()
        self.health.accept(passed.loss, passed.norm)
        if overflow:
            self.event("overflow", self.step + 1, loss_scale=passed.scale, next_scale=self.loss_scale.scale)

    def write_stats(self, stats: BlockStats) -> None:
        stats.after_update()
        parts = stats.collect()
        if self.lead:
            with MetricsWriter(self.folder.stats_path, self.attempt) as lines:
                lines.write(self.step + 1, {"parts": parts})

    def engine_step(
        self, engine: DeepSpeedEngine, batches: Sequence[Batch], tokens: int, began: float
    ) -> dict[str, Any]:
        """The same step where DeepSpeed owns the backward pass, the reduction and the update."""
        loss_sum = torch.zeros((), device=self.device)
        for index, batch in enumerate(batches):
            with engine.micro_batch(last=index == len(batches) - 1):
                _, loss = engine(**self.parallel_model.inputs(batch))
                engine.backward(loss / max(1, tokens))
            loss_sum += loss.detach()
        total, _, *said = self.sum_over_ranks(loss_sum, torch.zeros((), device=self.device)).tolist()
        loss_mean, memory = total / max(1, tokens), self.hear(said)
        if not math.isfinite(loss_mean):
            passed = Passed(loss_mean, math.nan, engine.loss_scale, memory)
            face(self, self.health.judge(loss_mean, math.nan, scaled=False), passed)
        computed = time.perf_counter()
        lr, scale = learning_rate(self.spec.optim, self.step), engine.loss_scale
        norm = engine.step(lr)
        for trouble in self.health.judge(loss_mean, norm, scaled=True):  # its step cannot be undone
            tell(self, trouble)
        self.health.accept(loss_mean, norm)
        if not math.isfinite(norm):
            self.event("overflow", self.step + 1, loss_scale=scale, next_scale=engine.loss_scale)
        values = {"loss": loss_mean, "lr": lr, "grad_norm": norm, "tokens": tokens, "memory_bytes": memory}
        values |= {"forward_backward_s": computed - began, "optimizer_s": time.perf_counter() - computed}
        return values | ({"loss_scale": scale} if self.loss_scale.enabled else {})

    def count_tokens(self, batches: Sequence[Batch]) -> int:
        """Targets of the global batch that count. Only document masks leave any out."""
        if not self.spec.data.document_mask:
            return self.spec.tokens_per_step
        counted = sum(batch.count() for batch in batches)
        if self.mesh is None:
            return counted
        total = torch.tensor(counted)  # between hosts, who know it: a GPU would be waited for
        dist.all_reduce(total, group=self.mesh.group("dp"))
        return int(total)

    def sum_over_ranks(self, loss: Tensor, squares: Tensor) -> Tensor:
        """The whole loss and squared norm, and what every rank says of itself, in one exchange; fp64.

        A signal that one rank was sent travels along, so that all of them stop after the same step; its memory; and how
        busy each of them is, by which a slow one is found.
        """
        figures = torch.stack([figure.to(self.device, torch.float64).squeeze() for figure in (loss, squares)])
        if self.mesh is None:
            return figures
        ranks = torch.zeros(3, self.mesh.size("world"), dtype=torch.float64, device=self.device)
        mine = self.asked(), self.memory.read(), 1.0 if self.watchdog is None else self.watchdog.busy
        for row, value in zip(ranks, mine, strict=True):
            row[self.mesh.rank("world")].fill_(value)  # an argument of a kernel: for a copy the host would wait
        figures = torch.cat([figures, ranks.flatten()])
        dist.all_reduce(figures)
        return figures

    def hear(self, said: list[float]) -> int:
        """What the ranks said of themselves: whether to stop, who is slow. Returns the largest memory of any."""
        if self.mesh is None:
            self.stop_asked = self.asked()
            return self.memory.read()
        world = len(said) // 3
        self.stop_asked = int(max(said[:world]))
        if self.watchdog is not None:
            self.watchdog.compare(said[2 * world :], self.step + 1)
        return int(max(said[world : 2 * world]))

    def asked(self) -> int:
        return self.stop.signal if hasattr(self, "stop") else 0
