"""Host memory that a run will take, held against what the machine has left, before any of it is taken.

To pin too much of it would end some process of the machine, and not always this one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ..plan.memory.host import available_bytes, ranks_on_host
from ..plan.memory.host_need import HostNeed, machine_need
from ..plan.offloaded import SMALLEST
from ..spec import RunSpec, SpecError
from .recompute import placed

GIB = 2**30


def refuse_full_host(spec: RunSpec, device: torch.device) -> None:
    """Every rank asks for all of its machine, while none has taken anything."""
    ranks = ranks_here(spec)
    need = machine_need(placed(spec, device), ranks, device.type)
    there = available_bytes() if need.total else None
    if there is not None and need.total > there:
        raise SpecError(refusal(spec, need, len(ranks), there))


def ranks_here(spec: RunSpec) -> Sequence[int]:
    """On this machine: as whoever started them says, or as the spec does."""
    first = int(os.environ.get("RANK") or 0) - int(os.environ.get("LOCAL_RANK") or 0)
    count = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks_on_host(spec))
    return range(first, min(first + count, spec.parallel.world))


def refusal(spec: RunSpec, need: HostNeed, ranks: int, there: int) -> str:
    layout, parts = spec.parallel, {name: size for name, size in need.to_dict().items() if size}
    asked = {
        "states": f"parallel.offload = '{layout.offload}'",
        "activations": f"parallel.offload_activations = {layout.offload_activations:g}",
        "staging": "checkpoint.asynchronous = true",
    }
    much = f"{need.total / ranks / GIB:.3g} GiB of host memory"
    if ranks > 1:
        much += f" for each of the {ranks} ranks on this machine, {need.total / GIB:.3g} GiB in all"
    text = f"{listed([asked[name] for name in parts])} need{'s' * (len(parts) == 1)} {much}"
    text += f", and {there / GIB:.3g} GiB are free; {what_fits(spec, need, ranks, there)}"
    if "activations" in parts:
        text += ", and parallel.recompute = 'selective', 'mlp' or 'full' spares memory without it"
    return text


def what_fits(spec: RunSpec, need: HostNeed, ranks: int, there: int) -> str:
    """The one change that is enough, or any of them; all of them, where none is."""
    left = {name: there - (need.total - size) for name, size in need.to_dict().items() if size}  # for this one alone
    without = {"states": "parallel.offload = 'none'", "staging": "checkpoint.asynchronous = false"}
    enough = [without[name] for name, room in left.items() if name in without and room >= 0]
    if "activations" in left:
        whole = left["activations"] // ranks - spec.model.layers * SMALLEST  # a block's last piece may hold a byte
        if most := max(0, whole // (GIB // 10)) / 10:
            enough.append(f"parallel.offload_activations = {most:g}")
        without["activations"] = "parallel.offload_activations = 0"
    if enough:
        return f"{' or '.join(enough)} would fit"
    if list(left) == ["activations"]:
        return "nothing worth the way would fit"
    return f"{listed([without[name] for name in left])} together would fit"


def listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
