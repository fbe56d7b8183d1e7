"""NaN and Inf: where one began (a weight, a module, a gradient), and the check that saved and loaded state is finite.

A NaN in the optimizer state makes weights NaN in an update whose loss and gradient were finite. A checkpoint of that
step would be the newest, and every resume would fail in its first step. So it is neither saved nor resumed from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...model import GPT
from ...parallel.data_parallel import Shard, unwrapped
from ...parallel.mesh import Mesh
from ...parallel.world import all_gather_object, collective_error
from ...spec import TrainingError
from ..train_state import EventRecorder, Position
from .bad_step import Health, HealthIssue, StepRejected

FROM_WEIGHT = ", from the weight"


def first_nonfinite(shards: list[Shard]) -> tuple[str | None, int | None, str]:
    """The weight that is not finite, or the gradient in which it began; its rank; and both as text.

    The rank is None if there is only one, or if all have it: a reduced gradient is bad on every rank.
    """
    weight = next((shard.name for shard in shards if not shard.leaf.isfinite().all()), None)
    # Backward runs from the last parameter to the first, so it began in the last bad gradient.
    broken = (s.name for s in reversed(shards) if s.leaf.grad is not None and not s.leaf.grad.isfinite().all())
    names = all_gather_object((weight, next(broken, None)))
    weights = [(name, rank) for rank, (name, _) in enumerate(names) if name]
    gradients = [(name, rank) for rank, (_, name) in enumerate(names) if name][::-1]
    for found, prefix in ((weights, FROM_WEIGHT), (gradients, ", first in the gradient of")):
        if found:
            name, rank = found[0]
            alone = len(found) < len(names)
            return name, rank if alone else None, f"{prefix} {name}" + (f" on rank {rank}" if alone else "")
    return None, None, ""


class FirstNonfiniteModule:
    """While active, finds the first module with finite inputs and an output that is not.

    Inner modules end first, so it is the innermost. Operations between modules (attention itself, residual sums) are
    attributed to the module around them.
    """

    def __init__(self, parts: dict[int, GPT]) -> None:
        self.parts = parts  # by pipeline stage
        self.found: tuple[int, int, str] | None = None  # stage, order, name
        self.seen = 0
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        self.compiled: list[tuple[nn.Module, Any]] = []

    def __enter__(self) -> Self:
        for stage, part in self.parts.items():
            for name, module in part.named_modules():
                self.handles.append(module.register_forward_hook(self.hook(stage, unwrapped(name)), with_kwargs=True))
                if module._compiled_call_impl is not None:  # compiled code would not call the hooks inside
                    self.compiled.append((module, module._compiled_call_impl))
                    module._compiled_call_impl = None
        return self

    def hook(self, stage: int, name: str) -> Any:
        def look(_module: nn.Module, inputs: Any, named: dict[str, Any], output: Any) -> None:
            self.seen += 1
            earlier = self.found is not None and self.found[0] <= stage
            if not earlier and all_finite(tensors_in((inputs, *named.values()))) and not all_finite(tensors_in(output)):
                self.found = stage, self.seen, name or "the loss"

        return look

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        for module, compiled in self.compiled:
            module._compiled_call_impl = compiled

    def name(self) -> tuple[str | None, int | None]:
        """The earliest module of all ranks, and its rank: earlier pipeline stages feed later ones."""
        found = [(*one, rank) for rank, one in enumerate(all_gather_object(self.found)) if one is not None]
        if not found:
            return None, None
        _, _, name, rank = min(found, key=lambda one: (one[0], one[1], one[3]))
        return name, rank


def tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())


# --- saved state -----------------------------------------------------------------------------------------


Named = Iterable[tuple[str, Tensor]]


def check_state(state: Named, mesh: Mesh | None, health: Health, at: Position, recorder: EventRecorder) -> None:
    """On every rank, between a step and its save. The run rewinds if health.nonfinite = 'rewind', or ends."""
    per_rank = all_gather_object(first_nonfinite_tensor(state))
    found = [(rank, bad) for rank, bad in enumerate(per_rank) if bad]
    if not found:
        return
    rank, (name, count) = found[0]
    what = f"{name} has {count:,} value{'' if count == 1 else 's'} of NaN or Inf"
    where = "" if mesh is None else f" on rank {rank}"
    action = health.spec.nonfinite
    facts = {"reason": "nonfinite", "action": action, "cursor": at.cursor - 1, "what": what + where}
    facts |= {"parameter": name, "rank": None if mesh is None else rank, "values": count}
    recorder.event("fault", at.step, **facts)
    if action == "rewind" and not health.actions_exhausted(at.cursor):
        health.record_action(at.cursor)
        raise StepRejected(HealthIssue("nonfinite", "rewind", what, where, taken=True))
    raise collective_error(
        TrainingError(
            f"step {at.step}: after the update {what}{where}; nothing of it was saved, and the newest checkpoint "
            f"is from before: resume from it with lmworks resume {recorder.folder.path}; if it happens again, lower "
            f"optim.lr in {recorder.folder.spec_path}"
        )
    )


def named_tensors(tree: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Of a state in sections, as it is saved and loaded; the local shard of DTensors."""
    for section, table in tree.items():
        for name, value in table.items():
            yield f"{section}.{name}", value.to_local() if hasattr(value, "to_local") else value


@torch.no_grad()
def first_nonfinite_tensor(named: Named) -> tuple[str, int] | None:
    """The first tensor that is not finite, and how many values. One synchronisation per device."""
    devices: dict[torch.device, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in named:
        if tensor.is_floating_point() and tensor.numel():
            devices[tensor.device].append((name, tensor))
    for some in devices.values():
        norms = torch._foreach_norm([tensor for _, tensor in some])  # one pass, with a finite sum if all are finite
        fine = torch.stack([norm.double() for norm in norms]).isfinite().tolist()
        for (name, tensor), good in zip(some, fine, strict=True):
            if not good and (count := tensor.numel() - int(tensor.isfinite().sum())):  # squares alone may overflow
                return name, count
    return None
