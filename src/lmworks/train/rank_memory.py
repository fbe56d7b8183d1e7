"""What one rank of a strategy holds and sends, read from its live tensors in a real step.

Bytes are those of the storages that tensors lie in, each counted once; what a storage has beyond its tensors is
padding. They are read just before the update of the third step, when gradients are complete: states come with the first
step, and DDP's buckets take their final form in the second.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..parallel.comm_counter import CommCounter, Row
from ..parallel.memory_ledger import GRADIENTS, OPTIMIZER, PARAMETERS, Bytes, MemoryLedger
from ..parallel.optimizer_offload import HostOptimizer
from ..parallel.parallel_model import ParallelModel
from ..plan.memory.rank_weights import Resident
from ..spec import RunSpec
from . import Trainer

STEPS_BEFORE = 2  # until every buffer has its final form


@dataclass(frozen=True)
class RankMemory:
    """Of one rank, in one step."""

    resident: Resident
    dtypes: dict[str, str]  # of parameters, gradients, optimizer states
    gradients_after: int  # bytes of gradients that are still there when the step is over
    collectives: list[Row]
    peak: Bytes  # by category, at the highest moment
    moment: str


def measure_rank_memory(rank: int, spec: RunSpec, folder: Path) -> RankMemory:
    """For `on_ranks`: train three steps, and measure the third."""
    trainer = Trainer(spec, folder, quiet=True, force=True)  # the study has counted all that it builds
    ledger, seen = MemoryLedger(), CommCounter(trainer.mesh)
    read: list[tuple[Resident, dict[str, str]]] = []
    with ExitStack() as modes:
        modes.enter_context(ledger)
        trainer.build()
        parts = list(trainer.parallel_model.parts.values())
        for part in parts:
            ledger.watch(part, part.layers())
        ledger.name([local(p) for p in parameters(trainer)], PARAMETERS)
        for _ in range(STEPS_BEFORE):
            train_one_step(trainer)
        ledger.name(states(trainer), OPTIMIZER)

        def before_update(*_: Any) -> None:
            ledger.name([local(g) for g in gradients(trainer)], GRADIENTS)
            held = read_resident(trainer)
            read.append((held, {what: dtype_names(tensors) for what, tensors in tensors_of(trainer).items()}))
            ledger.phase = "update"

        trainer.optimizer.register_step_pre_hook(before_update)
        gc.collect()
        ledger.begin("forward")
        modes.enter_context(seen)
        train_one_step(trainer)
        peak, moment = ledger.peak()
        after = ledger.of(ledger.live)[GRADIENTS]
    resident, dtypes = read[0]
    # DeepSpeed's optimizer is called for one group of weights after another, each with its gradients.
    resident = replace(resident, gradients=sum(found.gradients for found, _ in read))
    return RankMemory(resident, dtypes, after, seen.table(), peak, moment)


def train_one_step(trainer: Trainer) -> dict[str, Any]:
    """As the training loop does, without what it records."""
    values = trainer.train_step(trainer.batches_at(trainer.cursor))
    trainer.step += 1
    trainer.cursor += 1
    return values


def tensors_of(trainer: Trainer) -> dict[str, list[Tensor]]:
    return {"parameters": parameters(trainer), "gradients": gradients(trainer), "optimizer": states(trainer)}


def read_resident(trainer: Trainer) -> Resident:
    """Bytes now, on the device and on the host."""
    held = sizes(**tensors_of(trainer))
    return replace(held, master=storage_bytes(masters(trainer)))


def sizes(parameters: list[Tensor], gradients: list[Tensor], optimizer: list[Tensor]) -> Resident:
    """What storages have beyond their tensors is padding; of optimizer states it counts as states."""
    held, made = element_bytes(parameters), element_bytes(gradients)
    return Resident(
        parameters=held,
        gradients=made,
        optimizer=storage_bytes(optimizer),
        parameter_padding=storage_bytes(parameters) - held,
        gradient_padding=storage_bytes(gradients) - made,
    )


class ResidencyReader:
    """What a rank holds on its device and on its host just before its next update, separated as its layout does.

    On a CPU both are one memory, so the layout decides what belongs to which. With offload = 'optimizer' gradients are
    gone from the device before the update: they are read when the inner strategy frees them.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.device = self.host = Resident()
        self.passing: list[Resident] = []
        for stage, strategy in trainer.parallel_model.strategies.items():
            if isinstance(strategy, HostOptimizer):
                self.watch(list(trainer.parallel_model.parts[stage].parameters()), strategy.inner)
        self.hook = trainer.optimizer.register_step_pre_hook(self.read)

    def watch(self, weights: list[Any], inner: Any) -> None:
        zero_grad = inner.zero_grad

        def noted() -> None:
            holders = [*weights, *(shard.leaf for shard in inner.shards())]
            self.passing.append(sizes([], with_gradients(holders), []))
            zero_grad()

        inner.zero_grad = noted

    def read(self, *_: Any) -> None:
        self.hook.remove()
        trainer, leaves = self.trainer, [shard.leaf for shard in self.trainer.parallel_model.shards]
        if trainer.spec.parallel.offload == "full":
            self.host = read_resident(trainer)
        elif trainer.spec.parallel.offload == "none":
            self.device = read_resident(trainer)
        else:
            passing = sum(one.gradients for one in self.passing), sum(one.gradient_padding for one in self.passing)
            here = sizes(parameters(trainer), [], [])
            self.device = replace(here, gradients=passing[0], gradient_padding=passing[1])
            held = sizes(leaves, with_gradients(leaves), states(trainer))
            self.host = replace(held, master=storage_bytes(masters(trainer)))


