"""One optimizer step: the forward and backward passes of a global batch, one exchange of figures, the update.

`Stepper` is what a step needs and nothing of the loop around it: the trainer is one, and so is a simulated rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..data import Batch
from ..kernels.cross_entropy import IGNORE
from ..model import GPT
from ..model.moe import expert_load
from ..parallel.deepspeed import DeepSpeedEngine
from ..parallel.laid import Laid
from ..parallel.mesh import Mesh
from ..parallel.norms import squared_norm
from ..parallel.precision import LossScale
from ..parallel.world import known
from ..record import RunFolder, phase
from ..spec import RunSpec, TrainingError
from .device import PeakMemory
from .health import first_nonfinite
from .optim import learning_rate
from .signals import StopSignals


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
    memory: PeakMemory
    stop: StopSignals
    step: int  # optimizer steps taken
    cursor: int  # where the data stands: steps taken + windows skipped on purpose
    stop_asked: int  # the signal that any rank was sent

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
