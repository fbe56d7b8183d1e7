"""One optimizer step: forward and backward passes over a global batch, one all-reduce of scalars, the update.

The update is launched before the host has read the scalars (step_scalars.py), and so are the passes of the next step
(async_step.py): a GPU never waits for its host.
`Stepper` has what a step needs, without the loop around it: the trainer is one, and so is a simulated rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..data import Batch
from ..data.loader import BatchSource
from ..model import GPT
from ..model.moe import expert_load
from ..parallel.deepspeed import DeepSpeedEngine
from ..parallel.mesh import Mesh
from ..parallel.parallel_model import ParallelModel
from ..parallel.precision import LossScale
from ..record import MetricsWriter, RunFolder, phase
from ..spec import RunSpec
from .async_step import Counts, LaunchedPasses, PassLauncher, recompute_gradients
from .device import PeakMemory
from .health.bad_step import Health
from .health.bad_step_recovery import BadStepRecovery, PassResult
from .health.stats import BlockStats
from .objective import Objective
from .optim import learning_rate, set_learning_rate
from .profile import Profiler
from .rng import rng_state
from .signals import StopSignals
from .step_scalars import ScalarReader, UpdateGate, make_gate, squared_norm
from .train_state import EventRecorder, Position
from .watch import Watchdog

PROFILE_REQUEST = 256  # beside a stop signal, which is smaller: rank 0 has found a request to profile


class Stepper:
    """A parallel model with its optimizer, that can take a training step."""

    spec: RunSpec
    device: torch.device
    mesh: Mesh | None
    folder: RunFolder
    is_rank_zero: bool
    parallel_model: ParallelModel
    optimizer: torch.optim.Optimizer
    engine: DeepSpeedEngine | None
    loss_scale: LossScale
    health: Health
    reader: ScalarReader
    launcher: PassLauncher
    recovery: BadStepRecovery
    recorder: EventRecorder
    objective: Objective
    batches: BatchSource
    memory: PeakMemory
    stop: StopSignals
    step: int  # optimizer steps taken
    cursor: int  # position in the data: steps taken + batches skipped on purpose
    stop_signal: int  # received by any rank; 0: none
    attempt = 0  # at this run, counted from 0
    watchdog: Watchdog | None = None  # with more than one rank
    profiler: Profiler | None = None  # of a run

    @property
    def model(self) -> GPT:
        """The whole model, if one rank holds it."""
        (part,) = self.parallel_model.parts.values()
        return part

    @property
    def position(self) -> Position:
        return Position(self.step, self.cursor)

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        return None if self.mesh is None else self.mesh.group("dp")

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        self.recorder.event(kind, self.step if step is None else step, **fields)

    def train_step(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """One optimizer step over the micro-batches of a global batch; the passes of `next_batches` stay pending."""
        began = time.perf_counter()
        if self.engine is not None:
            return self.engine_step(self.engine, batches, self.count(batches).tokens, began)
        launched = self.launcher.take(batches)
        passes_launched = time.perf_counter()
        gate = self.gate(launched.sums, launched.counts)
        early = launched.stats is None  # statistics need the weights from before the update, of a step that is taken
        if early:
            self.optimize(gate.grad_divisor, gate.skip)
        update_launched = time.perf_counter()
        next_batches = self.next_batches() if early else None
        data_read = time.perf_counter()
        if next_batches is not None:
            if self.profiler is not None:
                self.profiler.name_step(self.step + 2)
            self.launcher.launch_next(next_batches)
            phase.enter("optimizer", self.step + 1)  # what the host waits for
        self.prefetch_next()
        result = self.read(gate)
        updated = early and not result.update_skipped
        if not updated:
            result = self.handle_skipped_update(launched, result)
        computed = time.perf_counter()
        lr = self.learning_rate()  # a recovery may have lowered it
        self.settle(result, launched.stats, updated)
        launch_s, data_s = update_launched - passes_launched, data_read - update_launched
        tokens = launched.counts.tokens
        values = {"loss": result.loss, "lr": lr, "grad_norm": result.norm, "tokens": tokens, "data_s": data_s}
        values |= {"memory_bytes": result.memory}
        values["forward_backward_s"] = computed - began - launch_s - data_s
        values["optimizer_s"] = time.perf_counter() - computed + launch_s
        if self.loss_scale.enabled:
            values |= {"loss_scale": result.scale, "overflows": self.health.state.overflows}
        if self.watchdog is not None:
            values["step_skew"] = self.watchdog.skew.largest
        if self.spec.model.experts:  # the busiest expert's tokens over the mean, of this rank's layers
            values["expert_load"] = max(expert_load(part) for part in self.parallel_model.parts.values())
        return values | self.objective.metrics(self.dp_group)

    def next_batches(self) -> Sequence[Batch] | None:
        """The batches of the next step, if its passes may be launched before this step's scalars are read."""
        return None

    def prefetch_next(self) -> None:
        """Host work while the device computes; the trainer reads the next batch."""

    def launch_passes(self, batches: Sequence[Batch]) -> LaunchedPasses:
        # The loss is a mean over the units (tokens) of the global batch, so every micro-batch on every rank is divided
        # by that count, not by its own: uneven micro-batches are weighted by their units.
        counts = self.count(batches)
        rng_before = rng_state() if self.spec.health.rerun else None
        every = self.spec.health.stats_every
        stats = BlockStats(self.parallel_model) if every and (self.step + 1) % every == 0 else None
        with stats or nullcontext():
            return LaunchedPasses(batches, counts, self.forward_backward(batches, counts), rng_before, stats)

    def forward_backward(self, batches: Sequence[Batch], counts: Counts) -> Tensor:
        """Forward and backward of all micro-batches; returns the scalars of the step, summed over ranks."""
        self.objective.reset_metrics()
        self.objective.before_passes(self.parallel_model.forward, batches, self.dp_group)
        scale = self.loss_scale.scale
        loss_sum = self.parallel_model.forward_backward(
            batches, scale / max(1, counts.units), self.objective.loss, scale / max(1, counts.tokens)
        )
        phase.enter("reduce")
        self.parallel_model.finish()
        return self.reduce_scalars(loss_sum, squared_norm(self.parallel_model.shards, self.parallel_model.replicas))

    def gate(self, sums: Tensor, counts: Counts) -> UpdateGate:
        """Compare with health's limits on the device, and start to copy the scalars to the host."""
        clip, weight_device = self.spec.optim.clip, self.parallel_model.shards[0].leaf.device
        gate, scalars = make_gate(sums, counts.units, self.loss_scale.scale, clip, self.health.limits(), weight_device)
        self.reader.start(torch.cat([scalars, sums[2:]]))
        return gate

    def read(self, gate: UpdateGate) -> PassResult:
        """Wait for the scalars of the passes, not for the update queued behind them."""
        loss, norm, skip, *rank_scalars = self.reader.finish()
        memory = self.read_rank_scalars(rank_scalars)
        return PassResult(loss, norm, self.loss_scale.scale, memory, bool(skip), gate.grad_divisor)

    def handle_skipped_update(self, launched: LaunchedPasses, result: PassResult) -> PassResult:
        """The device has skipped the update: the result to make it with after all, or StepRejected, or an error."""

        def rerun() -> PassResult:
            return self.read(self.gate(self.forward_backward(launched.batches, launched.counts), launched.counts))

        if self.launcher.pending is not None:
            self.launcher.discard()
            result = recompute_gradients(launched, result, rerun)
        issues = self.health.check_step(result.loss, result.norm, self.loss_scale.scale > 1)
        return self.recovery.recover(self.position, issues, result, rerun, launched.rng_before) if issues else result

    def learning_rate(self) -> float:
        """Of the current step."""
        return learning_rate(self.spec.optim, self.step) * self.health.lr_multiplier(self.step)

    def optimize(self, grad_divisor: Tensor | None, skip: Tensor | None = None) -> None:
        """Launch the update of the weights; it changes nothing if `skip` is 1."""
        phase.enter("optimizer", self.step + 1)
        set_learning_rate(self.optimizer, self.learning_rate())
        for name, value in (("grad_scale", grad_divisor), ("found_inf", skip)):  # as torch.amp.GradScaler does
            setattr(self.optimizer, name, value)
        self.optimizer.step()
        for name in ("grad_scale", "found_inf"):
            setattr(self.optimizer, name, None)  # for any other caller of optimizer.step

    def settle(self, result: PassResult, stats: BlockStats | None, updated: bool) -> None:
        """Update what a step changes; `updated`: the device has updated the weights already."""
        overflow = not math.isfinite(result.norm)  # of fp16: weights stay, the loss scale is halved
        if stats is not None:
            stats.before_update(result.scale)
        if not overflow:
            if not updated:
                self.optimize(result.grad_divisor)
            if self.launcher.pending is None:
                self.parallel_model.after_step()
        if stats is not None:
            self.write_stats(stats)
        self.loss_scale.update(result.norm)
        if self.launcher.pending is None:  # otherwise the gradients are those of the next step
            self.parallel_model.zero_grad()
        self.health.record_step(result.loss, result.norm)
        if overflow:
            self.event("overflow", self.step + 1, loss_scale=result.scale, next_scale=self.loss_scale.scale)

    def write_stats(self, stats: BlockStats) -> None:
        stats.after_update()
        parts = stats.collect()
        if self.is_rank_zero:
            with MetricsWriter(self.folder.stats_path, self.attempt) as lines:
                lines.write(self.step + 1, {"parts": parts})

    def engine_step(
        self, engine: DeepSpeedEngine, batches: Sequence[Batch], tokens: int, began: float
    ) -> dict[str, Any]:
        """The same step with DeepSpeed, which owns the backward pass, the reduction and the update."""
        loss_sum = torch.zeros((), device=self.device)
        for index, batch in enumerate(batches):
            with engine.micro_batch(last=index == len(batches) - 1):
                _, loss = engine(**self.parallel_model.inputs(batch))
                engine.backward(loss / max(1, tokens))
            loss_sum += loss.detach()
        total, _, *rank_scalars = self.reduce_scalars(loss_sum, torch.zeros((), device=self.device)).tolist()
        loss_mean, memory = total / max(1, tokens), self.read_rank_scalars(rank_scalars)
        if not math.isfinite(loss_mean):
            result = PassResult(loss_mean, math.nan, engine.loss_scale, memory)
            self.recovery.recover(self.position, self.health.check_step(loss_mean, math.nan, scaled=False), result)
        computed = time.perf_counter()
        lr, scale = learning_rate(self.spec.optim, self.step), engine.loss_scale
        norm = engine.step(lr)
        for issue in self.health.check_step(loss_mean, norm, scaled=True):  # DeepSpeed's update cannot be undone
            self.recovery.record_issue(self.position, issue)
        self.health.record_step(loss_mean, norm)
        if not math.isfinite(norm):
            self.event("overflow", self.step + 1, loss_scale=scale, next_scale=engine.loss_scale)
        values = {"loss": loss_mean, "lr": lr, "grad_norm": norm, "tokens": tokens, "memory_bytes": memory}
        values |= {"forward_backward_s": computed - began, "optimizer_s": time.perf_counter() - computed}
        return values | ({"loss_scale": scale} if self.loss_scale.enabled else {})

    def count(self, batches: Sequence[Batch]) -> Counts:
        """Of the global batch: targets that count, which only masks reduce, and units of the loss."""
        spec = self.spec
        if not spec.data.masks_targets:
            return Counts(spec.tokens_per_step, spec.tokens_per_step)
        counters = [Batch.count] if self.objective.unit == "token" else [Batch.count, self.objective.units]
        counted = [sum(map(counter, batches)) for counter in counters]
        if self.mesh is not None:
            totals = torch.tensor(counted)  # on the CPU, where they are known: no GPU synchronisation
            dist.all_reduce(totals, group=self.mesh.group("dp"))
            counted = totals.tolist()
        return Counts(tokens=counted[0], units=counted[-1])

    def reduce_scalars(self, loss: Tensor, squares: Tensor) -> Tensor:
        """All-reduce loss and squared norm together with the scalars of every rank; fp64.

        Those are signals, so that all ranks stop after the same step, or profile the same ones; the peak memory; and
        the busy share, which shows stragglers.
        """
        sums = torch.stack([one.to(self.device, torch.float64).squeeze() for one in (loss, squares)])
        if self.mesh is None:
            return sums
        ranks = torch.zeros(3, self.mesh.size("world"), dtype=torch.float64, device=self.device)
        mine = self.local_signals(), self.memory.read(), 1.0 if self.watchdog is None else self.watchdog.busy
        for row, value in zip(ranks, mine, strict=True):
            row[self.mesh.rank("world")].fill_(value)  # a kernel argument: a copy would block the host
        sums = torch.cat([sums, ranks.flatten()])
        dist.all_reduce(sums)
        return sums

    def read_rank_scalars(self, rank_scalars: list[float]) -> int:
        """Signals, stragglers; returns the largest peak memory of any rank."""
        if self.mesh is None:
            self.handle_signals([self.local_signals()])
            return self.memory.read()
        world = len(rank_scalars) // 3
        self.handle_signals([int(signals) for signals in rank_scalars[:world]])
        if self.watchdog is not None:
            self.watchdog.compare(rank_scalars[2 * world :], self.step + 1)
        return int(max(rank_scalars[world : 2 * world]))

    def local_signals(self) -> int:
        """Of this rank: a stop signal, and whether it has found a request to profile."""
        profile = self.profiler is not None and self.profiler.finds_request()
        return self.local_stop_signal() + (PROFILE_REQUEST if profile else 0)

    def local_stop_signal(self) -> int:
        return self.stop.signal if hasattr(self, "stop") else 0

    def handle_signals(self, signals: list[int]) -> None:
        self.stop_signal = max(signal % PROFILE_REQUEST for signal in signals)
        if self.profiler is not None and max(signals) >= PROFILE_REQUEST:
            self.profiler.announce(self.step + 1)
