"""Operator fusion for inference: the training network changed in place to fewer and larger kernels.

    attention   one QKV projection; norm, rotation and KV cache write are one kernel (`engine.core.kv_cache`)
    MLP         one gate-up projection, with SwiGLU in its epilogue for few rows
    experts     routing, grouping and products are kernels that read nothing on the host
    block       residual add and the next norm are one kernel: blocks pass on a pair, the stream and a pending addend

The weights are the same numbers. They are merged layer by layer, and the originals freed before the next, so that a
network that fills the memory can be fused. A module that cannot be merged stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.inference.linear import batch_invariant_linear, decode_linear, gated_linear
from ...kernels.rms_norm import add_rms_norm
from ...kernels.swiglu import swiglu_packed
from ...model import rope
from ...model.gpt import GPT, MLP, Attention, Block, LatentAttention, Linear, RMSNorm, Rotary, weigh_branch
from ...model.moe import MoE, Router
from ...spec import LMWorksError, ModelSpec, SpecError
from ..quantization import quantized_model
from ..quantization.quantized_model import QuantExperts
from ..tensor_parallel.tp_shards import RowParallelExperts, RowParallelLinear
from .kv_cache import PagedAttention
from .latent_attention import AbsorbedLatentAttention

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Stream = Tensor | tuple[Tensor, Tensor]  # residual stream (tokens, hidden), or a pair: stream and pending addend


def geglu_packed(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


# By `model.mlp`; None: SwiGLU, in the epilogue of its projection
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "swiglu": None, "geglu": geglu_packed, "gelu": functools.partial(F.gelu, approximate="tanh"), "gelu_erf": F.gelu,
}  # fmt: skip


class LinearMethod:
    """How linear layers are computed.

    A plain or row-parallel one by `product`: a streaming kernel for few rows, or the batch-invariant kernel. Any other
    (quantized, with adapters) by its own forward.
    """

    def __init__(self, invariant: bool) -> None:
        self.invariant = invariant
        self.product: Product = batch_invariant_linear if invariant else decode_linear

    def __call__(self, layer: nn.Module, x: Tensor) -> Tensor:
        if type(layer) is Linear:
            return self.product(x, layer.weight, layer.bias)
        if type(layer) is RowParallelLinear:
            return layer.all_reduce(self(layer.part, x))
        return layer(x)

    def gated(self, layer: nn.Module, x: Tensor) -> Tensor:
        """silu(gate) · up of a layer with both outputs concatenated."""
        if type(layer) is Linear and not self.invariant:
            return gated_linear(x, layer.weight, layer.bias)
        if type(layer) is quantized_model.QuantLinear:
            return layer(x, gate=True)
        return swiglu_packed(self(layer, x))

    def project(self, states: Tensor, weight: Tensor) -> Tensor:
        return self.product(states, weight, None)


class FusedAttention(nn.Module):
    """model.gpt.Attention over the paged KV cache, with one QKV projection."""

    def __init__(
        self, was: Attention, qkv: nn.Module, apply: LinearMethod, norm: Callable[[nn.Module], nn.Module]
    ) -> None:
        super().__init__()
        self.layer, self.apply_linear, self.score_scale = was.layer, apply, was.score_scale
        self.heads, self.kv_heads = rows_of(was.q) // was.head_dim, rows_of(was.k) // was.head_dim
        self.qkv, self.out, self.q_norm, self.k_norm = qkv, was.out, was.q_norm, was.k_norm
        self.widths = [rows_of(layer) for layer in (was.q, was.k, was.v)]
        whole = [one for one in (was.q_norm, was.k_norm) if one is not None and was.norm_whole]
        self.whole_norms = nn.ModuleList(norm(one) for one in whole)
        self.per_head = nn.ParameterDict(was.per_head())

    def forward(self, x: Tensor, rotary: Rotary, attend: PagedAttention) -> Tensor:
        q_norm: Tensor | None = None
        k_norm: Tensor | None = None
        eps = 0.0
        if self.q_norm is not None and self.k_norm is not None and not self.whole_norms:
            q_norm, k_norm, eps = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        qkv = self.apply_linear(self.qkv, x)
        parts = qkv.split(self.widths, dim=-1)
        for part, norm in zip(parts, self.whole_norms, strict=False):
            part.copy_(norm(part.contiguous()))
        if self.score_scale != 1 and q_norm is not None:
            q_norm = q_norm * self.score_scale
        elif self.score_scale != 1:
            parts[0].mul_(self.score_scale)
        mixed = attend.attend_qkv(
            qkv, self.heads, self.kv_heads, q_norm, k_norm, eps, rotary, self.layer, **self.per_head
        )
        return self.apply_linear(self.out, mixed.flatten(-2))


class FusedMLP(nn.Module):
    """model.gpt.MLP with one gate-up projection, whose epilogue is SwiGLU where `act` is None."""

    def __init__(
        self, into: nn.Module, act: Callable[[Tensor], Tensor] | None, down: nn.Module, apply: LinearMethod
    ) -> None:
        super().__init__()
        self.into, self.act, self.down, self.apply_linear = into, act, down, apply

    def forward(self, x: Tensor) -> Tensor:
        apply = self.apply_linear
        inner = apply.gated(self.into, x) if self.act is None else self.act(apply(self.into, x))
        return apply(self.down, inner)


class FusedMoE(nn.Module):
    """model.moe.MoE by the kernels of a GPU."""

    def __init__(self, was: MoE, shared: nn.Module | None, apply: LinearMethod) -> None:
        super().__init__()
        from ...kernels.inference.experts_triton import Routing

        self.router, self.shared, self.shared_gate, self.apply_linear = was.router, shared, was.shared_gate, apply
        matrices: list[Any] = [was.gate, was.up, was.down]
        self.scales: nn.ParameterList | None = None
        if isinstance(matrices[0], QuantExperts):
            scales = [one.scale for one in matrices]
            self.scales = nn.ParameterList([frozen(torch.cat(scales[:2], dim=1)), frozen(scales[2])])
            matrices = [one.weight for one in matrices]
        self.gate, self.up, self.down = (frozen(matrix.data) for matrix in matrices)
        self.register_buffer("choice_bias", was.choice_bias)
        self.routing = Routing(
            was.top_k, was.scores == "sigmoid", was.norm_topk, was.routed_scale, was.expert_groups, was.top_groups
        )

    def forward(self, x: Tensor) -> Tensor:
        from ...kernels.inference.experts_triton import ExpertWeights, experts

        apply = self.apply_linear
        shared = None if self.shared is None else self.shared(x)
        if shared is not None and self.shared_gate is not None:
            shared = torch.sigmoid(apply.project(x, self.shared_gate.weight)) * shared
        logits = apply.project(x, self.router.weight)
        bias = cast(Tensor | None, self.choice_bias)
        weights = ExpertWeights(self.gate, self.up, self.down, *(self.scales or ()))
        return experts(x, logits, weights, self.routing, bias, shared, apply.invariant)


def frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


class Unfused(nn.Module):
    """An unchanged module of the training network, which takes (batch, seq, hidden)."""

    def __init__(self, was: nn.Module) -> None:
        super().__init__()
        self.was = was

    def forward(self, x: Tensor, *others: object) -> Tensor:
        return self.was(x.unsqueeze(0), *others).squeeze(0)


class RowByRow(nn.Module):
    """One token at a time: for modules whose reduction order may depend on the number of tokens."""

    def __init__(self, was: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.was = was

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.was(row) for row in x.split(1)])


class AddNorm(nn.Module):
    """Residual add and norm, fused."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, stream: Stream) -> tuple[Tensor, Tensor]:
        if isinstance(stream, Tensor):
            return stream, self.norm(stream)
        x, delta = stream
        if type(self.norm) is RMSNorm:
            # On a GPU always: a pass over memory saved where a step is nothing but such passes.
            fused = "triton" if x.device.type == "cuda" else "torch"
            return add_rms_norm(x, delta, self.norm.weight, self.norm.eps, fused)
        x = x + delta
        return x, self.norm(x)


