"""The training loop: read a spec, take its steps, leave a run folder behind.

A run is resumable at any moment. What a step does follows from (spec, step, cursor) and the state in the last
checkpoint, so a run that was killed and resumed ends bitwise where the run that never stopped ends.
"""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..data import Batch, Batches, console_progress
from ..data.progress import silent
from ..kernels.cross_entropy import IGNORE
from ..model import GPT
from ..plan.flops import model_flops_per_token
from ..plan.machine import Machine
from ..plan.predict import predict
from ..record import MetricsWriter, RunFolder
from ..spec import DataError, RunSpec, SpecError, TrainingError
from ..spec.files import write_whole
from . import checkpoint
from .device import PeakMemory, find_gpu, make_deterministic, pick_device
from .evaluate import Evaluation, evaluate, held_out
from .manifest import step_of
from .optim import learning_rate, make_optimizer
from .precision import autocast, make_scaler
from .progress import Progress
from .rng import rng_state, seed_everything, set_rng_state
from .signals import Interrupted, StopSignals
from .sinks import open_sinks
from .state import restore, training_state


class Trainer:
    """`Trainer(spec, run_dir).run()` starts a run, `Trainer.resume(run_dir).run()` goes on with one."""

    def __init__(
        self, spec: RunSpec, run_dir: str | Path, *, machine: Machine | None = None, quiet: bool = False
    ) -> None:
        RunFolder(Path(run_dir)).refuse_taken()  # at once, not after data were prepared
        self.prepare(spec, quiet)
        prediction = json.dumps(predict(self.spec, machine).to_dict(), indent=2)
        self.folder = RunFolder.create(run_dir, self.spec)
        write_whole(self.folder.prediction_path, prediction)

    @classmethod
    def resume(cls, run_dir: str | Path, *, quiet: bool = False) -> Self:
        """Take up a run at its newest intact checkpoint, or at step 0 where there is none yet."""
        folder = RunFolder.open(run_dir)
        trainer = cls.__new__(cls)
        trainer.prepare(folder.spec(), quiet)
        trainer.folder = folder
        return trainer

    def prepare(self, spec: RunSpec, quiet: bool) -> None:
        """Everything that can be refused is refused here, before a folder is made or a file is written."""
        refuse_layouts(spec)
        self.spec, self.quiet = with_absolute_paths(spec), quiet
        self.device = pick_device(spec.cluster)
        if spec.deterministic:
            make_deterministic()
        with (
            nullcontext(silent) if quiet else console_progress() as progress
        ):  # the embedded corpus is made on first use
            self.batches = Batches(spec.data, seed=spec.seed, progress=progress)
        self.held_out = held_out(spec)
        if self.batches.vocab_size > spec.model.vocab:
            raise SpecError(
                f"model.vocab = {spec.model.vocab} is less than the tokenizer's {self.batches.vocab_size} tokens "
                f"({', '.join(spec.data.sources)}); use at least {self.batches.vocab_size}"
            )
        self.step = 0  # optimizer steps taken
        self.cursor = 0  # where the data stands: steps taken + windows skipped on purpose
        gpu = find_gpu(spec.cluster, self.device)
        self.peak_flops = gpu.peak_flops(spec.precision.dtype) if gpu else None

    def build(self) -> None:
        """Model, optimizer and loss scale: on the meta device first, so that weights exist once."""
        self.memory = PeakMemory(self.device)
        seed_everything(self.spec.seed)
        with torch.device("meta"):
            self.model = GPT(self.spec.model)
        self.model.to_empty(device=self.device)
        self.model.init_weights(self.spec.seed)
        self.model.recompute = self.spec.parallel.recompute
        if self.spec.parallel.compile:
            for block in self.model.blocks.values():
                block.compile()
        self.optimizer = make_optimizer(self.model, self.spec.optim)
        self.scaler = make_scaler(self.spec.precision, self.device)

    def run(self) -> Evaluation:
        """Train to the last step and return the final loss on held-out data."""
        optim = self.spec.optim
        with self.folder.hold():
            attempt = self.folder.next_attempt()
            self.build()
            self.load()
            if self.step == optim.steps:
                if not any(event["kind"] == "finish" for event in self.folder.events()):  # killed just before
                    self.folder.event("finish", self.step)
                return evaluate(self.model, self.held_out, self.spec, self.spec.log.eval_batches)
            if attempt and not self.step and not self.quiet:
                print("no checkpoint yet: starting at step 0", flush=True)
            self.folder.event("resume" if attempt else "start", self.step, attempt=attempt)
            with (
                StopSignals() as self.stop,
                Progress(optim.steps, self.step, self.spec.log.every, self.quiet) as self.progress,
                MetricsWriter(self.folder.metrics_path, attempt) as self.metrics,
            ):
                self.sinks = open_sinks(self.spec.log, self.folder, self.spec, self.step)
                try:
                    return self.loop()
                except Exception as error:
                    kind = "interrupt" if isinstance(error, Interrupted) else "fail"
                    self.folder.event(kind, self.step, error=str(error))
                    raise
                finally:
                    for sink in self.sinks:
                        sink.close()

    def loop(self) -> Evaluation:
        spec = self.spec
        stream = self.batches.stream(self.cursor, self.cursor + spec.optim.steps - self.step, spec.data.workers)
        evaluation = None
        save_s = 0.0
        while self.step < spec.optim.steps:
            began = time.perf_counter()
            batches = next(stream)
            waited = time.perf_counter() - began
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
            saved = last or self.stop.asked or (spec.checkpoint.every and self.step % spec.checkpoint.every == 0)
            if saved:
                save_s = self.save()
            if saved and self.stop.asked and not last:
                raise Interrupted(self.stop.signal, self.step, self.folder.path)
        self.folder.event("finish", self.step)
        return evaluation or self.evaluate()

    def train_step(self, batches: list[Batch]) -> dict[str, Any]:
        """One optimizer step over the micro-batches of a global batch."""
        began = time.perf_counter()
        # The loss is a mean over the tokens of the global batch, so every micro-batch is divided by that count,
        # not by its own: uneven micro-batches then weigh as their tokens do.
        tokens = sum(int((batch.targets != IGNORE).sum()) for batch in batches)
        loss_sum = torch.zeros((), device=self.device)
        for batch in batches:
            batch = batch.to(self.device)
            with autocast(self.spec.precision, self.device):
                _, loss = self.model(
                    batch.tokens, batch.targets, documents=batch.documents, reduction="sum", keep_logits=False
                )
            self.scaler.scale(loss / max(1, tokens)).backward()
            loss_sum += loss.detach()
        self.scaler.unscale_(self.optimizer)
        grad_norm = get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        norm, loss_mean = grad_norm.item(), loss_sum.item() / max(1, tokens)
        computed = time.perf_counter()
        self.refuse_nonfinite(loss_mean, norm)
        lr, scale = learning_rate(self.spec.optim, self.step), self.scaler.get_scale()
        overflow = not math.isfinite(norm)  # of fp16: the weights are left alone, and the scale is halved
        if not overflow:
            if self.spec.optim.clip:
                clip_grads_with_norm_(self.model.parameters(), self.spec.optim.clip, grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if overflow:
            self.folder.event("overflow", self.step + 1, loss_scale=scale, next_scale=self.scaler.get_scale())
        values = {"loss": loss_mean, "lr": lr, "grad_norm": norm, "tokens": tokens}
        values |= {"forward_backward_s": computed - began, "optimizer_s": time.perf_counter() - computed}
        if self.scaler.is_enabled():
            values["loss_scale"] = scale
        return values

    def refuse_nonfinite(self, loss: float, grad_norm: float) -> None:
        """Stop before a NaN or Inf reaches the weights. fp16 may overflow while its scale can be lowered."""
        if math.isfinite(loss) and (math.isfinite(grad_norm) or self.scaler.get_scale() > 1):
            return
        what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {grad_norm}"
        # Backward runs from the last parameter to the first, so the last bad gradient is where it began.
        named = list(self.model.named_parameters())
        bad = next((name for name, p in named if not p.isfinite().all()), None)
        where = f", from the weight {bad}" if bad else ""
        if bad is None:
            bad = next((n for n, p in reversed(named) if p.grad is not None and not p.grad.isfinite().all()), None)
            where = f", first in the gradient of {bad}" if bad else ""
        self.folder.event("fault", self.step + 1, loss=loss, grad_norm=grad_norm, parameter=bad, cursor=self.cursor)
        raise TrainingError(
            f"step {self.step + 1}: {what}{where}; the step was not taken and the weights are as they were; lower "
            f"optim.lr in {self.folder.spec_path} and resume, or look at the data of cursor {self.cursor}"
        )

    def evaluate(self) -> Evaluation:
        result = evaluate(self.model, self.held_out, self.spec, self.spec.log.eval_batches)
        self.folder.event("eval", self.step, val_loss=result.loss, tokens=result.tokens)
        return result

    def report(self, values: dict[str, Any]) -> None:
        """One line of metrics.jsonl, with what follows from the measured time."""
        positions = self.spec.tokens_per_step
        flops = model_flops_per_token(self.spec.model, self.spec.data.seq) * positions / values["step_s"]
        values |= {
            "tokens_per_s": positions / values["step_s"],
            "model_tflops": flops / 1e12,
            "mfu": flops / self.peak_flops if self.peak_flops else None,
            "memory_bytes": self.memory.read(),
        }
        self.metrics.write(self.step, values)
        self.progress.step({"step": self.step, **values})
        for sink in self.sinks:
            sink.log(self.step, values)

    def save(self) -> float:
        """Commit a checkpoint; returns the seconds it took."""
        began = time.perf_counter()
        state = {**training_state(self.model, self.optimizer), "rng": rng_state()}
        meta = {"cursor": self.cursor, "data": self.batches.digest, "scaler": self.scaler.state_dict()}
        meta["spec"] = self.spec.to_dict()
        path = checkpoint.save(self.folder.checkpoints, self.step, state, meta, self.spec.checkpoint.keep)
        seconds = time.perf_counter() - began
        self.folder.event("save", self.step, path=path.name, seconds=round(seconds, 4))
        return seconds

    def load(self) -> None:
        """Take up the newest intact checkpoint, if there is one. Damaged ones are named, here and in events.jsonl."""
        if not self.folder.checkpoints.exists():
            return

        def refused(path: Path, reason: str) -> None:
            self.folder.event("refused", step_of(path), path=path.name, reason=reason)
            print(f"refused a damaged checkpoint: {reason}", file=sys.stderr, flush=True)

        state = {**training_state(self.model, self.optimizer), "rng": None}
        manifest = checkpoint.load(self.folder.checkpoints, state, refused=refused)
        if manifest is None:
            return
        if manifest.meta["data"] != self.batches.digest:
            raise DataError(
                f"{', '.join(self.spec.data.sources)} holds other tokens than those this run was trained on; "
                "bring the old data back, or start a new run"
            )
        restore(self.model, self.optimizer, state)
        set_rng_state(state["rng"])
        self.scaler.load_state_dict(manifest.meta["scaler"])
        self.step, self.cursor = manifest.step, manifest.meta["cursor"]


def refuse_layouts(spec: RunSpec) -> None:
    """One process trains so far; a key that asks for more must not be passed over in silence."""
    if spec.parallel.world > 1:
        raise SpecError(
            f"this layout needs {spec.parallel.world} ranks, and training runs in one process so far; "
            "set parallel.dp, tp, pp and cp to 1"
        )
    parallel, cluster = spec.parallel, spec.cluster
    only = {
        "parallel.engine": (parallel.engine, "native"),
        "parallel.offload": (parallel.offload, "none"),
        "parallel.zero": (parallel.zero, 0),
        "parallel.ep": (parallel.ep, 1),
        "cluster.nodes": (cluster.nodes, 1),
        "cluster.gpus_per_node": (cluster.gpus_per_node, 1),
    }
    for key, (asked, possible) in only.items():
        if asked != possible:
            raise SpecError(f"{key} = {asked!r}: training runs in one process so far, which needs {possible!r}")


def with_absolute_paths(spec: RunSpec) -> RunSpec:
    """The resolved spec repeats the run from any folder."""

    def absolute(path: str) -> str:
        return path if path.startswith("stdlib:") else str(Path(path).absolute())

    mix = {absolute(path): weight for path, weight in spec.data.mix.items()}
    return spec.replace(data=spec.data.replace(path=absolute(spec.data.path), mix=mix))
