"""Recompute: throw activations away after the forward pass and compute them again for the backward pass.

`full` keeps only a block's input. `selective` keeps what is dear to compute, the results of matrix products and of
attention, and computes the cheap rest (norms, activations, rotations) again. `mlp` keeps what is dear of attention
alone, and computes the MLP, or the experts, again: wide results, and attention is not computed twice for them.

Attention that is not one operation (it runs over several ranks) keeps its result itself, in `kept`. A compiled block
hides its products from whoever watches it from outside: there these two are a matter for the compiler, see `inside`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..kernels.training.flash_attention import OPERATION as FLASH_ATTENTION

if TYPE_CHECKING:
    from .gpt import Block

aten = torch.ops.aten
LINEAR = {
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_mm.default,  # of float8 operands
}
DEAR = LINEAR | {
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    FLASH_ATTENTION,
}
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # of the forward pass, and of the second


def keep_dear(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in DEAR else CheckpointPolicy.PREFER_RECOMPUTE


class KeepAttention:
    """As `keep_dear`, up to the last product of attention; for one block, as it counts.

    `linears`: linear layers of attention, the first of a block.
    """

    def __init__(self, linears: int) -> None:
        self.linears = linears
        self.seen = {False: 0, True: 0}  # linear layers, in the forward pass and when it is computed again

    def __call__(self, ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        over = self.seen[ctx.is_recompute] >= self.linears
        self.seen[ctx.is_recompute] += op in LINEAR
        return CheckpointPolicy.MUST_SAVE if op in DEAR and not over else CheckpointPolicy.PREFER_RECOMPUTE


PARTLY = ("selective", "mlp")  # policies that keep some of what a block computes


def policy_contexts(policy: str, linears: int) -> Contexts:
    """Of a policy that keeps some, for a block whose attention is one operation."""
    found: Contexts = create_selective_checkpoint_contexts(
        keep_dear if policy == "selective" else KeepAttention(linears)
    )
    return found


# What a block that keeps some put away in its forward pass, for when it is computed again; None elsewhere.
kept: ContextVar[dict[str, Any] | None] = ContextVar("kept", default=None)


class Keeping(AbstractContextManager[None]):
    """A policy's pass over a block, with the place for what the block keeps itself. Can be entered again."""

    def __init__(self, policy: AbstractContextManager[Any], place: dict[str, Any]) -> None:
        self.policy, self.place = policy, place

    def __enter__(self) -> None:
        self.policy.__enter__()
        self.before = kept.set(self.place)

    def __exit__(self, *error: Any) -> None:
        kept.reset(self.before)
        self.policy.__exit__(*error)


def keeping(policy: str, linears: int) -> tuple[Keeping, Keeping]:
    """Contexts of a policy that keeps some, for any block."""
    place: dict[str, Any] = {}
    forward, again = policy_contexts(policy, linears)
    return Keeping(forward, place), Keeping(again, place)


def inside(block: Block, policy: str) -> Callable[..., Tensor]:
    """`forward` of a block under a policy that keeps some, to be compiled as a whole: the compiler then keeps it.

    A function of our own around `checkpoint`: where that is the first thing a compiler meets, it compiles nothing.
    """
    forward, contexts = block.forward, partial(policy_contexts, policy, block.attention_linears)

    def kept_inside(*args: Any) -> Tensor:
        result: Tensor = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        return result

    return kept_inside


def recomputed(block: Block, policy: str) -> Callable[..., Tensor]:
    """`block` under the named policy: none, full, selective or mlp."""
    if policy == "none":
        return block
    again = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)  # no block draws random numbers
    if policy == "full":
        return again
    return partial(again, context_fn=partial(keeping, policy, block.attention_linears))
