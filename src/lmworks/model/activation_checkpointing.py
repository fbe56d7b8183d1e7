"""Activation checkpointing: activations are dropped after the forward pass and recomputed for the backward pass.

`full` saves only a block's input. `selective` saves what is expensive to compute, the outputs of matrix products and of
attention, and recomputes the rest (norms, activations, rotary embeddings). `mlp` saves the expensive outputs of
attention only, and recomputes the MLP or the experts: their outputs are wide, and attention is not computed twice.

Attention that is not one operation (it runs over several ranks) saves its output itself, in `saved_outputs`. The
products of a compiled block are not visible from outside: there the compiler applies the policy, see
`checkpointed_forward`.
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
LINEAR_OPS = {
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_mm.default,  # of float8 operands
}
EXPENSIVE_OPS = LINEAR_OPS | {
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    FLASH_ATTENTION,
}
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # of the forward pass, and of the second


def save_expensive(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in EXPENSIVE_OPS else CheckpointPolicy.PREFER_RECOMPUTE


class SaveAttention:
    """As `save_expensive`, up to the last product of attention. Of one block: it counts products.

    `linears`: linear layers of attention, the first of a block.
    """

    def __init__(self, linears: int) -> None:
        self.linears = linears
        self.seen = {False: 0, True: 0}  # linear layers, in the forward pass and in its recomputation

    def __call__(self, ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        over = self.seen[ctx.is_recompute] >= self.linears
        self.seen[ctx.is_recompute] += op in LINEAR_OPS
        return CheckpointPolicy.MUST_SAVE if op in EXPENSIVE_OPS and not over else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE_POLICIES = ("selective", "mlp")  # policies that save some of the outputs inside a block


def policy_contexts(policy: str, linears: int) -> Contexts:
    """Of a selective policy, for a block whose attention is one operation."""
    found: Contexts = create_selective_checkpoint_contexts(
        save_expensive if policy == "selective" else SaveAttention(linears)
    )
    return found


# What a block under a selective policy saved in its forward pass, for the recomputation; None elsewhere.
saved_outputs: ContextVar[dict[str, Any] | None] = ContextVar("saved_outputs", default=None)


class PolicyContext(AbstractContextManager[None]):
    """Around a block's pass: the policy's own context, and `saved_outputs`. Can be entered again."""

    def __init__(self, policy: AbstractContextManager[Any], outputs: dict[str, Any]) -> None:
        self.policy, self.outputs = policy, outputs

    def __enter__(self) -> None:
        self.policy.__enter__()
        self.before = saved_outputs.set(self.outputs)

    def __exit__(self, *error: Any) -> None:
        saved_outputs.reset(self.before)
        self.policy.__exit__(*error)


def block_contexts(policy: str, linears: int) -> tuple[PolicyContext, PolicyContext]:
    """Contexts of a selective policy, for any block."""
    outputs: dict[str, Any] = {}
    forward, again = policy_contexts(policy, linears)
    return PolicyContext(forward, outputs), PolicyContext(again, outputs)


def checkpointed_forward(block: Block, policy: str) -> Callable[..., Tensor]:
    """`forward` of a block under a selective policy, to be compiled as a whole: the compiler applies the policy.

    In a function of its own: where `checkpoint` is the outermost call, torch.compile compiles nothing.
    """
    forward, contexts = block.forward, partial(policy_contexts, policy, block.attention_linears)

    def run(*args: Any) -> Tensor:
        result: Tensor = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        return result

    return run


def checkpointed(block: Block, policy: str) -> Callable[..., Tensor]:
    """`block` under the named policy: none, full, selective or mlp."""
    if policy == "none":
        return block
    forward = block if block.active_adapter is None else block.active_adapter.bind(block)
    again = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)  # no block draws random numbers
    if policy == "full":
        return again
    return partial(again, context_fn=partial(block_contexts, policy, block.attention_linears))
