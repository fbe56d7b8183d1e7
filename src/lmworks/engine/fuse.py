"""The trainer's network made quick for inference, in place: fewer, larger products, and no sums of their own.

    attention   q, k, v are one product; normalising, rotating and storing them is one kernel (`engine.paged`)
    MLP         gate and up are one product; silu(gate) · up is one kernel
    block       what attention and MLP give is added to the residual stream by their last product

The weights are the same numbers. Each layer's are merged and the ones they came from let go before the next layer's
turn, so that a network that fills the memory can be fused in it. A part that cannot be merged stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.small_linear import small_linear, streams
from ..kernels.swiglu import swiglu
from ..model import rope
from ..model.gpt import GPT, MLP, Attention, Block, Linear, Rope
from ..spec import ModelSpec
from .paged import Paged

Product = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


def product(x: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, added in place to `onto` where that is given: x (tokens, in) → (tokens, out)."""
    if streams(x, weight):
        y = small_linear(x, weight, bias)
        return y if onto is None else onto.add_(y)
    if onto is None:
        return F.linear(x, weight, bias)
    onto.addmm_(x, weight.t())
    return onto if bias is None else onto.add_(bias)


def row_by_row(x: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor | None = None) -> Tensor:
    """As `product`, a token at a time: on a CPU the order of a product's sums depends on how many rows it has."""
    y = torch.cat([F.linear(row, weight, bias) for row in x.split(1)]) if len(x) else F.linear(x, weight, bias)
    return y if onto is None else onto.add_(y)


class Applied:
    """How linear layers are applied: a plain one by `product`, any other (quantised, cut over ranks) by itself."""

    def __init__(self, product: Product) -> None:
        self.product = product

    def __call__(self, layer: nn.Module, x: Tensor, onto: Tensor | None = None) -> Tensor:
        if type(layer) is Linear:
            return self.product(x, layer.weight, layer.bias, onto)
        y: Tensor = layer(x)
        return y if onto is None else onto.add_(y)


class FusedAttention(nn.Module):
    """model.gpt.Attention over pages, with one projection."""

    def __init__(self, was: Attention, qkv: nn.Module, apply: Applied) -> None:
        super().__init__()
        self.layer, self.apply_linear = was.layer, apply
        self.heads, self.kv_heads = rows_of(was.q) // was.head_dim, rows_of(was.k) // was.head_dim
        self.qkv, self.out, self.q_norm, self.k_norm = qkv, was.out, was.q_norm, was.k_norm

    def forward(self, x: Tensor, turn: Rope, attend: Paged, onto: Tensor) -> Tensor:
        q_norm = k_norm = None
        eps = 0.0
        if self.q_norm is not None and self.k_norm is not None:
            q_norm, k_norm, eps = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        qkv = self.apply_linear(self.qkv, x)
        mixed = attend.projected(qkv, self.heads, self.kv_heads, q_norm, k_norm, eps, turn, self.layer)
        return self.apply_linear(self.out, mixed.flatten(-2), onto)


class FusedMLP(nn.Module):
    """model.gpt.MLP with one product on the way in."""

    def __init__(self, into: nn.Module, act: Callable[[Tensor], Tensor], down: nn.Module, apply: Applied) -> None:
        super().__init__()
        self.into, self.act, self.down, self.apply_linear = into, act, down, apply

    def forward(self, x: Tensor, onto: Tensor) -> Tensor:
        return self.apply_linear(self.down, self.act(self.apply_linear(self.into, x)), onto)


class Unfused(nn.Module):
    """A part that stayed as it was, in the place of one that adds its result to the residual stream."""

    def __init__(self, was: nn.Module) -> None:
        super().__init__()
        self.was = was

    def forward(self, x: Tensor, *others: object) -> Tensor:
        """The last argument is what the result is added to."""
        *rest, onto = others
        return cast(Tensor, onto).add_(self.was(x.unsqueeze(0), *rest).squeeze(0))


class FusedBlock(nn.Module):
    """model.gpt.Block over a flat batch: x (tokens, hidden) is the residual stream, and is changed in place."""

    def __init__(self, was: Block, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.mlp_norm, self.mlp = was.attention_norm, attention, was.mlp_norm, mlp
        self.recompute = "none"

    def forward(self, x: Tensor, turn: Rope, attend: Paged) -> Tensor:
        x = self.attention(self.attention_norm(x), turn, attend, x)
        return self.mlp(self.mlp_norm(x), x)


def fuse(model: GPT, context: int, invariant: bool = False) -> None:
    """Change a network whose weights are where they will be used, for flat batches of positions below `context`."""
    model.requires_grad_(False)
    chosen = invariant_product(model.device) if invariant else product
    apply = Applied(chosen)
    for name, block in list(model.blocks.items()):
        assert isinstance(block, Block)
        model.blocks[name] = FusedBlock(block, fused_attention(block.attention, apply), fused_mlp(block.mlp, apply))
        del block
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # merged weights are larger than the pieces that were let go, and fit none of them
    model.project = lambda states, weight: chosen(states, weight, None, None)
    if model.spec.positions == "rope":
        model.turns = Turns(model.spec, context, model.device)


def invariant_product(device: torch.device) -> Product:
    return row_by_row


def fused_attention(was: Attention, apply: Applied) -> nn.Module:
    qkv = merged([was.q, was.k, was.v])
    return Unfused(was) if qkv is None else FusedAttention(was, qkv, apply)


def fused_mlp(was: nn.Module, apply: Applied) -> nn.Module:
    if not isinstance(was, MLP):
        return Unfused(was)
    if was.gate is None:
        return FusedMLP(was.up, functools.partial(F.gelu, approximate="tanh"), was.down, apply)
    into = merged([was.gate, was.up])
    return Unfused(was) if into is None else FusedMLP(into, swiglu, was.down, apply)


def merged(layers: list[Linear]) -> nn.Module | None:
    """One layer that gives what these give, side by side; None where they cannot be merged."""
    if any(type(layer) is not Linear for layer in layers):
        return None
    out = sum(map(rows_of, layers))
    one = Linear(layers[0].weight.shape[1], out, bias=layers[0].bias is not None, device="meta")
    one.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
    if layers[0].bias is not None:
        one.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    return one


def rows_of(layer: nn.Module) -> int:
    return cast(Tensor, layer.weight).shape[0]


class Turns:
    """`rope.tables`, computed once for all positions and looked up."""

    def __init__(self, spec: ModelSpec, context: int, device: torch.device) -> None:
        self.cos, self.sin = rope.tables(spec, torch.arange(context, device=device))  # (context, 1, head_dim)

    def __call__(self, _spec: ModelSpec, positions: Tensor) -> tuple[Tensor, Tensor]:
        """For positions (tokens): (cos, cos) and (−sin, sin), each (tokens, 1, head_dim)."""
        return self.cos[positions], self.sin[positions]
