"""Activation memory of one block and of the embedding, by recompute policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .network import Network
from .ops import Op


def total(ops: Iterable[Op], field: str = "saved") -> Any:
    """Bytes of one field, summed over ops."""
    if field in ("saved", "saved_selective"):
        return sum(op.copies * sum(getattr(op, field)) + op.indices * (field == "saved") for op in ops)
    return sum(getattr(op, field) for op in ops)


def stream_bytes(net: Network) -> Any:
    """One copy of the residual stream."""
    return 1.0 * net.load.software.stream * net.load.sp_tokens * net.load.model.hidden


def saved_bytes(net: Network, recompute: str) -> tuple[Any, Any, str]:
    """Bytes saved by the embedding and by one block, and how the latter are made up."""
    stem = total(net.stem)
    if recompute == "none":
        return stem, total(net.block), "what each op saves for the backward pass"
    if recompute == "attention":
        return (
            stem,
            total(net.block) - total(net.block, "core_attention"),
            "what each op saves, without core attention",
        )
    stem = stem + total(net.stem, "saved_selective")
    if recompute == "full":
        return stem, stream_bytes(net), "the block's input"
    of = "products and of attention" if recompute == "selective" else "attention and its products"
    return stem, stream_bytes(net) + selective_bytes(net, recompute), f"the block's input, results of {of}"


def selective_bytes(net: Network, recompute: str) -> Any:
    """Bytes that a block saves beside its input under selective recompute."""
    return total(selective_ops(net, recompute), "saved_selective")


def selective_ops(net: Network, recompute: str) -> tuple[Op, ...]:
    """Ops whose outputs are saved: all GEMMs and attention, or under `mlp` those before the MLP."""
    return net.halves[0] if recompute == "mlp" else net.block


def recomputed_bytes(net: Network, recompute: str) -> Any:
    """Activations that the backward pass of a block recomputes."""
    saved = total(net.block)
    if recompute == "none":
        return 0.0 * saved
    if recompute == "attention":
        return total(net.block, "core_attention")
    if recompute == "full":
        return saved - stream_bytes(net)
    if recompute == "mlp":
        return saved - stream_bytes(net) - selective_bytes(net, recompute)
    # Saved outputs are reused; the last GEMM's is not recomputed, as nothing needs it.
    last = net.load.width * net.load.tokens * net.load.model.hidden * (not net.load.software.fused)
    return saved - stream_bytes(net) - selective_bytes(net, recompute) + last
