"""Pipeline parallelism: each rank holds one or more stages, and micro-batches stream through them.

    memory per rank      1/p of the layers; activations of the micro-batches under way (all of them in GPipe, p in 1F1B)
    traffic per step     2 · m · v messages of (micro_batch, seq, hidden) between neighbours, m micro-batches, v stages
    idle share           (p − 1)/(v·m + p − 1), less where the backward pass is split: see plan/pipelines/bubble.py

`torch.distributed.pipelining` runs the schedule. Its chunking handles tensors only, so micro-batches do not go through
it: a stage looks its inputs up by the index of the micro-batch that the schedule runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from ..plan.pipelines.schedule import Span, stages_of
from ..spec import RunSpec, SpecError, TrainingError
from ..spec.layout import SPLIT_BACKWARD
from .mesh import Mesh
from .precision import DTYPES
from .world import all_gather_object

SINGLE_STAGE: dict[str, type[ScheduleGPipe | Schedule1F1B]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI_STAGE: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "looped-bfs": ScheduleLoopedBFS,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}

Inputs = dict[str, Any]  # the keywords of GPT.forward for one micro-batch


class PythonIdentity(torch.autograd.Function):
    """An autograd node that is written in Python, as those of our kernels."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, grad: Tensor) -> Tensor:
        return grad


def splits_backward() -> bool:
    """Whether PyTorch takes gradients up to a node that is written in Python: 2.11 does not, 2.13 does."""
    node = PythonIdentity.apply(torch.ones((), requires_grad=True)).grad_fn
    try:
        return node._input_metadata is not None
    except RuntimeError:
        return False


def check_split_backward(schedule: str) -> None:
    if schedule in SPLIT_BACKWARD and not splits_backward():
        raise SpecError(
            f"parallel.schedule = {schedule!r} needs a newer PyTorch (tried with 2.13) than {torch.__version__}, which "
            "cannot take gradients of inputs apart from those of weights; use '1f1b' or 'interleaved'"
        )


