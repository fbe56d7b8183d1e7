"""Activation offload: bytes of each block in host memory between forward and backward pass.

`parallel.offload_activations` is shared evenly by all blocks but the last two, whose backward pass comes at once. A
block offloads at most what it saves; a checkpointed block only its input. Small tensors and integer tensors stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..spec import RunSpec
from ..spec.layout import RESIDENT_BLOCKS
from .case import Case, Number
from .network import Network
from .saved_activations import selective_ops, stream_bytes

PAGE_BYTES = 4096
# Smallest tensor that is offloaded, and unit of pinned host memory; as in model/activation_offload.py.
MIN_TENSOR_BYTES = 2**20


def block_budgets(spec: RunSpec, blocks: int) -> list[int]:
    """Bytes that each block may offload."""
    if not spec.parallel.offload_activations:
        return [0] * blocks
    each = int(spec.parallel.offload_activations * 2**30 / (blocks - RESIDENT_BLOCKS)) // PAGE_BYTES * PAGE_BYTES
    return [each] * (blocks - RESIDENT_BLOCKS) + [0] * RESIDENT_BLOCKS


def offloadable_bytes(net: Network, recompute: str) -> Any:
    """Saved bytes of one block that saved-tensor hooks can offload."""
    if recompute == "none":
        return large_tensor_bytes((op.copies, size) for op in net.block for size in op.saved)
    found = large_tensor_bytes([(1, stream_bytes(net))])
    if recompute == "full":
        return found
    return found + large_tensor_bytes(
        (op.copies, size) for op in selective_ops(net, recompute) for size in op.saved_selective
    )


def large_tensor_bytes(tensors: Iterable[tuple[Number, Number]]) -> Any:
    """Bytes of tensors of at least `MIN_TENSOR_BYTES`; `tensors`: (count, bytes of one)."""
    return sum(count * np.where(np.greater_equal(size, MIN_TENSOR_BYTES), size, 0)[()] for count, size in tensors)


def offloaded_bytes(spec: RunSpec, policies: Sequence[str], most: Mapping[str, float]) -> list[float]:
    """Bytes that each block offloads under its recompute policy; `most`: `offloadable_bytes` of every policy."""
    layout = spec.parallel
    # In a compiled block without collectives the compiler saves what the policy says, and hooks see it.
    hooked = layout.compile and layout.tp * layout.cp * layout.ep == 1
    limits = [most[policy if hooked or policy == "none" else "full"] for policy in policies]
    return [min(share, limit) for share, limit in zip(block_budgets(spec, len(policies)), limits, strict=True)]


def pinned_bytes(size: Number) -> Any:
    """Pinned host memory of a block that offloads so many bytes: whole buffers of `MIN_TENSOR_BYTES`."""
    return np.ceil(size / MIN_TENSOR_BYTES) * MIN_TENSOR_BYTES


# --- of many candidates ---------------------------------------------------------------------------------


def offloading_blocks(case: Case, net: Network, blocks: Mapping[str, Number]) -> list[tuple[Number, Number]]:
    """(number of blocks, bytes that each offloads), of blocks by policy without the last two."""
    share = case.offload_activations * 2**30 / np.maximum(1, sum(blocks.values())) // PAGE_BYTES * PAGE_BYTES
    # In a compiled block without collectives the compiler saves what the policy says, and hooks see it.
    hooked = case.software.graph & np.equal(case.tp * case.cp * case.ep, 1)
    found: list[tuple[Number, Number]] = []
    for policy, count in blocks.items():
        most = offloadable_bytes(net, policy)
        if policy != "none":
            most = np.where(hooked, most, offloadable_bytes(net, "full"))
        found.append((count, np.minimum(share, most)))
    return found


def total_offloaded_bytes(case: Case, net: Network) -> Number:
    """Of all blocks, per micro-batch."""
    blocks = case.model.layers - RESIDENT_BLOCKS
    recomputed = 0 if case.recompute == "none" else np.ceil(blocks / case.recompute_every)
    counts = {"none": blocks - recomputed} if case.recompute in ("none", "full") else {}
    if case.recompute != "none":
        counts[case.recompute] = recomputed if case.recompute == "full" else blocks
    return sum((count * size for count, size in offloading_blocks(case, net, counts)), 0.0 * net.load.tokens)
