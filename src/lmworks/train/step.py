"""One optimizer step: the forward and backward passes of a global batch, one exchange of figures, the update.

`Stepper` is what a step needs and nothing of the loop around it: the trainer is one, and so is a simulated rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ..data import Batch, Batches
from ..kernels.cross_entropy import IGNORE
from ..model import GPT
from ..model.moe import expert_load
from ..parallel.deepspeed import DeepSpeedEngine
from ..parallel.laid import Laid
from ..parallel.mesh import Mesh
from ..parallel.norms import squared_norm
from ..parallel.precision import LossScale
from ..record import MetricsWriter, RunFolder, phase
from ..spec import RunSpec
from .device import PeakMemory
from .health.face import Passed, face, tell
from .health.stats import BlockStats
from .health.watch import Health
from .optim import learning_rate
from .rng import rng_state
from .signals import StopSignals
from .watch import Watchdog


class Stepper:
    """A model laid over the ranks, with its optimizer, that can take a step."""

    spec: RunSpec
    device: torch.device
    mesh: Mesh | None
    folder: RunFolder
    lead: bool
    laid: Laid
    optimizer: torch.optim.Optimizer
    engine: DeepSpeedEngine | None
    loss_scale: LossScale
    health: Health
    batches: Batches
    memory: PeakMemory
    stop: StopSignals
    step: int  # optimizer steps taken
    cursor: int  # where the data stands: steps taken + windows skipped on purpose
    stop_asked: int  # the signal that any rank was sent
    attempt = 0  # at this run, counted from 0
    watchdog: Watchdog | None = None  # where there are others to wait for

    @property
    def model(self) -> GPT:
        """The whole model, where one rank holds it."""
        (part,) = self.laid.parts.values()
        return part

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        if self.lead:
            self.folder.event(kind, self.step if step is None else step, **fields)

    def train_step(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """One optimizer step over the micro-batches of a global batch."""
        began = time.perf_counter()
        # The loss is a mean over the tokens of the global batch, so every micro-batch on every rank is divided by that
        # count, not by its own: uneven ones then weigh as their tokens do.
        tokens = self.count_tokens(batches)
        if self.engine is not None:
            return self.engine_step(self.engine, batches, tokens, began)
        drawn = rng_state() if self.spec.health.rerun else None
        stats = BlockStats(self.laid) if self.is_due(self.spec.health.stats_every) else None
        with stats or nullcontext():
            passed = self.passes(batches, tokens)
        if troubles := self.health.judge(passed.loss, passed.norm, self.loss_scale.scale > 1):
            passed = face(self, troubles, passed, lambda: self.passes(batches, tokens), drawn)
        computed = time.perf_counter()
        lr = self.update(passed, stats)
        values = {"loss": passed.loss, "lr": lr, "grad_norm": passed.norm, "tokens": tokens}
        values |= {"memory_bytes": passed.memory}
        values |= {"forward_backward_s": computed - began, "optimizer_s": time.perf_counter() - computed}
        if self.loss_scale.enabled:
            values |= {"loss_scale": passed.scale, "overflows": self.health.memory.overflows}
        if self.watchdog is not None:
            values["step_skew"] = self.watchdog.skew.largest
        if self.spec.model.experts:  # the busiest expert's tokens over the mean, of the layers that are here
            values["expert_load"] = max(expert_load(part) for part in self.laid.parts.values())
        return values

    def is_due(self, every: int) -> bool:
        """Whether the step being taken is one of every so many."""
        return every > 0 and (self.step + 1) % every == 0

    def passes(self, batches: Sequence[Batch], tokens: int) -> Passed:
        """Forward and backward of all micro-batches, and what the ranks have to know of each other's."""
        scale = self.loss_scale.scale
        loss_sum = self.laid.forward_backward(batches, scale / max(1, tokens))
        phase.enter("reduce")
        self.laid.finish()
        squares = squared_norm(self.laid.shards, self.laid.replicas)
        loss_total, squares_total, memory = self.sum_over_ranks(loss_sum, squares)
        return Passed(
            loss_total / max(1, tokens), math.sqrt(squares_total) / scale, scale, memory
        )  # of a NaN it is one

    def update(self, passed: Passed, stats: BlockStats | None) -> float:
        """Let the optimizer move the weights; returns the learning rate."""
        phase.enter("optimizer")
        lr = learning_rate(self.spec.optim, self.step) * self.health.factor(self.step)
        overflow = not math.isfinite(passed.norm)  # of fp16: the weights are left alone, and the scale is halved
        if stats is not None:
            stats.before_update(passed.scale)
        if not overflow:
            self.scale_gradients(passed.norm, passed.scale)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.laid.after_step()
        if stats is not None:
            self.write_stats(stats)
        self.loss_scale.update(passed.norm)
        self.laid.clear()
        self.health.accept(passed.loss, passed.norm)
        if overflow:
            self.event("overflow", self.step + 1, loss_scale=passed.scale, next_scale=self.loss_scale.scale)
        return lr

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
                _, loss = engine(**self.laid.inputs(batch))
                engine.backward(loss / max(1, tokens))
            loss_sum += loss.detach()
        total, _, memory = self.sum_over_ranks(loss_sum, torch.zeros((), device=self.device))
        loss_mean = total / max(1, tokens)
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
        counted = sum(int((batch.targets != IGNORE).sum()) for batch in batches)
        if self.mesh is None:
            return counted
        total = torch.tensor(counted, device=self.device)
        dist.all_reduce(total, group=self.mesh.group("dp"))
        return int(total)

    def sum_over_ranks(self, loss: torch.Tensor, squares: torch.Tensor) -> tuple[float, float, int]:
        """The whole loss and squared norm, and the largest memory of any rank, in one exchange.

        A signal that one rank was sent travels along, so that all of them stop after the same step; and how busy each
        of them is, by which a slow one is found.
        """
        figures = torch.stack([figure.to(self.device, torch.float64).squeeze() for figure in (loss, squares)])
        if self.mesh is None:
            self.stop_asked = self.asked()
            return *figures.tolist(), self.memory.read()
        ranks = torch.zeros(3, self.mesh.size("world"), dtype=torch.float64, device=self.device)
        mine = self.asked(), self.memory.read(), 1.0 if self.watchdog is None else self.watchdog.busy
        ranks[:, self.mesh.rank("world")] = torch.tensor(mine, dtype=torch.float64)
        figures = torch.cat([figures, ranks.flatten()])
        dist.all_reduce(figures)
        total, squared, *rest = figures.tolist()
        world = len(rest) // 3
        self.stop_asked = int(max(rest[:world]))
        if self.watchdog is not None:
            self.watchdog.compare(rest[2 * world :], self.step + 1)
        return total, squared, int(max(rest[world : 2 * world]))

    def asked(self) -> int:
        return self.stop.signal if hasattr(self, "stop") else 0

    def scale_gradients(self, norm: float, scale: float) -> None:
        """Undo the loss scale, and clip."""
        clip = self.spec.optim.clip
        factor = (min(1.0, clip / (norm + 1e-6)) if clip else 1.0) / scale
        gradients = [shard.leaf.grad for shard in self.laid.shards if shard.leaf.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
