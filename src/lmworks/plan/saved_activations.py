"""What one block, and what stands before the blocks, keep between forward and backward pass, by recompute policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .network import Network
from .ops import Op


def total(ops: Iterable[Op], field: str = "saved") -> Any:
    """Bytes of one kind, of all ops."""
    if field in ("saved", "dear"):
        return sum(op.copies * sum(getattr(op, field)) + op.indices * (field == "saved") for op in ops)
    return sum(getattr(op, field) for op in ops)


def stream_bytes(net: Network) -> Any:
    """The residual stream, once."""
    return 1.0 * net.load.software.stream * net.load.outside * net.load.model.hidden


def kept(net: Network, recompute: str) -> tuple[Any, Any, str]:
    """Bytes that the stem and one block keep, and how the block's follow."""
    stem = total(net.stem)
    if recompute == "none":
        return stem, total(net.block), "what each op saves for the backward pass"
    if recompute == "attention":
        return stem, total(net.block) - total(net.block, "inside"), "what each op saves, but for attention's inside"
    stem = stem + total(net.stem, "dear")
    if recompute == "full":
        return stem, stream_bytes(net), "the block's input"
    of = "products and of attention" if recompute == "selective" else "attention and its products"
    return stem, stream_bytes(net) + dear(net, recompute), f"the block's input, results of {of}"


def dear(net: Network, recompute: str) -> Any:
    """Results that a block keeps beside its input."""
    return total(keepers(net, recompute), "dear")


def keepers(net: Network, recompute: str) -> tuple[Op, ...]:
    """Ops whose results they are: all products and attention, or under `mlp` those before the MLP."""
    return net.halves[0] if recompute == "mlp" else net.block


def again(net: Network, recompute: str) -> Any:
    """What the backward pass of a block makes once more of what it did not keep."""
    saved = total(net.block)
    if recompute == "none":
        return 0.0 * saved
    if recompute == "attention":
        return total(net.block, "inside")
    if recompute == "full":
        return saved - stream_bytes(net)
    if recompute == "mlp":
        return saved - stream_bytes(net) - dear(net, recompute)
    # Taken over from what was kept, all but the last product, which nothing asks for.
    last = net.load.width * net.load.tokens * net.load.model.hidden * (not net.load.software.fused)
    return saved - stream_bytes(net) - dear(net, recompute) + last
