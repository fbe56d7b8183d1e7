"""One rank of a large world, parallelized and stepped in this process with fake tensors and a fake process group.

The model is parallelized and trained for a step by the code of real ranks. Only two things are fake: the process group,
whose collectives return at once, and the tensors, which have shapes, types and storages but no values (FakeTensorMode).
So counts and bytes are those of the layout; times and values are unknown.

The measured step is not the first one, which creates optimizer states and reduction buckets.

The memory of the GPU's chunked loss, on fake tensors and without a GPU.

Kernels cannot run on fake tensors. The in-place loss kernel allocates only the loss of a chunk, so a stub that does the
same replaces it; gradients are scaled by PyTorch instead of the kernel.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining  # imported early: its allocations would else count in a step's bytes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.fsdp import _flat_param
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode

from ..data import Batch
from ..kernels.training import cross_entropy
from ..kernels.training.cross_entropy import WeightGradient, scaled
from ..model.moe import MoE, moe_layers, run_experts
from ..parallel import ddp
from ..parallel.comm_counter import CommCounter, Row
from ..parallel.expert_parallel import dispatch_and_combine, exchange_counts
from ..parallel.initial_weights import Source
from ..parallel.memory_ledger import GRADIENTS, OPTIMIZER, PARAMETERS, Bytes, MemoryLedger, tensors_in
from ..parallel.mesh import Mesh
from ..parallel.parallelize import parallelize
from ..parallel.precision import LossScale
from ..parallel.tensor_parallel import VocabParallelCrossEntropy
from ..plan import software
from ..plan.pipelines.stages import Stage
from ..spec import Grid, RunSpec, SpecError
from ..train import optim
from ..train import step as training_step
from ..train.async_step import Counts, PassLauncher
from ..train.health.bad_step import Health
from ..train.health.bad_step_recovery import PassResult
from ..train.objective import Objective
from ..train.optim import make_optimizer
from ..train.step_scalars import ScalarReader, UpdateGate
from ..train.trainer import Trainer


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def fake_loss_for(device: str) -> Iterator[None]:
    """Patch the loss to allocate as on a "cuda" or "cpu" device."""
    with ExitStack() as patches:
        if device == "cuda" and software.IN_PLACE:
            patches.enter_context(patched(cross_entropy, "pick", lambda *_, **__: "triton"))
            patches.enter_context(patched(cross_entropy, "chunk_loss", zero_loss))
            patches.enter_context(patched(VocabParallelCrossEntropy, "in_place", exchange_only))
            patches.enter_context(patched(cross_entropy, "scaled", scaled_by_torch))
            patches.enter_context(patched(WeightGradient, "add", mark_written))
        elif device == "cuda":
            patches.enter_context(patched(cross_entropy, "CHUNK_LOGITS", cross_entropy.CHUNK_LOGITS_GPU))
        yield


def zero_loss(logits: Tensor, *_: Any, **__: Any) -> Tensor:
    return logits.new_zeros((), dtype=torch.float32)


def exchange_only(
    loss: VocabParallelCrossEntropy, logits: Tensor, _index: Tensor, counted: Tensor, _graded: bool
) -> Tensor:
    return loss.loss_over_ranks(logits.new_zeros(2, logits.shape[0], dtype=torch.float32), counted)[0]


def mark_written(total: WeightGradient, _grad: Tensor, _hidden: Tensor) -> None:
    total.empty = False


def scaled_by_torch(x: Tensor, factor: Tensor, dtype: torch.dtype, _implementation: str) -> Tensor:
    return scaled(x, factor, dtype, "torch")


# --- fake rank -------------------------------------------------------------------------------------------


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Simulation:
    """Parameters, collectives and memory of one step on one rank."""

    parameters: int  # elements that this rank's optimizer updates
    parameter_bytes: int
    collectives: list[Row]
    resident: Bytes  # just before the update
    peak: Bytes
    moment: str  # of the peak

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())


@contextmanager
def fake_world(spec: RunSpec, rank: int) -> Iterator[Mesh]:
    """The mesh of the spec's layout on `rank`; functions that need values are patched."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise SpecError("simulate needs its own process: this one already belongs to a process group")
    hook = sys.excepthook  # PyTorch installs one that names the rank, and does not restore it
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=spec.parallel.world)
    gpu = spec.cluster.device == "cuda" or spec.cluster.gpu != "auto"
    try:
        with (
            warnings.catch_warnings(),
            fake_loss_for("cuda" if gpu else "cpu"),
            patched(nn.Module, "to_empty", to_empty),
            patched(ddp, "all_reduce_mean", all_reduce_done_in),
            patched(ddp, "rebuild_buckets", partial(in_warmup_mode, ddp.rebuild_buckets)),
            patched(training_step, "expert_load", lambda _part: 1.0),
            patched(optim, "adamw", lambda *_states, **_options: None),  # in place, as the GPU's kernel
            patched(_flat_param, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().nbytes() > 0),
        ):
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # FSDP1 compares them
            yield Mesh(Grid.of(spec.parallel), "cpu")
    finally:
        _clear_sharding_prop_cache()  # else DTensor reuses this mesh for the next one of its shape
        dist.destroy_process_group()
        sys.excepthook = hook