def with_gradients(holders: Iterable[Tensor]) -> list[Tensor]:
    return [holder.grad for holder in holders if holder.grad is not None]


def parameters(trainer: Trainer) -> list[Tensor]:
    """DeepSpeed's stage 3 empties a weight; this rank's part is beside it."""
    return [getattr(p, "ds_tensor", p) for p in held_parameters(trainer.parallel_model)]


def held_parameters(model: ParallelModel) -> list[Tensor]:
    return [p for part in model.parts.values() for p in part.parameters()]


def masters(trainer: Trainer) -> list[Tensor]:
    """What makes the weights fp32 numbers: the bits that bf16 lacks, or DeepSpeed's second copy."""
    if trainer.engine is not None:
        return trainer.engine.fp32_partitions()
    return optimizer_tensors(trainer, lambda name: name == "low")


def gradients(trainer: Trainer) -> list[Tensor]:
    """Of the weights, and of the leaves that the optimizer updates in their place."""
    weights = [p for part in trainer.parallel_model.parts.values() for p in part.parameters()]
    engine = trainer.engine
    leaves = [s.leaf for s in trainer.parallel_model.shards] if engine is None else engine.fp32_partitions()
    return with_gradients((*weights, *leaves))


def states(trainer: Trainer) -> list[Tensor]:
    return optimizer_tensors(trainer, lambda name: name != "low")


def optimizer_tensors(trainer: Trainer, wanted: Callable[[str], bool]) -> list[Tensor]:
    """Tensors of the optimizer state with such names."""
    every = [pair for state in trainer.optimizer.state.values() for pair in state.items()]
    return [value for name, value in every if isinstance(value, Tensor) and wanted(name)]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def element_bytes(tensors: Iterable[Tensor]) -> int:
    """Of different elements: a leaf is often a view of its weight."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for tensor in map(local, tensors):
        begin = int(tensor.storage_offset()) * tensor.element_size()
        spans.setdefault(tensor.untyped_storage()._cdata, []).append((begin, begin + tensor.nbytes))
    total = 0
    for found in spans.values():
        end = 0
        for begin, stop in sorted(found):
            total += max(0, stop - max(begin, end))
            end = max(end, stop)
    return total


def dtype_names(tensors: Iterable[Tensor]) -> str:
    names = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    return ", ".join(sorted(names))
