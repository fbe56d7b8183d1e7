"""Models and optimizer states that rest in host memory while a phase does not use them (align.offload = "resting").

What each phase needs on the device is in `plan/passes.py`, which the planner reads, too. The tensors stay the same
objects: the memory under them is given back, and taken again with their numbers before the phase that uses them. So
optimizers and sharding do not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..parallel.parallel_model import ParallelModel
from ..plan.passes import OPTIMIZER, WEIGHTS, Part, needed

Tensors = Callable[[], Iterable[Tensor]]


class Residency:
    """Without any part, nothing is moved."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.device, self.enabled = device, enabled
        self.parts: dict[Part, HostOffload] = {}

    def add_model(self, name: str, model: ParallelModel, frozen: bool) -> None:
        """The weights of a model that has them for itself."""
        held = [parameter for part in model.parts.values() for parameter in part.parameters()]
        self.add((name, WEIGHTS), lambda: held, frozen)

    def add_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Its states come with the first step."""
        self.add((name, OPTIMIZER), lambda: [v for state in optimizer.state.values() for v in state.values()], False)

    def add(self, part: Part, tensors: Tensors, frozen: bool) -> None:
        """It rests from now on, until a phase needs it."""
        if self.enabled:
            self.parts[part] = HostOffload(tensors, self.device, frozen)
            self.parts[part].release()

    def enter(self, phase: str, model: str) -> None:
        """A phase in which `model` computes: what it does not need makes room before the rest returns."""
        wanted = needed(phase, model)
        for part, rest in self.parts.items():
            if part not in wanted:
                rest.release()
        for part, rest in self.parts.items():
            if part in wanted:
                rest.restore()


class HostOffload:
    """Tensors and one host buffer for all of them, pinned where they lie on a GPU.

    Copies are queued on the current stream, like the kernels before and after them; the host does not wait.
    """

    def __init__(self, tensors: Tensors, device: torch.device, frozen: bool) -> None:
        self.tensors, self.device, self.frozen = tensors, device, frozen
        self.buffer: Tensor | None = None
        self.resting: list[tuple[torch.UntypedStorage, Tensor]] | None = None  # with its part of the buffer

    @torch.no_grad()
    def release(self) -> None:
        if self.resting is not None:
            return
        storages = self.storages()
        total, known = sum(storage.nbytes() for storage in storages), self.buffer is not None and self.frozen
        if self.buffer is None or self.buffer.numel() != total:
            self.buffer = torch.empty(total, dtype=torch.uint8, pin_memory=self.device.type == "cuda" and total > 0)
        parts = self.buffer.split([storage.nbytes() for storage in storages])
        self.resting = list(zip(storages, parts, strict=True))
        for storage, part in self.resting:
            if not known:
                part.copy_(as_bytes(storage), non_blocking=True)
            storage.resize_(0)

    @torch.no_grad()
    def restore(self) -> None:
        for storage, part in self.resting or ():
            storage.resize_(part.numel())
            as_bytes(storage).copy_(part, non_blocking=True)
        self.resting = None

    def storages(self) -> list[torch.UntypedStorage]:
        """Each once, those on the device alone."""
        found = [local(tensor).untyped_storage() for tensor in self.tensors()]
        distinct = {storage.data_ptr(): storage for storage in found if storage.nbytes()}
        return [storage for storage in distinct.values() if storage.device.type == self.device.type]


def local(tensor: Tensor) -> Tensor:
    """This rank's part, where FSDP2 has made a DTensor of it."""
    own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
