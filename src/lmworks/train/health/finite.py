"""Before every save, and after every load: weights and optimizer states are finite.

A NaN in the optimizer state makes weights NaN in an update whose loss and gradient were finite. A checkpoint of that
step would be the newest, and every resume would fail in its first step. So it is neither saved nor resumed from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...parallel.mesh import Mesh
from ...parallel.world import collective_error
from ...spec import TrainingError
from ..position import EventRecorder, Position
from .bad_step import Health, HealthIssue, StepRejected
from .nonfinite import all_gather_object

Named = Iterable[tuple[str, Tensor]]


def check_state(state: Named, mesh: Mesh | None, health: Health, at: Position, recorder: EventRecorder) -> None:
    """On every rank, between a step and its save. The run rewinds if health.nonfinite says so, or ends."""
    per_rank = all_gather_object(first_nonfinite_tensor(state), mesh)
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
