"""The training loop: read a spec, take its steps, leave a run folder behind.

Every rank runs this same loop; `parallel` lays the model over them, and rank 0 (the lead) prints and writes the run
folder. A run is resumable at any moment. What a step does follows from (spec, step, cursor) and the state in the last
checkpoint, so a run that was killed and resumed ends bitwise where the run that never stopped ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any, Self, cast

from ..checkpoint.format.digest import new_hash
from ..checkpoint.format.remote import refuse_taken
from ..data import Batch, Batches, console_progress
from ..data.cache import refuse_vocabulary
from ..data.progress import activity, silent
from ..parallel.data_parallel import DataParallel
from ..parallel.deepspeed import DeepSpeedEngine
from ..parallel.initial_weights import source_of
from ..parallel.memory_preflight import refuse_missing_gpu
from ..parallel.parallelize import parallelize
from ..parallel.precision import LossScale
from ..parallel.preflight import refuse_impossible
from ..parallel.state_dict import take, training_state
from ..parallel.world import (
    collective_error,
    init_distributed,
    is_rank_zero,
    root_cause,
    run_on_all_ranks,
    run_on_rank_zero,
)
from ..plan.devices.machine import Machine
from ..plan.flops import model_flops_per_token
from ..record import MetricsWriter, RunFolder, phase
from ..spec import LMWorksError, RunSpec
from ..spec.files import refuse_unwritable
from ..spec.paths import with_absolute_paths
from .async_step import drop, may_look_ahead, stands_alone
from .banner import banner, name_device
from .device import PeakMemory, find_gpu, make_deterministic, naming_gpu, on_device, pick_device
from .evaluate import Evaluation, evaluate, held_out
from .health.bad_step import Health, NotTaken
from .health.corruption import check_replicas
from .health.finite import check_state
from .oom import named, naming
from .optim import make_optimizer
from .prefetcher import Prefetcher
from .profile import Profiler
from .progress import Progress
from .restart import Detours, chosen_step, has_rewound, note_restart, over_started, patience_s, who_runs
from .rewind import move_on
from .rng import seed_everything
from .run_start import start_folder
from .saving import Saving
from .signals import Interrupted, StopSignals
from .sinks import Sink, open_sinks
from .step import Stepper
from .step_scalars import Reader
from .watch import watching


class Trainer(Stepper):
    """`Trainer(spec, run_dir).run()` starts a run, `Trainer.resume(run_dir).run()` goes on with one."""

    prefetcher: Prefetcher | None = None  # while it loops
    begin_at: int | None = None  # the step to resume from, where one was chosen
    began: int | None = None  # the step after which this start goes on

    def __init__(
        self,
        spec: RunSpec,
        run_dir: str | Path,
        *,
        machine: Machine | None = None,
        quiet: bool = False,
        force: bool = False,  # even where it does not fit into memory
    ) -> None:
        self.meet(spec, quiet)
        run_on_rank_zero(RunFolder(Path(run_dir)).refuse_taken)  # at once, not after data were prepared
        run_on_rank_zero(lambda: refuse_unwritable(Path(run_dir), "--run-dir"))
        run_on_rank_zero(lambda: refuse_taken(spec.checkpoint.remote))
        self.prepare(force)
        run_on_rank_zero(
            lambda: start_folder(run_dir, with_absolute_paths(spec), machine)
        )  # as written, however many started
        self.folder = RunFolder(Path(run_dir))

    @classmethod
    def resume(
        cls, run_dir: str | Path, *, step: int | None = None, quiet: bool = False, device: str = "", force: bool = False
    ) -> Self:
        """Take up a run at its newest intact checkpoint, or at step 0 where there is none yet.

        With `step` at the checkpoint of that step: those after it are set aside. With `device` there, whatever the spec
        says.
        """
        folder = RunFolder.open(run_dir)
        trainer = cls.__new__(cls)
        trainer.meet(on_device(folder.spec(), device), quiet)
        trainer.begin_at = run_on_rank_zero(lambda: chosen_step(folder, step))
        trainer.prepare(force)
        trainer.folder = folder
        return trainer

    def meet(self, spec: RunSpec, quiet: bool) -> None:
        """Find the device and the other ranks, and lay the run over as many as there are."""
        self.spec = over_started(with_absolute_paths(spec))
        refuse_missing_gpu(spec.cluster)
        self.device = pick_device(spec.cluster)
        self.spec = naming_gpu(self.spec, self.device)
        self.mesh = init_distributed(self.spec.parallel, self.device, self.spec.watch.timeout_s)
        self.lead = is_rank_zero()
        self.quiet = quiet or not self.lead

    def prepare(self, force: bool = False) -> None:
        """Everything that can be refused is refused here, before a folder is made or a file is written."""
        spec = self.spec
        if spec.deterministic:
            make_deterministic()
        run_on_all_ranks(lambda: refuse_impossible(spec, self.device, force))
        run_on_all_ranks(lambda: new_hash(spec.checkpoint.hash))
        self.weights = run_on_all_ranks(lambda: source_of(spec))
        run_on_rank_zero(self.open_data)  # the embedded corpus is made on first use, by one rank
        rank, world = (0, 1) if self.mesh is None else (self.mesh.rank("dp"), self.mesh.size("dp"))
        self.batches = run_on_all_ranks(lambda: Batches(spec.data, seed=spec.seed, rank=rank, world=world))
        self.held_out = run_on_all_ranks(lambda: held_out(spec))
        run_on_all_ranks(lambda: refuse_vocabulary(spec, self.batches.vocab_size))
        self.step = self.cursor = 0
        self.detours = Detours({})
        gpu = find_gpu(spec.cluster, self.device)
        self.peak_flops = gpu.peak_flops(spec.precision.dtype) if gpu else None

    def open_data(self) -> None:
        with nullcontext(silent) if self.quiet else console_progress() as progress:
            Batches(self.spec.data.replace(verify=False), seed=self.spec.seed, progress=progress)

    def build(self) -> None:
        """Model, optimizer and loss scale."""
        phase.enter("init")
        self.memory = PeakMemory(self.device)
        seed_everything(self.spec.seed)
        self.parallel_model = run_on_all_ranks(
            lambda: naming(self, lambda: parallelize(self.spec, self.mesh, self.device, self.weights))
        )
        self.optimizer = make_optimizer(
            self.parallel_model.shards, self.spec.optim, self.spec.precision, self.spec.seed
        )
        self.engine = None
        if self.spec.parallel.engine == "deepspeed":  # it takes model and optimizer over
            self.engine = run_on_all_ranks(lambda: DeepSpeedEngine(self.model, self.optimizer, self.spec))
            self.parallel_model.strategies = {0: cast(DataParallel, self.engine)}  # for evaluation, which only calls it
        self.loss_scale = LossScale(self.spec.precision)
        self.health = Health(self.spec.health)
        self.reader = Reader(self.device)
        self.stop_asked = 0
        self.saving = Saving(self)
        self.profiler = Profiler(self.spec.log, self.folder, self.device)

    def run(self) -> Evaluation:
        """Train to the last step and return the final loss on held-out data."""
        optim = self.spec.optim
        with ExitStack() as stack:
            self.stop = stack.enter_context(StopSignals(self.spec.fault.deadline_s))
            attempt, self.detours = run_on_rank_zero(lambda: self.take_hold(stack))
            self.attempt = attempt
            self.watchdog = stack.enter_context(watching(self.spec.watch, self.folder, attempt, self.mesh))
            try:
                with activity() if not self.quiet else nullcontext(silent) as doing:
                    doing(f"building {self.spec.model.params:,} parameters on {name_device(self.device)}", 0, 0)
                    self.build()
                    stack.callback(self.saving.close)
                    self.load(self.begin_at)
                if self.begin_at is not None:
                    self.saving.set_aside_later()
            except Exception as error:
                cause = root_cause(named(error, self), self.watchdog)
                if cause is not error:
                    raise cause from error
                raise
            self.began = self.step
            if self.step == optim.steps:
                if not any(event["kind"] == "finish" for event in self.folder.events()):  # killed just before
                    self.event("finish")
                return evaluate(self.parallel_model, self.held_out, self.spec, self.spec.log.eval_batches)
            if attempt and not self.step and not self.quiet:
                print("no checkpoint yet: starting at step 0", flush=True)
            self.event("resume" if attempt else "start", attempt=attempt, **who_runs(self.spec))
            self.stop.wait_for_step()
            with ExitStack() as writers:
                self.sinks: list[Sink] = []
                if self.lead:
                    progress = Progress(optim.steps, self.step, self.spec.log.every, self.quiet)
                    self.progress = writers.enter_context(progress)
                    for line in banner(self.spec, self.folder, self.device, self.step):
                        self.progress.head(line)
                    metrics = MetricsWriter(self.folder.metrics_path, attempt, has_rewound(self.folder))
                    self.metrics = writers.enter_context(metrics)
                    self.sinks = open_sinks(self.spec.log, self.folder, self.spec, self.step)
                try:
                    return self.loop()
                except Exception as error:
                    self.saving.close(error)
                    self.end_with(error)
                    raise
                finally:
                    self.profiler.close()
                    for sink in self.sinks:
                        sink.close()

    def take_hold(self, stack: ExitStack) -> tuple[int, Detours]:
        """Keep the folder for this run; returns which attempt at it this is, and the batches that it passes by."""
        stack.enter_context(self.folder.hold(patience_s()))
        attempt = self.folder.next_attempt()
        return attempt, note_restart(self.folder, attempt, self.spec.fault.crash_loop)

    def end_with(self, error: Exception) -> None:
        """Record why the run ends. Where that is another rank's failure, raise it instead of what it led to here."""
        cause = root_cause(named(error, self), self.watchdog)
        facts = cause.facts if isinstance(cause, LMWorksError) else {}
        self.event("interrupt" if isinstance(cause, Interrupted) else "fail", error=str(cause), **facts)
        if cause is not error:
            raise cause from error

    def loop(self) -> Evaluation:
        with closing(Prefetcher(self.batches, self.spec.data.workers, self.device)) as prefetcher:
            self.prefetcher = prefetcher
            return self.steps(prefetcher)

    def steps(self, prefetcher: Prefetcher) -> Evaluation:
        spec = self.spec
        evaluation = None
        save_s = ended = 0.0
        while self.step < spec.optim.steps:
            self.saving.poll()
            began = time.perf_counter() if self.ahead is None else ended  # since then the device is at it
            try:
                values = self.next_step(prefetcher)
                last = self.step == spec.optim.steps
                saved = last or self.stop_asked or (spec.checkpoint.every and self.step % spec.checkpoint.every == 0)
                if self.stop_asked:
                    drop(self)
                if spec.health.hash_every and (saved or self.step % spec.health.hash_every == 0):
                    check_replicas(self)
                if saved:
                    check_state(self)
            except NotTaken as refused:
                move_on(self, refused, time.perf_counter() - began)
                continue
            ended = time.perf_counter()
            values |= {"step_s": ended - began, "checkpoint_s": save_s}
            evaluation = None
            if last or (spec.log.eval_every and self.step % spec.log.eval_every == 0):
                evaluation = self.evaluate()
                values["val_loss"] = evaluation.loss
            self.report(values)
            save_s = 0.0
            if saved:
                save_s = self.save(wait=bool(last or self.stop_asked))
            if saved and self.stop_asked and not last:
                raise collective_error(Interrupted(self.stop_asked, self.step, self.folder.path))
        self.event("finish")
        return evaluation or self.evaluate()

    def next_step(self, prefetcher: Prefetcher) -> dict[str, Any]:
        """Wait for the batch that the cursor stands at, and train on it."""
        began = time.perf_counter()
        phase.enter("data", self.step + 1)
        self.pass_by()
        batches = prefetcher.take(self.cursor, self.spec.optim.steps - self.step)
        waited = time.perf_counter() - began
        with self.profiler.step(self.step + 1):
            values = self.train_step(batches)
        self.step += 1
        self.cursor += 1
        return values | {"data_s": waited + values.get("data_s", 0.0)}

    @property
    def looks_ahead(self) -> bool:
        """Whether passes are launched before the step before them is settled; a CPU would gain nothing by it."""
        return self.device.type == "cuda" and may_look_ahead(self.spec)

    def following(self) -> Sequence[Batch] | None:
        if self.prefetcher is None or not self.looks_ahead:
            return None
        step, cursor = self.step + 1, self.cursor + 1  # as they are when this step is over
        if stands_alone(self.spec, step) or self.detours.due(step + 1, cursor):
            return None
        phase.enter("data", step + 1)
        batches = self.prefetcher.coming(cursor)
        if batches is None:  # this step is what is waited for
            phase.enter("optimizer", step)
        return batches

    def meanwhile(self) -> None:
        """Read the next batch while a GPU computes this one; a CPU would only do the one before the other."""
        if self.device.type == "cuda" and self.prefetcher is not None:
            self.prefetcher.prepare(self.cursor + (1 if self.ahead is None else 2))

    def pass_by(self) -> None:
        """Move on past batches that are not to be trained on."""
        while reason := self.detours.around(self.step + 1, self.cursor):
            self.event("skip", self.step + 1, from_cursor=self.cursor, to_cursor=self.cursor + 1, reason=reason)
            self.cursor += 1

    def evaluate(self) -> Evaluation:
        phase.enter("evaluate")
        began = time.perf_counter()
        result = evaluate(self.parallel_model, self.held_out, self.spec, self.spec.log.eval_batches)
        seconds = round(time.perf_counter() - began, 4)
        self.event("eval", val_loss=result.loss, tokens=result.tokens, seconds=seconds)
        return result

    def report(self, values: dict[str, Any]) -> None:
        """One line of metrics.jsonl, with what follows from the measured time."""
        if not self.lead:
            return
        positions = self.spec.tokens_per_step
        flops = model_flops_per_token(self.spec.model, self.spec.data.seq) * positions / values["step_s"]
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

    def state(self) -> dict[str, Any]:
        """Model and optimizer by name: the live tensors, to be saved, or loaded into and then taken up by `take`."""
        if self.engine is not None:
            return self.engine.state()
        state = training_state(self.optimizer, self.parallel_model.shards, self.parallel_model.sharding, self.mesh)
        state["model"] |= self.parallel_model.buffers()
        return state

    def take(self, state: dict[str, Any]) -> None:
        """Go on from what was loaded into `state`."""
        if self.engine is not None:
            self.engine.load(state)
            return
        take(self.parallel_model.shards, self.optimizer, state, self.mesh)
        self.parallel_model.after_load()

    def save(self, wait: bool = True) -> float:
        """Commit a checkpoint; an asynchronous one is only waited for with `wait`. Returns how long we stood still."""
        return self.saving.save(wait)

    def load(self, step: int | None = None) -> None:
        """Take up the newest intact checkpoint (or that of `step`), if there is one."""
        self.saving.load(step)
