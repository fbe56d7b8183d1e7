"""Tell every block what it computes again in the backward pass; which policy each gets is the planner's arithmetic."""

from __future__ import annotations

from ..model import GPT
from ..plan.policies import policies
from ..spec import RunSpec


def choose_recompute(part: GPT, spec: RunSpec) -> None:
    blocks = part.layers()
    for block, policy in zip(blocks, policies(spec, [block.attention.layer for block in blocks]), strict=True):
        block.recompute = policy