torch_to_empty = nn.Module.to_empty


def to_empty(model: nn.Module, *, device: torch.device, recurse: bool = True) -> nn.Module:
    """PyTorch's version swaps tensors, which fake tensors do not allow; this one replaces them."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return torch_to_empty(model, device=device, recurse=recurse)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))
    return model


def all_reduce_done(buffer: Tensor, group: dist.ProcessGroup) -> Future[Tensor]:
    """DDP waits for the future of its all-reduce, which the fake process group never completes."""
    dist.all_reduce(buffer, group=group)
    return completed(buffer)


def all_reduce_done_in(dtype: torch.dtype, buffer: Tensor, group: dist.ProcessGroup) -> Future[Tensor]:
    sent = buffer.to(dtype)
    dist.all_reduce(sent, group=group)
    return completed(buffer.copy_(sent))


def completed(result: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(result)
    return future


class FakeTrainer(Trainer):
    """The trainer's own step on fake tensors: values cannot be read from them."""

    def __init__(self, spec: RunSpec, mesh: Mesh, stages: list[Stage], weights: Source) -> None:
        self.spec, self.mesh, self.device = spec, mesh, CPU
        self.parallel_model = parallelize(spec, mesh, CPU, weights, stages)
        self.optimizer = make_optimizer(self.parallel_model.shards, spec.model, spec.optim, spec.precision, spec.seed)
        self.loss_scale, self.engine, self.step = LossScale(spec.precision), None, 0
        self.health, self.reader, self.objective = Health(spec.health), ScalarReader(CPU), Objective()
        self.launcher = PassLauncher(self.parallel_model, self.launch_passes)

    def take_step(self) -> None:
        data = self.spec.data
        shape = data.micro_batch, data.seq
        zeros = partial(torch.zeros, shape, dtype=torch.int64)
        documents = [zeros() if data.document_mask else None for _ in range(self.spec.accumulation)]
        self.train_step([Batch(zeros(), zeros(), document) for document in documents])

    def count(self, batches: Sequence[Batch]) -> Counts:
        if self.spec.data.document_mask:
            assert self.mesh is not None
            dist.all_reduce(torch.zeros(1, dtype=torch.int64), group=self.mesh.group("dp"))
        return Counts(self.spec.tokens_per_step, self.spec.tokens_per_step)

    def reduce_scalars(self, loss: Tensor, squares: Tensor) -> Tensor:
        """The same message."""
        scalars = torch.zeros(2 + 3 * dist.get_world_size(), dtype=torch.float64)
        dist.all_reduce(scalars)
        return scalars

    def read(self, gate: UpdateGate) -> PassResult:
        return PassResult(0.0, 1.0, self.loss_scale.scale, 0, update_skipped=False)


