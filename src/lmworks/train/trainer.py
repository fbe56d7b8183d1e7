"""The training loop: read a spec, take its steps, leave a run folder behind.

Every rank runs this same loop; `parallel` lays the model over them, and rank 0 (the lead) prints and writes the run
folder. A run is resumable at any moment. What a step does follows from (spec, step, cursor) and the state in the last
checkpoint, so a run that was killed and resumed ends bitwise where the run that never stopped ends.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist

from ..data import Batch, Batches, console_progress
from ..data.progress import silent
from ..kernels.cross_entropy import IGNORE
from ..model import GPT
from ..model.moe import expert_load
from ..parallel.apply import lay_out
from ..parallel.data import DataParallel
from ..parallel.deepspeed import DeepSpeedEngine
from ..parallel.norms import squared_norm
from ..parallel.possible import refuse_impossible
from ..parallel.precision import LossScale
from ..parallel.state import take, training_state
from ..parallel.weights import is_hf, source_of
from ..parallel.world import explained, from_lead, is_lead, join, known, together
from ..plan.devices.machine import Machine
from ..plan.flops import model_flops_per_token
from ..record import MetricsWriter, RunFolder, phase
from ..spec import DataError, RunSpec, SpecError, TrainingError
from . import checkpoint
from .device import PeakMemory, find_gpu, make_deterministic, pick_device
from .evaluate import Evaluation, evaluate, held_out
from .health import first_nonfinite
from .manifest import step_of
from .optim import learning_rate, make_optimizer
from .profile import Profiler
from .progress import Progress
from .rng import rng_state, seed_everything, set_rng_state
from .signals import Interrupted, StopSignals
from .sinks import Sink, open_sinks
from .start import start_folder, with_absolute_paths


class Trainer:
    """`Trainer(spec, run_dir).run()` starts a run, `Trainer.resume(run_dir).run()` goes on with one."""

    def __init__(
        self, spec: RunSpec, run_dir: str | Path, *, machine: Machine | None = None, quiet: bool = False
    ) -> None:
        self.meet(spec, quiet)
        from_lead(RunFolder(Path(run_dir)).refuse_taken)  # at once, not after data were prepared
        self.prepare()
        from_lead(lambda: start_folder(run_dir, self.spec, machine))
        self.folder = RunFolder(Path(run_dir))

    @classmethod
    def resume(cls, run_dir: str | Path, *, quiet: bool = False) -> Self:
        """Take up a run at its newest intact checkpoint, or at step 0 where there is none yet."""
        folder = RunFolder.open(run_dir)
        trainer = cls.__new__(cls)
        trainer.meet(folder.spec(), quiet)
        trainer.prepare()
        trainer.folder = folder
        return trainer

    def meet(self, spec: RunSpec, quiet: bool) -> None:
        """Find the device and the other ranks."""
        self.spec = with_absolute_paths(spec)
        self.device = pick_device(spec.cluster)
        self.mesh = join(spec.parallel, self.device)
        self.lead = is_lead()
        self.quiet = quiet or not self.lead

    def prepare(self) -> None:
        """Everything that can be refused is refused here, before a folder is made or a file is written."""
        spec = self.spec
        if spec.deterministic:
            make_deterministic()
        together(lambda: refuse_impossible(spec, self.device))
        from_lead(self.open_data)  # the embedded corpus is made on first use, by one rank
        rank, world = (0, 1) if self.mesh is None else (self.mesh.rank("dp"), self.mesh.size("dp"))
        self.batches = together(lambda: Batches(spec.data, seed=spec.seed, rank=rank, world=world))
        self.held_out = together(lambda: held_out(spec))
        if self.batches.vocab_size > spec.model.vocab:
            raise known(
                SpecError(
                    f"model.vocab = {spec.model.vocab} is less than the tokenizer's {self.batches.vocab_size} tokens "
                    f"({', '.join(spec.data.sources)}); use at least {self.batches.vocab_size}"
                )
            )
        self.weights = together(lambda: source_of(spec))
        self.step = 0  # optimizer steps taken
        self.cursor = 0  # where the data stands: steps taken + windows skipped on purpose
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
        self.laid = together(lambda: lay_out(self.spec, self.mesh, self.device, self.weights))
        self.optimizer = make_optimizer(self.laid.shards, self.spec.optim)
        self.engine: DeepSpeedEngine | None = None
        if self.spec.parallel.engine == "deepspeed":  # it takes model and optimizer over
            self.engine = together(lambda: DeepSpeedEngine(self.model, self.optimizer, self.spec))
            self.laid.strategies = {0: cast(DataParallel, self.engine)}  # for evaluation, which only calls it
        self.loss_scale = LossScale(self.spec.precision)
        self.stop_asked = 0  # the signal that any rank was sent
        self.profiler = Profiler(self.spec.log, self.folder, self.device)

    @property
    def model(self) -> GPT:
        """The whole model, where one rank holds it."""
        (part,) = self.laid.parts.values()
        return part

    def run(self) -> Evaluation:
        """Train to the last step and return the final loss on held-out data."""
        optim = self.spec.optim
        with ExitStack() as stack:
            attempt = from_lead(lambda: self.take_hold(stack))
            self.build()
            self.load()
            if self.step == optim.steps:
                if not any(event["kind"] == "finish" for event in self.folder.events()):  # killed just before
                    self.event("finish")
                return evaluate(self.laid, self.held_out, self.spec, self.spec.log.eval_batches)
            if attempt and not self.step and not self.quiet:
                print("no checkpoint yet: starting at step 0", flush=True)
            self.event("resume" if attempt else "start", attempt=attempt)
            with StopSignals() as self.stop, ExitStack() as writers:
                self.sinks: list[Sink] = []
                if self.lead:
                    progress = Progress(optim.steps, self.step, self.spec.log.every, self.quiet)
                    self.progress = writers.enter_context(progress)
                    self.metrics = writers.enter_context(MetricsWriter(self.folder.metrics_path, attempt))
                    self.sinks = open_sinks(self.spec.log, self.folder, self.spec, self.step)
                try:
                    return self.loop()
                except Exception as error:
                    self.end_with(error)
                    raise
                finally:
                    self.profiler.close()
                    for sink in self.sinks:
                        sink.close()

    def take_hold(self, stack: ExitStack) -> int:
        """Keep the folder for this run; returns which attempt at it this is."""
        stack.enter_context(self.folder.hold())
        return self.folder.next_attempt()

    def end_with(self, error: Exception) -> None:
        """Record why the run ends. Where that is another rank's failure, raise it instead of what it led to here."""
        cause = explained(error)
        self.event("interrupt" if isinstance(cause, Interrupted) else "fail", error=str(cause))
        if cause is not error:
            raise cause from error

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        if self.lead:
            self.folder.event(kind, self.step if step is None else step, **fields)

    def loop(self) -> Evaluation:
        spec = self.spec
        stream = self.batches.stream(self.cursor, self.cursor + spec.optim.steps - self.step, spec.data.workers)
        evaluation = None
        save_s = 0.0
        while self.step < spec.optim.steps:
            began = time.perf_counter()
            phase.enter("data", self.step + 1)
            batches = next(stream)
            waited = time.perf_counter() - began
            with self.profiler.step(self.step + 1):
                values = self.train_step(batches)
            self.step += 1
            self.cursor += 1
            values |= {"data_s": waited, "step_s": time.perf_counter() - began, "checkpoint_s": save_s}
            last = self.step == spec.optim.steps
            evaluation = None
            if last or (spec.log.eval_every and self.step % spec.log.eval_every == 0):
                evaluation = self.evaluate()
                values["val_loss"] = evaluation.loss
            self.report(values)
            save_s = 0.0
            saved = last or self.stop_asked or (spec.checkpoint.every and self.step % spec.checkpoint.every == 0)
            if saved:
                save_s = self.save()
            if saved and self.stop_asked and not last:
                raise known(Interrupted(self.stop_asked, self.step, self.folder.path))
        self.event("finish")
        return evaluation or self.evaluate()

    def train_step(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """One optimizer step over the micro-batches of a global batch."""
        began = time.perf_counter()
        # The loss is a mean over the tokens of the global batch, so every micro-batch on every rank is divided by that
        # count, not by its own: uneven ones then weigh as their tokens do.
        tokens = self.count_tokens(batches)
        if self.engine is not None:
            return self.engine_step(self.engine, batches, tokens, began)
        scale = self.loss_scale.scale
        loss_sum = self.laid.forward_backward(batches, scale / max(1, tokens))
        phase.enter("reduce")
        self.laid.finish()
        squares = squared_norm(self.laid.shards, self.laid.replicas)
        loss_total, squares_total, memory = self.sum_over_ranks(loss_sum, squares)
        norm = math.sqrt(squares_total) / scale  # of a NaN it is one
        loss_mean = loss_total / max(1, tokens)
        computed = time.perf_counter()
        self.refuse_nonfinite(loss_mean, norm)
        phase.enter("optimizer")
        lr = learning_rate(self.spec.optim, self.step)
        overflow = not math.isfinite(norm)  # of fp16: the weights are left alone, and the scale is halved
        if not overflow:
            self.scale_gradients(norm, scale)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.laid.after_step()
        self.loss_scale.update(norm)
        self.laid.clear()
        if overflow:
            self.event("overflow", self.step + 1, loss_scale=scale, next_scale=self.loss_scale.scale)
        values = {"loss": loss_mean, "lr": lr, "grad_norm": norm, "tokens": tokens, "memory_bytes": memory}
        values |= {"forward_backward_s": computed - began, "optimizer_s": time.perf_counter() - computed}
        if self.loss_scale.enabled:
            values["loss_scale"] = scale
        if self.spec.model.experts:  # the busiest expert's tokens over the mean, of the layers that are here
            values["expert_load"] = max(expert_load(part) for part in self.laid.parts.values())
        return values

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
            self.refuse_nonfinite(loss_mean, math.nan)
        computed = time.perf_counter()
        lr, scale = learning_rate(self.spec.optim, self.step), engine.loss_scale
        norm = engine.step(lr)
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

        A signal that one rank was sent travels along, so that all of them stop after the same step.
        """
        figures = torch.stack([figure.to(self.device, torch.float64).squeeze() for figure in (loss, squares)])
        if self.mesh is None:
            self.stop_asked = self.asked()
            return *figures.tolist(), self.memory.read()
        ranks = torch.zeros(2, self.mesh.size("world"), dtype=torch.float64, device=self.device)
        ranks[:, self.mesh.rank("world")] = torch.tensor([self.asked(), self.memory.read()], dtype=torch.float64)
        figures = torch.cat([figures, ranks.flatten()])
        dist.all_reduce(figures)
        total, squared, *rest = figures.tolist()
        half = len(rest) // 2
        self.stop_asked = int(max(rest[:half]))
        return total, squared, int(max(rest[half:]))

    def asked(self) -> int:
        return self.stop.signal if hasattr(self, "stop") else 0

    def scale_gradients(self, norm: float, scale: float) -> None:
        """Undo the loss scale, and clip."""
        clip = self.spec.optim.clip
        factor = (min(1.0, clip / (norm + 1e-6)) if clip else 1.0) / scale
        gradients = [shard.leaf.grad for shard in self.laid.shards if shard.leaf.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)

    def refuse_nonfinite(self, loss: float, grad_norm: float) -> None:
        """Stop before a NaN or Inf reaches the weights. fp16 may overflow while its scale can be lowered."""
        if math.isfinite(loss) and (math.isfinite(grad_norm) or self.loss_scale.scale > 1):
            return
        what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {grad_norm}"
        bad, where = first_nonfinite(self.laid.shards, self.mesh)
        self.event("fault", self.step + 1, loss=loss, grad_norm=grad_norm, parameter=bad, cursor=self.cursor)
        raise known(
            TrainingError(
                f"step {self.step + 1}: {what}{where}; the step was not taken and the weights are as they were; lower "
                f"optim.lr in {self.folder.spec_path} and resume, or look at the data of cursor {self.cursor}"
            )
        )

    def evaluate(self) -> Evaluation:
        phase.enter("evaluate")
        result = evaluate(self.laid, self.held_out, self.spec, self.spec.log.eval_batches)
        self.event("eval", val_loss=result.loss, tokens=result.tokens)
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
        state = training_state(self.optimizer, self.laid.shards, self.laid.splits, self.mesh)
        state["model"] |= self.laid.buffers()
        return state

    def take(self, state: dict[str, Any]) -> None:
        """Go on from what was loaded into `state`."""
        if self.engine is not None:
            self.engine.load(state)
            return
        take(self.laid.shards, self.optimizer, state, self.mesh)
        self.laid.after_load()

    def save(self) -> float:
        """Commit a checkpoint; returns the seconds it took."""
        began = time.perf_counter()
        state = {**self.state(), "rng": rng_state()}
        meta = {"cursor": self.cursor, "data": self.batches.digest, "loss_scale": self.loss_scale.state_dict()}
        meta["spec"] = self.spec.to_dict()
        path = checkpoint.save(self.folder.checkpoints, self.step, state, meta, self.spec.checkpoint.keep)
        seconds = time.perf_counter() - began
        self.event("save", path=path.name, seconds=round(seconds, 4))
        return seconds

    def load(self) -> None:
        """Take up the newest intact checkpoint, if there is one. Damaged ones are named, here and in events.jsonl."""
        if not from_lead(self.folder.checkpoints.exists):
            self.load_start()
            return
        state = {**self.state(), "rng": None}
        manifest = checkpoint.load(self.folder.checkpoints, state, refused=self.refused)
        if manifest is None:
            self.load_start()
            return
        if manifest.meta["data"] != self.batches.digest:
            raise known(
                DataError(
                    f"{', '.join(self.spec.data.sources)} holds other tokens than those this run was trained on; "
                    "bring the old data back, or start a new run"
                )
            )
        self.take(state)
        set_rng_state(state["rng"])
        self.loss_scale.load_state_dict(manifest.meta["loss_scale"])
        self.step, self.cursor = manifest.step, manifest.meta["cursor"]

    def load_start(self) -> None:
        """Weights of another run, where checkpoint.init names one; those of a Hugging Face folder are in already."""
        start = self.spec.checkpoint.init
        if not start or is_hf(Path(start)):
            return
        state = {"model": self.state()["model"]}
        folder = together(lambda: RunFolder.open(start))
        if checkpoint.load(folder.checkpoints, state, refused=self.refused) is None:
            raise known(SpecError(f"checkpoint.init = {start!r} has no checkpoint to start from"))
        self.take(state)

    def refused(self, path: Path, reason: str) -> None:
        self.event("refused", step_of(path), path=path.name, reason=reason)
        print(f"refused a damaged checkpoint: {reason}", file=sys.stderr, flush=True)