class FusedBlock(nn.Module):
    """model.gpt.Block over a flat batch."""

    def __init__(self, was: Block, fuser: Fuser, last: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (AddNorm(fuser.norm(norm)) for norm in (was.attention_norm, was.mlp_norm))
        self.attention, self.mlp = fuser.attention(was.attention), fuser.mlp(was.mlp)
        self.attention_post_norm, self.mlp_post_norm = (
            None if norm is None else fuser.norm(norm) for norm in (was.attention_post_norm, was.mlp_post_norm)
        )
        self.residual_scale, self.last = was.residual_scale, last
        self.recompute = "none"

    def forward(self, stream: Stream, rotary: Rotary, attend: PagedAttention) -> Stream:
        x, normed = self.attention_norm(stream)
        attended = self.attention(normed, rotary, attend)
        x, normed = self.mlp_norm((x, weigh_branch(attended, self.attention_post_norm, self.residual_scale)))
        delta = weigh_branch(self.mlp(normed), self.mlp_post_norm, self.residual_scale)
        return x + delta if self.last else (x, delta)


def fuse(model: GPT, context: int, invariant: bool = False) -> None:
    """Fuse a network in place, for flat batches of positions below `context`; weights are on their device already."""
    model.requires_grad_(False)
    cpu = model.device.type == "cpu"
    fuser = Fuser(LinearMethod(invariant), on_cpu=cpu)
    quantized_model.set_batch_invariant(model, invariant)
    names = list(model.blocks)
    for name in names:
        model.blocks[name] = fuser.block(cast(Block, model.blocks[name]), last=name == names[-1])
        if not cpu:
            torch.cuda.empty_cache()  # merged weights do not fit into the freed pieces
    assert model.norm is not None
    model.norm = fuser.norm(model.norm)
    if not isinstance(model.head, quantized_model.QuantLinear):
        model.project = fuser.apply.project
    if model.spec.positions == "rope":
        model.rotary_tables = RotaryCache(model.spec, context, model.device)


class Fuser:
    """Fuses the modules of a block. On a CPU norms and activations of `invariant` products are computed row by row."""

    def __init__(self, apply: LinearMethod, on_cpu: bool) -> None:
        self.apply, self.on_cpu, self.by_rows = apply, on_cpu, apply.invariant and on_cpu

    def block(self, was: Block, last: bool) -> FusedBlock:
        if self.apply.invariant:
            check_fusable(was)
        return FusedBlock(was, self, last)

    def norm(self, was: nn.Module) -> nn.Module:
        return RowByRow(was) if self.by_rows else was

    def attention(self, was: Attention | LatentAttention) -> nn.Module:
        if isinstance(was, LatentAttention):
            return AbsorbedLatentAttention(was, self.apply)
        qkv = merged([was.q, was.k, was.v])
        return Unfused(was) if qkv is None else FusedAttention(was, qkv, self.apply, self.norm)

    def mlp(self, was: nn.Module) -> nn.Module:
        if isinstance(was, RowParallelExperts) and not self.on_cpu:
            return RowParallelExperts(self.mlp(was.part), was.reduce)
        if isinstance(was, MoE) and not self.on_cpu:
            return FusedMoE(was, None if was.shared is None else self.mlp(was.shared), self.apply)
        if not isinstance(was, MLP):
            return RowByRow(Unfused(was)) if self.apply.invariant else Unfused(was)
        into = was.up if was.gate is None else merged([was.gate, was.up])
        if into is None:
            return Unfused(was)
        act = ACTIVATIONS[was.kind]
        if self.by_rows:
            act = RowByRow(act or swiglu_packed)
        return FusedMLP(into, act, was.down, self.apply)


def check_fusable(block: Block) -> None:
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear) and type(module) not in (Linear, Router):
            raise SpecError(
                f"engine.batch_invariant = true is not supported by {name}, which is a {type(module).__name__}: "
                "its kernel may depend on the batch"
            )