def run_experts_evenly(moe: MoE, rows: Tensor, counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Split sizes would be read from `counts`, which is fake: rows are split evenly."""
    if group is None:
        return run_experts(moe, rows, even_split(rows.shape[0], moe.experts))
    shares = even_split(rows.shape[0], group.size())
    sizes = shares, shares, even_split(rows.shape[0], moe.experts // group.size())
    return dispatch_and_combine(moe, rows, exchange_counts(counts, group), sizes, group)


def even_split(total: int, parts: int) -> list[int]:
    """The first parts get the remainder."""
    return [total // parts + (part < total % parts) for part in range(parts)]


class WarmupMode(TorchDispatchMode):
    """For the warm-up step, in which ranks exchange values.

    A pipeline votes on whether its stages know their shapes: reading a scalar returns 1. DDP broadcasts the order of
    its gradients as int32 tensors, the only ones of that type: those are real.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1
        given = tensors_in((args, kwargs))
        integers = func is torch.ops.aten.empty.memory_format and kwargs.get("dtype") == torch.int32
        if integers or (given and not any(isinstance(tensor, FakeTensor) for tensor in given)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def in_warmup_mode(work: Callable[[Any], None], model: Any) -> None:
    with WarmupMode():
        work(model)


def simulate_step(spec: RunSpec, mesh: Mesh, stages: list[Stage]) -> Simulation:
    """Build these stages with fake tensors, and measure a step."""
    with FakeTensorMode(allow_non_fake_inputs=True), MemoryLedger() as ledger:
        run = FakeTrainer(spec, mesh, stages, lambda _name, shape: torch.empty(shape))
        group = mesh.group("ep") if mesh.size("ep") > 1 else None
        for layer in (layer for part in run.parallel_model.parts.values() for layer in moe_layers(part)):
            layer.dispatch = partial(run_experts_evenly, group=group)
        for strategy in run.parallel_model.strategies.values():
            if isinstance(strategy, ddp.DDP) and spec.precision.reduce == spec.precision.weights:
                strategy.ddp.register_comm_hook(
                    None, lambda _, bucket: all_reduce_done(bucket.buffer(), mesh.group("dp_cp"))
                )
        try:
            return measure_step(run, mesh, ledger, WarmupMode())
        except DataDependentOutputException as error:
            raise SpecError(f"this layout cannot be simulated: it depends on values of tensors ({error})") from error


def measure_step(run: FakeTrainer, mesh: Mesh, ledger: MemoryLedger, warmup: AbstractContextManager[Any]) -> Simulation:
    """Take a step inside `warmup`, then measure the next one."""
    parts, shards, resident = list(run.parallel_model.parts.values()), run.parallel_model.shards, dict[str, int]()
    for part in parts:
        ledger.watch(part, part.layers())
        ledger.name([*part.parameters(), *part.buffers()], PARAMETERS)
    ledger.name([shard.leaf for shard in shards], PARAMETERS)
    with warmup:
        run.take_step()
    ledger.name([t for s in run.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)], OPTIMIZER)

    def before_update(*_: Any) -> None:
        holders = [*(shard.leaf for shard in shards), *(p for part in parts for p in part.parameters())]
        ledger.name([p.grad for p in holders if p.grad is not None], GRADIENTS)
        resident.update(ledger.of(ledger.live))
        ledger.phase = "update"

    run.optimizer.register_step_pre_hook(before_update)
    gc.collect()
    ledger.begin("forward")
    with CommCounter(mesh) as seen:
        run.take_step()
    peak, moment = ledger.peak()
    count = sum(shard.leaf.numel() for shard in shards)
    size = sum(shard.leaf.nbytes for shard in shards)
    return Simulation(count, size, seen.table(), resident, peak, moment)
