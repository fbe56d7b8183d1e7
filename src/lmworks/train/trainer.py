"""The training loop: read a spec, run its steps, write a run folder.

Every rank runs this loop; rank 0 prints and writes the run folder. A run can be resumed at any step. A step is a
function of (spec, step, cursor) and the state in the last checkpoint, so a run that was killed and resumed ends
bitwise like one that never stopped.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any, Self, cast

from ..checkpoint.format.digest import new_hash
from ..checkpoint.format.folders import newest_step
from ..checkpoint.format.remote import check_empty
from ..data import Batch, console_progress, open_batches
from ..data.loader import BatchSource
from ..data.pipeline import check_vocabulary
from ..data.progress import activity, silent
from ..parallel.data_parallel import DataParallel
from ..parallel.deepspeed import DeepSpeedEngine
from ..parallel.initial_weights import changed_keys, source_of
from ..parallel.parallel_model import ParallelModel
from ..parallel.parallelize import parallelize
from ..parallel.precision import LossScale
from ..parallel.preflight import check_gpu_available, check_requirements
from ..parallel.world import (
    collective_error,
    init_distributed,
    is_rank_zero,
    root_cause,
    run_on_all_ranks,
    run_on_rank_zero,
)
from ..plan.devices.machine import Machine
from ..plan.flops import run_flops_per_token
from ..plan.predict import predict
from ..plan.reprice import dollars_an_hour, seconds_to_come
from ..plan.step.op_prices import op_prices
from ..record import MetricsWriter, RunFolder, phase
from ..spec import LMWorksError, RunSpec, SpecError, catalogue
from ..spec.files import check_writable, with_absolute_paths, write_whole
from ..spec.lora import ScalarAdapter
from .async_step import PassLauncher, is_sync_point, supports_async_step
from .base_model import base_weights, find_base
from .checkpoint_manager import CheckpointManager
from .device import PeakMemory, find_gpu, make_deterministic, on_device, pick_device, warn_slow_bf16, with_gpu_name
from .evaluate import Evaluation, evaluate, evaluation_passes, held_out, loss_by_position
from .health.bad_step import Health, StepRejected
from .health.bad_step_recovery import BadStepRecovery, rewind
from .health.nonfinite import check_state
from .health.replicas import check_replicas
from .objective import Objective
from .oom import describe_oom, with_oom_report
from .optim import make_optimizer
from .prefetcher import BatchStream, Prefetcher
from .profile import Profiler, nvtx_ranges
from .progress import Progress, banner, name_device
from .reprice import Repricer
from .restart import (
    SkippedBatches,
    fit_to_world_size,
    has_rewound,
    layout_fields,
    lock_timeout_s,
    record_restart,
    resume_step,
)
from .rng import seed_everything
from .signals import Interrupted, StopSignals
from .sinks import Sink, open_sinks
from .step import Stepper
from .step_scalars import ScalarReader
from .train_state import EventRecorder, TrainState, skip_data
from .watch import run_watchdog


class Trainer(Stepper):
    """`Trainer(spec, run_dir).run()` starts a run, `Trainer.resume(run_dir).run()` resumes one."""

    held_out: BatchSource
    profiler: Profiler
    prefetcher: BatchStream | None = None  # while the loop runs
    resume_from: int | None = None  # the step to resume from, if the user chose one
    until: int | None = None  # pause after this step, with a checkpoint and an evaluation
    start_step: int | None = None  # at which this attempt began
    whole: RunSpec  # all stages of the run; `spec` is the one that is trained
    scalar_adapters: tuple[ScalarAdapter, ...] = ()  # over the base of the model, beside the one that is trained

    def __init__(
        self,
        spec: RunSpec,
        run_dir: str | Path,
        *,
        machine: Machine | None = None,
        quiet: bool = False,
        force: bool = False,  # even if it does not fit into memory
    ) -> None:
        self.force = force
        self.init_ranks(spec, quiet)
        run_on_rank_zero(RunFolder(Path(run_dir)).check_unused)  # before data are prepared
        run_on_rank_zero(lambda: check_writable(Path(run_dir), "--run-dir"))
        run_on_rank_zero(lambda: check_empty(spec.checkpoint.remote))
        self.preflight(force)
        # The spec as it was written, whatever world size was started.
        self.folder = RunFolder(Path(run_dir))
        run_on_rank_zero(lambda: self.create_folder(with_absolute_paths(spec), machine))

    def create_folder(self, spec: RunSpec, machine: Machine | None) -> None:
        """The run folder with the spec as it was written, and what the planner predicts for it."""
        create_run_folder(self.folder.path, spec, machine)

    @classmethod
    def resume(
        cls, run_dir: str | Path, *, step: int | None = None, quiet: bool = False, device: str = "", force: bool = False
    ) -> Self:
        """Resume a run from its newest intact checkpoint, or at step 0 without one.

        `step`: resume from that checkpoint; later ones are moved aside. `device`: overrides the spec.
        """
        folder = RunFolder.open(run_dir)
        trainer = cls.__new__(cls)
        trainer.force = force
        trainer.init_ranks(on_device(folder.spec(), device), quiet)
        trainer.resume_from = run_on_rank_zero(lambda: resume_step(folder, step))
        if trainer.whole.stages:
            trainer.set_stage(run_on_rank_zero(lambda: trainer.resume_from or newest_step(folder.checkpoints)))
        trainer.preflight(force)
        trainer.folder = folder
        return trainer

    def init_ranks(self, spec: RunSpec, quiet: bool) -> None:
        """Pick the device, fit the layout to the world size, create the process groups."""
        self.whole = with_absolute_paths(spec)
        check_gpu_available(spec.cluster)
        self.device = pick_device(spec.cluster)
        self.set_stage(0)
        self.is_rank_zero = is_rank_zero()
        self.quiet = quiet or not self.is_rank_zero

    def set_stage(self, step: int) -> None:
        """The stage that goes on after `step` steps, and the process groups of its layout."""
        self.stage = self.whole.stage_after(step)
        self.spec = with_gpu_name(fit_to_world_size(self.whole.after(step)), self.device)
        self.mesh = init_distributed(self.spec.parallel, self.device, self.spec.watch.timeout_s)

    def preflight(self, force: bool = False) -> None:
        """All checks that can fail, before a folder or file is written."""
        spec = self.spec
        if spec.deterministic:
            make_deterministic()
        run_on_all_ranks(lambda: check_requirements(spec, self.device, force))
        if spec.log.nvtx:
            run_on_all_ranks(lambda: nvtx_ranges(self.device))
        run_on_all_ranks(lambda: new_hash(spec.checkpoint.hash))
        self.base = base = run_on_rank_zero(lambda: find_base(spec)) if spec.adapters else None
        self.weights = run_on_all_ranks(lambda: source_of(spec, None if base is None else base_weights(spec, base)))
        if not self.quiet and (changed := changed_keys(spec)):
            print(changed, file=sys.stderr, flush=True)
        self.open_data()
        self.objective = self.make_objective()
        self.frozen: dict[str, ParallelModel] = {}  # models that are only evaluated, by name
        run_on_all_ranks(lambda: check_vocabulary(spec, self.batches.vocab_size))
        self.step = self.cursor = 0
        self.skipped_batches = SkippedBatches({})
        gpu = find_gpu(spec.cluster, self.device)
        self.peak_flops = gpu.peak_flops(spec.precision.dtype) if gpu else None

    def open_data(self) -> None:
        """`batches` of this rank, and `held_out`."""
        spec = self.spec
        run_on_rank_zero(self.prepare_data)
        rank, world = (0, 1) if self.mesh is None else (self.mesh.rank("dp"), self.mesh.size("dp"))
        init, seed = spec.checkpoint.init, spec.seed
        self.batches = run_on_all_ranks(lambda: open_batches(spec.data, init, seed=seed, rank=rank, world=world))
        self.held_out = run_on_all_ranks(lambda: held_out(spec))

    def prepare_data(self) -> None:
        """One rank creates the embedded corpus on first use, or encodes examples; the others read the result."""
        data, init = self.spec.data.with_derived("verify", False), self.spec.checkpoint.init
        with nullcontext(silent) if self.quiet else console_progress() as progress:
            open_batches(data, init, seed=self.spec.seed, progress=progress)

    def make_objective(self) -> Objective:
        """What a step minimises: next-token prediction."""
        return Objective()

    def build(self) -> None:
        """Model, optimizer and loss scale."""
        phase.enter("init")
        warn_slow_bf16(self.spec, self.device, self.quiet)
        self.memory = PeakMemory(self.device)
        seed_everything(self.spec.seed)
        self.parallel_model = run_on_all_ranks(
            lambda: with_oom_report(
                self.describe_oom,
                lambda: parallelize(
                    self.spec, self.mesh, self.device, self.weights, scalar_adapters=self.scalar_adapters
                ),
            )
        )
        self.optimizer = make_optimizer(
            self.parallel_model.shards, self.spec.model, self.spec.optim, self.spec.precision, self.spec.seed
        )
        self.engine = None
        if self.spec.parallel.engine == "deepspeed":  # it takes ownership of model and optimizer
            self.engine = run_on_all_ranks(lambda: DeepSpeedEngine(self.model, self.optimizer, self.spec))
            self.parallel_model.strategies = {0: cast(DataParallel, self.engine)}  # for evaluation
        self.loss_scale = LossScale(self.spec.precision)
        self.health = Health(self.spec.health)
        self.reader = ScalarReader(self.device)
        self.launcher = PassLauncher(self.parallel_model, self.launch_passes)
        self.stop_signal = 0
        self.recorder = EventRecorder(self.folder, self.is_rank_zero)
        self.recovery = BadStepRecovery(self.parallel_model, self.health, self.loss_scale, self.batches, self.recorder)
        self.train_state = TrainState(self.parallel_model, self.optimizer, self.engine)
        self.checkpoints = CheckpointManager(
            self.whole.replace(parallel=self.spec.parallel) if self.whole.stages else self.spec,
            self.train_state,
            self.loss_scale,
            self.health,
            self.batches.digest,
            self.recorder,
            self.device,
            self.base,
        )
        self.profiler = Profiler(self.spec, self.folder, self.device, self.parallel_model)

    def run(self) -> Evaluation:
        """Train to the last step, stage by stage, and return the final loss on held-out data."""
        while True:
            evaluation = self.run_stage()
            if self.whole.stage_after(self.step) == self.stage or self.is_at(self.until):
                return evaluation
            self.begin_stage()

    def begin_stage(self) -> None:
        """Go on as a resumed run would: from the checkpoint, with all else built anew."""
        for name in ("parallel_model", "optimizer", "engine", "train_state", "checkpoints", "launcher", "recovery"):
            delattr(self, name)  # their memory is needed before the next ones are built
        self.set_stage(self.step)
        self.resume_from = None
        self.preflight(self.force)

    def run_stage(self) -> Evaluation:
        """Train to the end of the stage, or of the run."""
        with ExitStack() as stack:
            self.stop = stack.enter_context(StopSignals(self.spec.fault.deadline_s))
            attempt, self.skipped_batches = run_on_rank_zero(lambda: self.lock_folder(stack))
            self.attempt = attempt
            self.watchdog = stack.enter_context(run_watchdog(self.spec.watch, self.folder, attempt, self.mesh))
            try:
                with activity() if not self.quiet else nullcontext(silent) as doing:
                    doing(f"building {self.spec.model.params:,} parameters on {name_device(self.device)}", 0, 0)
                    self.build()
                    stack.callback(self.checkpoints.close)
                    self.load(self.resume_from)
                if self.resume_from is not None:
                    self.checkpoints.set_aside_later(self.step, attempt, self.quiet)
            except Exception as error:
                cause = root_cause(self.describe_oom(error), self.watchdog)
                if cause is not error:
                    raise cause from error
                raise
            self.start_step = self.step
            if self.whole.stage_after(self.step) != self.stage:  # of a damaged checkpoint: an earlier one is in another
                return self.measure_held_out()
            if self.is_paused and not self.is_finished:  # by an earlier attempt
                if not any(event["kind"] == "pause" and event["step"] == self.step for event in self.folder.events()):
                    self.event("pause")  # it was stopped or killed between the checkpoint and this
                return self.measure_held_out()
            if self.is_finished:
                if not any(event["kind"] == "finish" for event in self.folder.events()):  # killed just before
                    self.event("finish")
                return self.measure_held_out()
            if attempt and not self.step and not self.quiet:
                print("no checkpoint yet: starting at step 0", flush=True)
            self.event("resume" if attempt else "start", attempt=attempt, **layout_fields(self.spec))
            self.stop.defer_to_step_end()
            with ExitStack() as writers:
                self.sinks: list[Sink] = []
                if self.is_rank_zero:
                    self.open_outputs(writers)
                try:
                    return self.train()
                except Exception as error:
                    self.checkpoints.close(error)
                    self.record_failure(error)
                    raise
                finally:
                    self.profiler.end_run()
                    for sink in self.sinks:
                        sink.close()

    def open_outputs(self, stack: ExitStack) -> None:
        """Terminal, metrics.jsonl and sinks, on rank 0."""
        progress = Progress(self.spec.optim.steps, self.step, self.spec.log.every, self.quiet)
        self.progress = stack.enter_context(progress)
        for line in banner(self.spec, self.folder, self.device, self.step):
            self.progress.head(line)
        metrics = MetricsWriter(self.folder.metrics_path, self.attempt, has_rewound(self.folder))
        self.metrics = stack.enter_context(metrics)
        self.sinks = open_sinks(self.spec.log, self.folder, self.spec, self.step)
        passes = evaluation_passes(self.held_out, self.spec, self.spec.log.eval_batches)
        share = -(-passes // self.spec.parallel.dp)
        self.repricer = Repricer(self.whole, self.folder, self.attempt, share, self.watchdog)

    def lock_folder(self, stack: ExitStack) -> tuple[int, SkippedBatches]:
        """Lock the run folder; returns the number of this attempt, and the batches to skip."""
        stack.enter_context(self.folder.locked(lock_timeout_s()))
        attempt = self.folder.next_attempt()
        return attempt, record_restart(self.folder, attempt, self.spec.fault.crash_loop)

    def describe_oom(self, error: Exception) -> Exception:
        final = self.start_step is None or self.step == self.start_step  # no step since this attempt began
        return describe_oom(error, self.spec, self.mesh, self.device, getattr(self, "memory", None), final)

    def record_failure(self, error: Exception) -> None:
        """Record why the run ends. If another rank failed first, raise its error instead of this one."""
        cause = root_cause(self.describe_oom(error), self.watchdog)
        facts = cause.facts if isinstance(cause, LMWorksError) else {}
        self.event("interrupt" if isinstance(cause, Interrupted) else "fail", error=str(cause), **facts)
        if cause is not error:
            raise cause from error

    def train(self) -> Evaluation:
        with closing(self.batch_stream()) as stream:
            self.prefetcher = stream
            return self.train_loop(stream)

    def batches_at(self, cursor: int) -> list[Batch]:
        """This rank's micro-batches of the step at `cursor`, outside of the loop."""
        return self.batches.at(cursor)

    def batch_stream(self) -> BatchStream:
        """Where the loop takes its batches from."""
        return Prefetcher(self.batches, self.spec.data.workers, self.device)

    def train_loop(self, prefetcher: BatchStream) -> Evaluation:
        spec = self.spec
        evaluation = None
        save_s = ended = 0.0
        last = False
        while not last:
            self.checkpoints.poll()
            began = time.perf_counter() if self.launcher.pending is None else ended  # its passes run since then
            passes_s = self.launcher.pending_s
            try:
                values = self.next_step(prefetcher)
                last = self.is_last_step(values)
                every, paused = spec.checkpoint.every, self.is_paused
                save_due = last or paused or self.stop_signal or (every and self.step % every == 0)
                evaluation_due = last or paused or (spec.log.eval_every and self.step % spec.log.eval_every == 0)
                check_due = save_due or (evaluation_due and self.may_stop_early)
                if self.stop_signal:
                    self.launcher.discard()
                if spec.health.hash_every and (check_due or self.step % spec.health.hash_every == 0):
                    check_replicas(self.parallel_model, self.optimizer, self.health, self.position, self.recorder)
                if check_due:
                    tensors = self.train_state.local_tensors()
                    check_state(tensors, self.mesh, self.health, self.position, self.recorder)
            except StepRejected as rejected:
                last = False  # the last step may be the one to be taken again
                if rejected.issue.action == "rewind":
                    now = rewind(rejected.issue, self.position, self.health, self.checkpoints, self.recorder)
                    self.step, self.cursor = now.step, now.cursor
                else:
                    self.skip_to(self.cursor + 1, rejected.issue.kind, seconds=round(time.perf_counter() - began, 4))
                continue
            ended = time.perf_counter()
            step_s = ended - began + passes_s - self.launcher.pending_s  # launching passes is part of their own step
            values |= {"step_s": step_s, "checkpoint_s": save_s}
            evaluation = None
            if evaluation_due:
                evaluation = self.evaluate()
                values["val_loss"] = evaluation.loss
                values |= {f"val_{name}": value for name, value in evaluation.metrics.items()}
                if last and spec.log.eval_by_position:
                    bands = loss_by_position(self.parallel_model, self.held_out, spec, spec.log.eval_batches)
                    values |= {f"val_loss/{band.first}-{band.last}": band.loss for band in bands}
                if not last and self.may_stop_early and self.stops_early(evaluation):
                    last = save_due = True
            every = spec.log.suites_every
            if self.suite_scores is not None and (last or paused or (every and self.step % every == 0)):
                values |= self.evaluate_suites(self.suite_scores)
            self.report(values)
            save_s = 0.0
            if save_due:
                save_s = self.save(wait=bool(last or paused or self.stop_signal))
            if save_due and self.stop_signal and not last:
                raise collective_error(Interrupted(self.stop_signal, self.step, self.folder.path))
            if paused and not last:
                self.event("pause")
                return evaluation or self.evaluate()
        self.event("finish")
        return evaluation or self.evaluate()

    @property
    def is_finished(self) -> bool:
        """Whether a run that is resumed has no step to take."""
        return self.step >= self.spec.optim.steps

    @property
    def is_paused(self) -> bool:
        """Whether the run has come as far as it was asked to, or its stage ends."""
        return self.is_at(self.until) or self.is_at(self.stage_end)

    def is_at(self, step: int | None) -> bool:
        return step is not None and self.step >= step

    @property
    def stage_end(self) -> int | None:
        """The step after which another stage follows."""
        end = self.whole.stage_ends()[self.stage]
        return end if end < self.spec.optim.steps else None

    may_stop_early = False  # an evaluation can end the run

    def stops_early(self, evaluation: Evaluation) -> bool:
        return False

    def is_last_step(self, values: dict[str, Any]) -> bool:
        """Whether the run ends with the step that has given these metrics."""
        return self.step >= self.spec.optim.steps

    def next_step(self, prefetcher: BatchStream) -> dict[str, Any]:
        """Wait for the batch at the cursor, and train on it."""
        began = time.perf_counter()
        self.profiler.begin_step(self.step + 1)
        phase.enter("data", self.step + 1)
        self.skip_batches()
        batches = prefetcher.take(self.cursor, self.spec.optim.steps - self.step)
        waited = time.perf_counter() - began
        values = self.train_step(batches)
        self.step += 1
        self.cursor += 1
        return values | {"data_s": waited + values.get("data_s", 0.0)}

    @property
    def is_async(self) -> bool:
        """Whether passes are launched before the step before them is settled; no gain on a CPU."""
        return self.device.type == "cuda" and self.objective.supports_async and supports_async_step(self.spec)

    def next_batches(self) -> Sequence[Batch] | None:
        if self.prefetcher is None or not self.is_async:
            return None
        step, cursor = self.step + 1, self.cursor + 1  # after this step
        wait = is_sync_point(self.spec, step) or self.profiler.is_edge(step) or step in (self.until, self.stage_end)
        if wait or self.skipped_batches.contains(step + 1, cursor):
            return None
        phase.enter("data", step + 1)
        batches = self.prefetcher.peek(cursor)
        if batches is None:  # the host waits for this step
            phase.enter("optimizer", step)
        return batches

    def prefetch_next(self) -> None:
        """Read the next batch while a GPU computes; no gain on a CPU."""
        if self.device.type == "cuda" and self.prefetcher is not None:
            self.prefetcher.prefetch(self.cursor + (1 if self.launcher.pending is None else 2))

    def skip_batches(self) -> None:
        """Advance the cursor past batches that must not be trained on."""
        while reason := self.skipped_batches.skip_reason(self.step + 1, self.cursor):
            self.skip_to(self.cursor + 1, reason)

    def skip_to(self, cursor: int, reason: str, **fields: float) -> None:
        self.cursor = skip_data(self.position, cursor, reason, self.recorder, **fields).cursor

    def evaluate(self) -> Evaluation:
        phase.enter("evaluate")
        began = time.perf_counter()
        result = self.measure_held_out()
        seconds = round(time.perf_counter() - began, 4)
        reward: dict[str, Any] = {"reward": result.metrics["reward/mean"]} if "reward/mean" in result.metrics else {}
        self.event("eval", val_loss=result.loss, tokens=result.tokens, unit=result.unit, seconds=seconds, **reward)
        return result

    suite_scores: Callable[[], dict[str, float]] | None = None  # of log.suites: `evals.attach_suites` sets it

    def evaluate_suites(self, scores: Callable[[], dict[str, float]]) -> dict[str, float]:
        phase.enter("evaluate")
        began = time.perf_counter()
        return scores() | {"suites_s": time.perf_counter() - began}

    def measure_held_out(self) -> Evaluation:
        return evaluate(self.parallel_model, self.held_out, self.spec, self.spec.log.eval_batches, self.objective)

    @property
    def positions_per_step(self) -> int:
        """Positions of the step just taken, as throughput counts them."""
        return self.spec.tokens_per_step

    def report(self, values: dict[str, Any]) -> None:
        """Write one line of metrics.jsonl, with throughput and MFU."""
        if not self.is_rank_zero:
            return
        positions = self.positions_per_step
        flops = run_flops_per_token(self.spec) * positions / values["step_s"]
        peak = self.peak_flops * self.spec.parallel.world if self.peak_flops else None
        values |= {
            "tokens_per_s": positions / values["step_s"],
            "model_tflops": flops / 1e12,
            "mfu": flops / peak if peak else None,
            "memory_bytes": max(values["memory_bytes"], self.memory.read()),
        }
        self.metrics.write(self.step, values)
        self.progress.step({"step": self.step, **values})
        for sink in self.sinks:
            sink.log(self.step, values)
        if said := self.repricer.add(self.step, values):
            self.progress.head(said)

    def save(self, wait: bool = True) -> float:
        """Save a checkpoint; an asynchronous one is waited for only with `wait`. Returns the stall in seconds."""
        return self.checkpoints.save(self.position, wait)

    def load(self, step: int | None = None) -> None:
        """Resume from the newest intact checkpoint (or that of `step`), if there is one."""
        if position := self.checkpoints.load(step):
            self.step, self.cursor = position.step, position.cursor


def create_run_folder(run_dir: str | Path, spec: RunSpec, machine: Machine | None) -> None:
    """`machine`: that prices the run; one of the catalogue prices a run whose spec names no GPU as if it did."""
    priced = spec.after(0)
    if machine is not None and spec.cluster.gpu == "auto" and machine.name in catalogue(spec.cluster.catalogue):
        priced = priced.replace(cluster=spec.cluster.replace(gpu=machine.name, device="cuda"))
    try:
        prediction = predict(priced, machine).to_dict()
        ops = op_prices(priced, machine)
        prediction["step_ops"] = None if ops is None else [one.to_dict() for one in ops]
        prediction["machine_rates"] = machine.best_rates if machine else None
        if prediction["step_s"] and not spec.align.online:
            prediction["run_s"] = seconds_to_come(spec, 0, prediction["step_s"])
            dollars = dollars_an_hour(priced)
            prediction["dollars"] = prediction["run_s"] / 3600 * dollars if dollars else None
    except SpecError as error:  # no number is better than a made-up one
        prediction = {"params": spec.model.params, "notes": [str(error)]}
    folder = RunFolder.create(run_dir, spec)
    write_whole(folder.prediction_path, json.dumps(prediction, indent=2))
