"""Memory of a step by category: every storage that an operation allocates, its bytes, and what it is for.

A storage is tracked from the operation that allocates it until it is freed, or resized to nothing, as FSDP does with
gathered weights. Its category often shows only later (a tensor *becomes* a gradient), so the ledger records sizes as
they change and categories when they are known; sums are taken at the end.

It works alike on real tensors and on those of FakeTensorMode, which have sizes but no memory.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PARAMETERS, OPTIMIZER, GRADIENTS = "parameters", "optimizer states", "gradients"
GATHERED, ACTIVATIONS, BUFFERS, OTHER = "gathered weights", "activations", "communication buffers", "other"
# Where a storage serves several purposes, the first counts: a weight that is sent is still a weight.
CATEGORIES = (PARAMETERS, OPTIMIZER, GRADIENTS, GATHERED, ACTIVATIONS, BUFFERS, OTHER)

COMMUNICATION = ("c10d", "_c10d_functional", "fsdp")  # namespaces of operators
Bytes = dict[str, int]  # by category


class MemoryLedger(TorchDispatchMode):
    """Enter it before the model is made; `begin` where the step to be accounted for begins."""

    def __init__(self) -> None:
        super().__init__()
        self.serial = itertools.count()
        self.ids: dict[int, int] = {}  # address of a living storage → its number
        self.live: dict[int, int] = {}  # number → bytes, in the order of making
        self.category_of: dict[int, int] = {}  # number → index of its category
        self.changes: list[tuple[int, int, str]] = []  # (number, bytes from now on, what the step was doing)
        self.start: dict[int, int] = {}  # what lived when the step began
        self.phase = ""

    def __enter__(self) -> MemoryLedger:
        self.resize = torch.UntypedStorage.resize_
        ledger = self

        def resize(storage: Any, size: int) -> Any:
            ledger.resized(storage, size)
            return ledger.resize(storage, size)

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self.resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with the local tensors
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self.track(tensor)
        if func.namespace in COMMUNICATION:
            self.name(tensors_in((args, kwargs, out)), BUFFERS)
            if func._schema.name == "fsdp::chunk_cat":  # whole gradients, on their way into a reduce-scatter
                self.name(tensors_in(args[0]), GRADIENTS)
        return out

    # --- storages ---------------------------------------------------------------------------------------

    def track(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self.ids:
            self.ids[address] = next(self.serial)
            self.change(self.ids[address], storage.nbytes())
            weakref.finalize(storage, self.untrack, address)
        return self.ids[address]

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        number = self.ids.get(storage._cdata)
        if number is not None:
            self.change(number, size)
            if size == 0:
                self.set_category(number, GATHERED)  # nothing but gathered weights is emptied and filled again

    def untrack(self, address: int) -> None:
        self.change(self.ids.pop(address), 0)

    def change(self, number: int, size: int) -> None:
        if size:
            self.live[number] = size
        else:
            self.live.pop(number, None)
        self.changes.append((number, size, "backward" if torch._C._current_graph_task_id() >= 0 else self.phase))

    # --- purposes ---------------------------------------------------------------------------------------

    def name(self, tensors: Iterable[Tensor], category: str) -> None:
        for tensor in tensors:
            self.set_category(self.track(plain(tensor)), category)

    def set_category(self, number: int, category: str) -> None:
        index = CATEGORIES.index(category)
        self.category_of[number] = min(index, self.category_of.get(number, index))

    def watch(self, part: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Activations are what a forward pass has allocated and left alive; of a block also in its recomputation."""
        for module in (part, *blocks):
            begins: list[int] = []

            def before(_module: nn.Module, _inputs: Any, begins: list[int] = begins) -> None:
                begins.append(next(self.serial))

            def after(module: nn.Module, _inputs: Any, _out: Any, begins: list[int] = begins) -> None:
                begin = begins.pop()
                if module is part or torch._C._current_graph_task_id() >= 0:
                    for number in self.live:
                        if number > begin:
                            self.set_category(number, ACTIVATIONS)

            module.register_forward_pre_hook(before)
            module.register_forward_hook(after, always_call=True)  # recomputation ends with an exception

    def of(self, live: dict[int, int]) -> Bytes:
        """Bytes by category."""
        total = dict.fromkeys(CATEGORIES, 0)
        for number, size in live.items():
            total[CATEGORIES[self.category_of.get(number, len(CATEGORIES) - 1)]] += size
        return total

    # --- a step -----------------------------------------------------------------------------------------

    def begin(self, phase: str) -> None:
        self.start, self.changes, self.phase = dict(self.live), [], phase

    def peak(self) -> tuple[Bytes, str]:
        """By category at the highest moment since `begin`, and what the step was doing then."""
        live = dict(self.start)
        total = highest = sum(live.values())
        when, phase = 0, self.changes[0][2] if self.changes else ""
        for index, (number, size, doing) in enumerate(self.changes):
            total += size - live.get(number, 0)
            live[number] = size
            if total > highest:
                highest, when, phase = total, index + 1, doing
        live = dict(self.start)
        for number, size, _ in self.changes[:when]:
            live[number] = size
        return self.of(live), phase


def tensors_in(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def plain(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
