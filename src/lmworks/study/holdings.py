"""What one rank of a strategy holds and sends, read from its live tensors in a real step.

Bytes are those of the storages that tensors lie in, each counted once; what a storage has beyond its tensors is
padding. They are read just before the update of the third step, when gradients are complete: states come with the first
step, and DDP's buckets take their final form in the second.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..parallel.traffic import Row, Traffic
from ..plan.residency import Resident
from ..spec import RunSpec
from ..train import Trainer
from .ledger import GRADIENTS, OPTIMIZER, PARAMETERS, Bytes, Ledger

STEPS_BEFORE = 2  # until every buffer has its final form


@dataclass(frozen=True)
class Holdings:
    """Of one rank, in one step."""

    resident: Resident
    dtypes: dict[str, str]  # of parameters, gradients, optimizer states
    gradients_after: int  # bytes of gradients that are still there when the step is over
    collectives: list[Row]
    peak: Bytes  # by category, at the highest moment
    moment: str


def observe(rank: int, spec: RunSpec, folder: Path) -> Holdings:
    """For `on_ranks`: train three steps, and tell of the third."""
    trainer = Trainer(spec, folder, quiet=True)
    ledger, seen = Ledger(), Traffic(trainer.mesh)
    read: list[tuple[Resident, dict[str, str]]] = []
    with ExitStack() as modes:
        modes.enter_context(ledger)
        trainer.build()
        parts = list(trainer.laid.parts.values())
        for part in parts:
            ledger.watch(part, part.layers())
        ledger.name([local(p) for p in parameters(trainer)], PARAMETERS)
        for _ in range(STEPS_BEFORE):
            take_step(trainer)
        ledger.name(states(trainer), OPTIMIZER)

        def before_update(*_: Any) -> None:
            ledger.name([local(g) for g in gradients(trainer)], GRADIENTS)
            read.append(hold(trainer))
            ledger.phase = "update"

        trainer.optimizer.register_step_pre_hook(before_update)
        gc.collect()
        ledger.begin("forward")
        modes.enter_context(seen)
        take_step(trainer)
        peak, moment = ledger.peak()
        after = ledger.of(ledger.live)[GRADIENTS]
    resident, dtypes = read[0]
    # DeepSpeed's optimizer is called for one group of weights after another, each with its gradients.
    resident = replace(resident, gradients=sum(found.gradients for found, _ in read))
    return Holdings(resident, dtypes, after, seen.table(), peak, moment)


def take_step(trainer: Trainer) -> dict[str, Any]:
    """As the training loop does, without what it records."""
    values = trainer.train_step(trainer.batches.at(trainer.cursor))
    trainer.step += 1
    trainer.cursor += 1
    return values


def hold(trainer: Trainer) -> tuple[Resident, dict[str, str]]:
    """Bytes now, and in which formats."""
    held = {"parameters": parameters(trainer), "gradients": gradients(trainer), "optimizer": states(trainer)}
    size = {what: element_bytes(tensors) for what, tensors in held.items()}
    spare = {what: storage_bytes(tensors) - size[what] for what, tensors in held.items()}
    resident = Resident(
        parameters=size["parameters"],
        gradients=size["gradients"],
        master=storage_bytes(masters(trainer)),
        optimizer=size["optimizer"] + spare["optimizer"],
        parameter_padding=spare["parameters"],
        gradient_padding=spare["gradients"],
    )
    return resident, {what: formats(tensors) for what, tensors in held.items()}


def parameters(trainer: Trainer) -> list[Tensor]:
    """DeepSpeed's stage 3 empties a weight and keeps this rank's part of it beside."""
    found = [p for part in trainer.laid.parts.values() for p in part.parameters()]
    return [getattr(p, "ds_tensor", p) for p in found]


def masters(trainer: Trainer) -> list[Tensor]:
    """A second copy of the weights for the optimizer: DeepSpeed's alone."""
    return trainer.engine.flats() if trainer.engine is not None else []


def gradients(trainer: Trainer) -> list[Tensor]:
    """Of the weights, and of the leaves that the optimizer updates in their place."""
    weights = [p for part in trainer.laid.parts.values() for p in part.parameters()]
    leaves = [shard.leaf for shard in trainer.laid.shards] if trainer.engine is None else masters(trainer)
    return [holder.grad for holder in (*weights, *leaves) if holder.grad is not None]


def states(trainer: Trainer) -> list[Tensor]:
    return [t for state in trainer.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]


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


def formats(tensors: Iterable[Tensor]) -> str:
    names = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    return ", ".join(sorted(names))