class MicroBatchStage(PipelineStage):
    """A stage whose inputs, but for the hidden states, are looked up by micro-batch."""

    micro_batches: list[Inputs]
    recorder: StageRecorder | None = None
    whole_backward = False  # where the schedule would split it: everything in I, nothing in W
    running = 0  # index of the micro-batch in its forward pass
    stream = torch.float32

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.running = fwd_chunk_id
        with self.record_span("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        with self.record_span("B" if full_backward else "I", bwd_chunk_id):
            whole = full_backward or self.whole_backward
            return super().backward_one_chunk(bwd_chunk_id, loss, whole, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        if self.whole_backward:
            return None
        with self.record_span("W", bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def record_span(self, kind: str, micro_batch: int) -> AbstractContextManager[Any]:
        return self.recorder.note(self.stage_index, kind, micro_batch) if self.recorder else nullcontext()

    def forward_maybe_with_nosync(self, *received: Any, **_kwargs: Any) -> Tensor:
        return self.run(self.micro_batches[self.running], *received)

    def run(self, inputs: Inputs, received: Tensor | None = None) -> Tensor:
        """Hidden states in the format of the residual stream, or the loss sum (1,) of the last stage."""
        if received is not None:
            inputs = {**inputs, "tokens": received}
        result = self.submod(**inputs)
        if not self.is_last:
            return result.to(self.stream)  # does nothing where the residual stream has it already
        # Not a view of the loss: PyTorch frees its graph by detaching it in place, which views cannot be.
        return torch.stack([result[1]])


class Pipeline:
    """Runs steps and evaluations over the pipeline; every rank of a "pp" group calls it with the same micro-batches."""

    def __init__(self, stages: dict[int, nn.Module], spec: RunSpec, mesh: Mesh, device: torch.device) -> None:
        layout = spec.parallel
        self.spec, self.modules, self.group, self.device = spec, stages, mesh.group("pp"), device
        self.count = layout.pp * layout.virtual_stages
        self.rank = mesh.rank("pp")
        self.rank_of = {
            stage: rank
            for rank in range(layout.pp)
            for stage in stages_of(layout.schedule, layout.pp, layout.virtual_stages, rank)
        }
        self.sp_factor = layout.tp if layout.sp else 1  # sequence parallelism: hidden states have 1/tp of the positions
        self.stream = DTYPES[spec.precision.weights]  # the residual stream starts as a weight
        self.stages = self.make_stages()
        self.schedule = self.make_schedule()
        self.losses: list[Tensor] = []
        self.scale: float | Tensor = 1.0

    @property
    def recorder(self) -> StageRecorder | None:
        return self.stages[0].recorder

    @recorder.setter
    def recorder(self, recorder: StageRecorder | None) -> None:
        for stage in self.stages:
            stage.recorder = recorder

    @property
    def has_loss(self) -> bool:
        return self.count - 1 in self.modules

    def make_stages(self) -> list[MicroBatchStage]:
        data, layout = self.spec.data, self.spec.parallel
        seq = data.seq // layout.cp // self.sp_factor
        shape = (data.micro_batch, seq, self.spec.model.hidden)
        hidden = torch.empty(shape, dtype=self.stream, device="meta", requires_grad=True)
        loss = torch.empty(1, device="meta", requires_grad=True)
        made = []
        for index, module in sorted(self.modules.items()):
            received = (hidden,) if index else ()
            sent = loss if index == self.count - 1 else hidden
            stage = MicroBatchStage(module, index, self.count, self.device, received, (sent,), group=self.group)
            # PyTorch asks for each weight's gradient in a pass of its own, and each would compute the block again.
            stage.whole_backward = layout.recompute != "none"
            stage.stream = self.stream
            made.append(stage)
        return made

    def make_schedule(self) -> Any:
        name, micro_batches = self.spec.parallel.schedule, self.spec.accumulation
        if name in SINGLE_STAGE:
            return SINGLE_STAGE[name](self.stages[0], micro_batches, loss_fn=self.scaled_loss, scale_grads=False)
        check_split_backward(name)
        # The schedule gathers and reshards a stage itself. If FSDP resharded after every forward pass too, a split
        # backward pass would look for its gradients on weights that are freed.
        for module in fsdp_units(self.modules):
            module.set_reshard_after_forward(False, recurse=False)
        return MULTI_STAGE[name](self.stages, micro_batches, loss_fn=self.scaled_loss, scale_grads=False)

    def scaled_loss(self, loss: Tensor, _target: Tensor) -> Tensor:
        self.losses.append(loss.detach())
        return loss * self.scale

    def train(self, inputs: list[Inputs], scale: float | Tensor) -> Tensor:
        """Forward and backward of a step: gradients of scale · loss, summed over micro-batches.

        Returns the loss sum, unscaled, on ranks with the last stage; zero elsewhere.
        """
        expected = self.spec.accumulation
        if len(inputs) != expected:
            raise TrainingError(f"a step of this pipeline has {expected} micro-batches, but was given {len(inputs)}")
        self.losses, self.scale = [], scale
        for stage in self.stages:
            stage.micro_batches = inputs
        try:
            self.schedule.step(target=torch.zeros(expected))  # a stand-in: the targets are among the inputs
        finally:
            for stage in self.stages:
                stage.micro_batches = []  # frees the batches
        return self.total(expected)

    def total(self, expected: int) -> Tensor:
        if not self.has_loss:
            return torch.zeros((), device=self.device)
        if len(self.losses) != expected:
            raise TrainingError(f"the last stage saw {len(self.losses)} of {expected} micro-batches")
        return torch.cat(self.losses).sum()

    @torch.no_grad()
    def evaluate(self, inputs: list[Inputs]) -> Tensor:
        """Forward only, of any number of micro-batches: the loss sum on ranks with the last stage, zero elsewhere.

        In wave t, stage s runs micro-batch t − s, and then all exchange at once. Schedules are not used: those with
        a V cannot run without their backward pass, and no activations are saved.
        """
        self.losses = []
        arrived: dict[int, Tensor] = {}  # stage → hidden states for its next wave
        for wave in range(len(inputs) + self.count - 1):
            arrived = self.exchange(self.advance(wave, inputs, arrived), wave, inputs)
        for module in fsdp_units(self.modules):
            module.reshard()  # no backward pass will do it, and a gathered weight is stale after the next update
        return self.total(len(inputs))

    def advance(self, wave: int, inputs: list[Inputs], arrived: dict[int, Tensor]) -> dict[int, Tensor]:
        """Run this rank's stages that have a micro-batch in this wave; hidden states by the stage that needs them."""
        sent = {}
        for stage in self.stages:
            index = stage.stage_index
            if not 0 <= wave - index < len(inputs):
                continue
            with stage.record_span("F", wave - index):
                out = stage.run(inputs[wave - index], arrived.get(index))
            if stage.is_last:
                self.losses.append(out)
            else:
                sent[index + 1] = out
        return sent

    def exchange(self, sent: dict[int, Tensor], wave: int, inputs: list[Inputs]) -> dict[int, Tensor]:
        """All messages of a wave as one batch, in order of stages on both sides: no deadlock."""
        arrived: dict[int, Tensor] = {}
        operations = []
        for stage in range(1, self.count):
            if not 0 <= wave - (stage - 1) < len(inputs):
                continue
            source, target = self.rank_of[stage - 1], self.rank_of[stage]
            if self.rank == source == target:  # the turn of a V
                arrived[stage] = sent[stage]
            elif self.rank == source:
                operations.append(self.message(dist.isend, sent[stage].contiguous(), target))
            elif self.rank == target:
                arrived[stage] = self.hidden_like(inputs[wave - (stage - 1)]["tokens"])
                operations.append(self.message(dist.irecv, arrived[stage], source))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return arrived

    def message(self, direction: Any, tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(direction, tensor, dist.get_global_rank(self.group, peer), self.group)

    def hidden_like(self, tokens: Tensor) -> Tensor:
        batch, seq = tokens.shape
        return torch.empty(batch, seq // self.sp_factor, self.spec.model.hidden, dtype=self.stream, device=self.device)


def fsdp_units(modules: dict[int, nn.Module]) -> Iterator[FSDPModule]:
    for part in modules.values():
        yield from (module for module in part.modules() if isinstance(module, FSDPModule))


class StageRecorder(Protocol):
    """Around every pass of a stage over a micro-batch; `kind`: F, B, I or W."""

    def note(self, stage: int, kind: str, micro_batch: int) -> AbstractContextManager[Any]: ...


class SpanRecorder:
    """Measures when this rank works; plan/pipelines/schedule.py predicts it. On a GPU each measurement synchronizes, so
    nothing overlaps.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self.spans: list[Span] = []

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.time()  # not the faster monotonic clock: ranks of a step are compared with each other

    @contextmanager
    def note(self, stage: int, kind: str, micro_batch: int) -> Iterator[None]:
        begin = self.now()
        yield
        self.spans.append(Span(self.rank, stage, kind, micro_batch, begin, self.now()))

    def gather(self, group: ProcessGroup) -> list[Span]:
        """Every rank's spans of the step, on every rank; time counts from the first of them."""
        spans = [span for spans in all_gather_object(self.spans, group) for span in spans]
        start = min(span.begin for span in spans)
        return [span._replace(begin=span.begin - start, end=span.end - start) for span in spans]