def merged(layers: Sequence[Linear]) -> nn.Module | None:
    """One layer with the concatenated outputs of these; None where they cannot be merged."""
    if any(type(layer) is not Linear for layer in layers):
        return quantized_model.merge_layers(layers)
    one = Linear(layers[0].weight.shape[1], sum(map(rows_of, layers)), bias=layers[0].bias is not None, device="meta")
    one.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
    if layers[0].bias is not None:
        one.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    return one


def rows_of(layer: nn.Module) -> int:
    return cast(Tensor, layer.weight).shape[0]


class RotaryCache:
    """cos and sin of all positions, computed once and looked up."""

    def __init__(self, spec: ModelSpec, context: int, device: torch.device) -> None:
        try:
            positions = torch.arange(context, device=device)
            # by kind of layer: cos and sin, each (context, 1, head_dim)
            kinds = (False, True) if spec.rope_local_theta else (False,)
            self.tables = [rope.tables(spec, positions, kind) for kind in kinds]
        except RuntimeError:  # no room; PyTorch says it in many ways
            raise LMWorksError(
                f"the rotations of {context:,} positions do not fit the device; say with engine.context how long "
                "sequences may be"
            ) from None

    def __call__(self, _spec: ModelSpec, positions: Tensor, local: bool = False) -> tuple[Tensor, Tensor]:
        """For positions (tokens): (cos, cos) and (−sin, sin), each (tokens, 1, head_dim)."""
        cos, sin = self.tables[local]
        return cos[positions], sin[positions]
