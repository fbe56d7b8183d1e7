"""Tell every block what it computes again in the backward pass, and what it keeps in host memory until then.

Which policy each gets, and how many bytes it sends, is the planner's arithmetic.
"""

from __future__ import annotations

import torch

from ..model import GPT
from ..model.activation_offload import Offload
from ..plan.activation_offload import block_budgets
from ..plan.policies import policies
from ..spec import RunSpec


def choose_recompute(part: GPT, spec: RunSpec, device: torch.device) -> None:
    blocks = part.layers()
    chosen = policies(with_device(spec, device), [block.attention.layer for block in blocks])
    for block, policy in zip(blocks, chosen, strict=True):
        block.recompute = policy


def offload_activations(part: GPT, spec: RunSpec) -> None:
    if spec.parallel.offload_activations:
        blocks = part.layers()
        part.offload = Offload(block_budgets(spec, len(blocks)), blocks[0].parameters())


def with_device(spec: RunSpec, device: torch.device) -> RunSpec:
    """Where it runs, which a spec may leave open: what blocks keep depends on whose kernels run."""
    return spec.replace(cluster=spec.cluster.replace(device=device.type)) if spec.cluster.device == "auto" else spec
