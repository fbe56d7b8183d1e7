"""Fusions of the training step: passes over a built model, chosen by measurement (benchmarks/kernel_ablation.py).

A pass replaces the class of some modules by a subclass that computes the same with fewer kernels. Names, weights and
hooks stay, so sharding, checkpoints and activation checkpointing see the plain network. Where a module of the fused
part has hooks (FSDP2 gathers by them, health statistics read by them), the plain forward pass runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import Tensor, nn

from ..kernels.training import swiglu_fp8
from ..kernels.training.gelu_mlp import add_gelu_mlp
from .attention import Attend
from .gpt import MLP, Block, Rotary


class GeluEpilogueBlock(Block):
    """GELU, its gradient and the sum after the MLP are epilogues of matrix products (cuBLASLt)."""

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        mlp = cast("MLP", self.mlp)
        if has_hooks((mlp, *mlp.children())):
            return super().forward(x, rotary, attend)
        x = x + self.attention(self.attention_norm(x), rotary, attend)
        return add_gelu_mlp(x, self.mlp_norm(x), mlp.up.weight, mlp.up.bias, mlp.down.weight, mlp.down.bias)


class Float8SwiGLU(MLP):
    """The whole MLP as one operation in fp8 with a scale for each tensor, instead of three float8 linear layers."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.gate is not None
        if has_hooks(self.children()) or not swiglu_fp8.chosen(x, self.gate.weight):
            return super().forward(x)
        return swiglu_fp8.swiglu_mlp(x, self.gate.weight, self.up.weight, self.down.weight)


def fuse_gelu_epilogues(blocks: Iterable[Block]) -> None:
    """For blocks of plain linear layers whose MLP is GELU's, and whose branches are added as they are."""
    for block in blocks:
        block.__class__ = GeluEpilogueBlock


def fuse_float8_swiglu(model: nn.Module, float8_linear: type[nn.Module]) -> None:
    """For MLPs all of whose layers are float8 linear layers without bias."""
    for module in model.modules():
        if type(module) is not MLP or module.kind != "swiglu":
            continue
        if all(isinstance(layer, float8_linear) and layer.bias is None for layer in module.children()):
            module.__class__ = Float8SwiGLU


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    return any(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
        for module in modules
    )
