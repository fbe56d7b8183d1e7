"""Activations that wait in host memory between forward and backward pass: how many bytes each block sends there.

`parallel.offload_activations` is dealt evenly to all blocks but the last two, whose backward pass comes at once. A
block cannot send more than it keeps, and of one whose checkpoint holds what it keeps only the input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..spec import RunSpec
from ..spec.layout import STAY
from .case import Case, Number
from .kept import kept
from .network import Network

PAGE = 4096  # bytes


def shares(spec: RunSpec, blocks: int) -> list[int]:
    """Bytes that each block may send."""
    if not spec.parallel.offload_activations:
        return [0] * blocks
    each = int(spec.parallel.offload_activations * 2**30 / (blocks - STAY)) // PAGE * PAGE
    return [each] * (blocks - STAY) + [0] * STAY


def sent(spec: RunSpec, policies: Sequence[str], each: Mapping[str, float]) -> list[float]:
    """Bytes that each block sends, by its recompute policy; `each` has what a block keeps under any."""
    layout = spec.parallel
    # Of a compiled block that talks to nobody the compiler keeps what a policy asks for, and the hooks see it.
    seen = layout.compile and layout.tp * layout.cp * layout.ep == 1
    most = {policy: each[policy] if seen or policy == "none" else each["full"] for policy in policies}
    return [min(share, most[policy]) for share, policy in zip(shares(spec, len(policies)), policies, strict=True)]


def sent_by_all(case: Case, net: Network) -> Number:
    """The same in closed form, of all blocks of a micro-batch that are alike."""
    senders = case.model.layers - STAY
    if not case.offload_activations:
        return 0.0 * net.load.tokens
    most, least = kept(net, case.recompute)[1], kept(net, "full")[1]
    if case.recompute != "none":
        most = np.where(case.software.graph & np.equal(case.tp * case.cp * case.ep, 1), most, least)
    return senders * np.minimum(case.offload_activations * 2**30 / senders, most)
