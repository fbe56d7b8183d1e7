"""Activations that wait in host memory between forward and backward pass: how many bytes each block sends there.

`parallel.offload_activations` is dealt evenly to all blocks but the last two, whose backward pass comes at once. A
block cannot send more than it keeps, and of one whose checkpoint holds what it keeps only the input. Small tensors
stay, and so do whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..spec import RunSpec
from ..spec.layout import STAY
from .case import Case, Number
from .network import Network
from .saved_activations import keepers, stream_bytes

PAGE = 4096  # bytes
SMALLEST = 2**20  # bytes of a tensor that leaves, and of a piece of host memory: as in model/activation_offload.py


def shares(spec: RunSpec, blocks: int) -> list[int]:
    """Bytes that each block may send."""
    if not spec.parallel.offload_activations:
        return [0] * blocks
    each = int(spec.parallel.offload_activations * 2**30 / (blocks - STAY)) // PAGE * PAGE
    return [each] * (blocks - STAY) + [0] * STAY


def may_wait(net: Network, recompute: str) -> Any:
    """Bytes of what one block keeps that could leave, where its hooks see them."""
    if recompute == "none":
        return large((op.copies, size) for op in net.block for size in op.saved)
    found = large([(1, stream_bytes(net))])
    if recompute == "full":
        return found
    return found + large((op.copies, size) for op in keepers(net, recompute) for size in op.dear)


def large(tensors: Iterable[tuple[Number, Number]]) -> Any:
    """Bytes of those that are, of (how many there are, bytes of one)."""
    return sum(count * np.where(np.greater_equal(size, SMALLEST), size, 0)[()] for count, size in tensors)


def sent(spec: RunSpec, policies: Sequence[str], most: Mapping[str, float]) -> list[float]:
    """Bytes that each block sends, by its recompute policy; `most` has what a block `may_wait` for under any."""
    layout = spec.parallel
    # Of a compiled block that talks to nobody the compiler keeps what a policy asks for, and the hooks see it.
    seen = layout.compile and layout.tp * layout.cp * layout.ep == 1
    limits = [most[policy if seen or policy == "none" else "full"] for policy in policies]
    return [min(share, limit) for share, limit in zip(shares(spec, len(policies)), limits, strict=True)]


def pinned(sizes: Iterable[float]) -> int:
    """Host memory for what blocks send: whole pieces for each."""
    return sum(math.ceil(size / SMALLEST) * SMALLEST for size in sizes)


# --- in closed form -------------------------------------------------------------------------------------


def sent_by_all(case: Case, net: Network) -> Number:
    """Of all blocks of a micro-batch."""
    return sum((count * size for count, size in senders(case, net)), 0.0 * net.load.tokens)


def pinned_by_all(case: Case, net: Network) -> Number:
    pieces = ((count, np.ceil(size / SMALLEST)) for count, size in senders(case, net))
    return sum((count * number * SMALLEST for count, number in pieces), 0.0 * net.load.tokens)


def senders(case: Case, net: Network) -> Iterator[tuple[Number, Number]]:
    """Blocks that are alike: how many, and what each sends."""
    if not np.any(case.offload_activations):
        return
    blocks = case.model.layers - STAY
    share = case.offload_activations * 2**30 / blocks // PAGE * PAGE
    every = case.recompute_every if case.recompute == "full" else 1
    again: Number = 0 if case.recompute == "none" else np.ceil(blocks / every)
    if np.any(np.less(again, blocks)):
        yield blocks - again, np.minimum(share, may_wait(net, "none"))
    if case.recompute != "none":
        alone = case.software.graph & np.equal(case.tp * case.cp * case.ep, 1)
        yield again, np.minimum(share, np.where(alone, may_wait(net, case.recompute), may_wait(net, "full")))
