"""Tell every block what it computes again in the backward pass, and what it keeps in host memory until then.

Which policy each gets, and how many bytes it sends, is the planner's arithmetic.
"""

from __future__ import annotations

import os

import torch

from ..model import GPT
from ..model.offload import Offload
from ..plan.memory.host import available_bytes, ranks_on_host
from ..plan.offloaded import SMALLEST, pinned, sent, shares
from ..plan.policies import policies, waiting_bytes
from ..spec import RunSpec, SpecError


def choose_recompute(part: GPT, spec: RunSpec, device: torch.device) -> None:
    blocks = part.layers()
    chosen = policies(placed(spec, device), [block.attention.layer for block in blocks])
    for block, policy in zip(blocks, chosen, strict=True):
        block.recompute = policy


def offload_activations(part: GPT, spec: RunSpec, device: torch.device) -> None:
    """After its blocks have their policies. Refused here where host memory is short: to pin too much of it would end
    some process of the machine, and not always this one."""
    if spec.parallel.offload_activations:
        blocks = part.layers()
        refuse_more_than_there_is(placed(spec, device), [block.recompute for block in blocks])
        part.offload = Offload(shares(spec, len(blocks)), blocks[0].parameters())


def placed(spec: RunSpec, device: torch.device) -> RunSpec:
    """Where it runs, which a spec may leave open: what blocks keep depends on whose kernels run."""
    return spec.replace(cluster=spec.cluster.replace(device=device.type)) if spec.cluster.device == "auto" else spec


def refuse_more_than_there_is(spec: RunSpec, chosen: list[str]) -> None:
    each = pinned(sent(spec, chosen, waiting_bytes(spec)))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks_on_host(spec))
    there = available_bytes()
    if there is None or ranks * each <= there:
        return
    whole = there // ranks - len(chosen) * SMALLEST  # every block's last piece may be filled by a byte
    asked, most = spec.parallel.offload_activations, max(0, whole // (2**30 // 10)) / 10
    need = f"{each / 2**30:.3g} GiB of host memory"
    if ranks > 1:
        need += f" for each of the {ranks} ranks on this machine, {ranks * each / 2**30:.3g} GiB in all"
    fits = f"{most:g} would fit" if most else "nothing worth the way would fit"
    raise SpecError(
        f"parallel.offload_activations = {asked:g} needs {need}, and {there / 2**30:.3g} GiB are free; {fits}, and "
        "parallel.recompute = 'selective', 'mlp' or 'full' spares memory without it"
    )
