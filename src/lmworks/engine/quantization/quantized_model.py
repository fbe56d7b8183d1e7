"""A network whose matrices are int8, int4 or fp8 (formats: `kernels.inference.quantized`).

Quantized are the linear layers of every block (q, k, v, out, gate, up, down), the matrices of experts, and the head,
which decides between tokens that are almost alike: with int4 it is int8. Embeddings, norms, biases and routers stay as
they are, and so does a head that is tied to the embedding. Experts, of which one tensor holds all matrices of a kind,
are int8 or fp8; int4 rejects them.

`MetaModel` is a network on the meta device, quantized or not: shapes without memory, for loading and warm-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from ...kernels.inference import quantized
from ...kernels.swiglu import swiglu, swiglu_packed
from ...model.gpt import GPT, Linear
from ...model.moe import MoE, moe_layers
from ...model.tensor_files import to_empty
from ...spec import ModelSpec, SpecError
from ...spec.errors import did_you_mean

Linears = Callable[[Tensor, Tensor, Tensor, bool, bool], Tensor]
HEAD = "head"


@dataclass(frozen=True)
class Scheme:
    """Format of a quantized layer."""

    name: str
    about: str
    linear: Linears  # (x, weight, scale, fixed, gate) → x · (weight · scale)ᵀ, or gated by its first half
    dequantize: Callable[[Tensor, Tensor], Tensor]  # (weight, scale) → (out, in) fp32
    stored: torch.dtype
    scales: torch.dtype


SCHEMES = {
    "int8": Scheme("int8", "int8 weights, one scale an output channel",
                   quantized.int8_linear, quantized.int8_dequantize, torch.int8, torch.float32),
    "int4": Scheme("int4", "int4 weights, one scale for a group of inputs of a channel",
                   quantized.int4_linear, quantized.int4_dequantize, torch.int32, torch.bfloat16),
    "fp8": Scheme("fp8", "e4m3 weights, one scale an output channel; e4m3 activations, one scale a token",
                  quantized.fp8_linear, quantized.fp8_dequantize, quantized.FP8, torch.float32),
}  # fmt: skip


def get_scheme(name: str) -> Scheme:
    if name not in SCHEMES:
        raise SpecError(f"scheme {name!r} is not known{did_you_mean(name, SCHEMES)}")
    return SCHEMES[name]


def layer_scheme(scheme: Scheme, layer: str) -> Scheme:
    """The scheme of a layer, by its name: with int4 the head is int8."""
    return SCHEMES["int8"] if scheme.name == "int4" and layer == HEAD else scheme


class QuantLinear(nn.Module):
    """A quantized linear layer. The first dimension is that of outputs, so that layers can be concatenated."""

    weight: Tensor  # (out, in), in int4 (out, in / 8)
    scale: Tensor  # (out), in int4 (out, in / group)

    def __init__(self, scheme: Scheme, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.scheme = scheme
        self.batch_invariant = False  # no row depends on the number of rows
        self.label = ""  # name in the network that was quantized; of merged layers that of the first
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor, gate: bool = False) -> Tensor:
        """`gate`: silu(first half) · second half of the outputs (SwiGLU)."""
        if self.bias is None:
            return self.scheme.linear(x, self.weight, self.scale, self.batch_invariant, gate)
        y = self.scheme.linear(x, self.weight, self.scale, self.batch_invariant, False) + self.bias
        return swiglu_packed(y) if gate else y

    def project(self, states: Tensor, _weight: Tensor) -> Tensor:
        """As the head of a network."""
        logits: Tensor = self(states)
        return logits

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return keep_format(self, lambda: super(QuantLinear, self)._apply(fn, recurse))

    @property
    def in_features(self) -> int:
        return self.weight.shape[1] * (8 if self.scheme.name == "int4" else 1)

    def dequantized(self) -> Tensor:
        """The weight, (out, in) in fp32."""
        return self.scheme.dequantize(self.weight, self.scale)

    def extra_repr(self) -> str:
        return f"{self.scheme.name}, {self.in_features} → {self.weight.shape[0]}"


class QuantExperts(nn.Module):
    """One matrix of every expert of a layer, in int8 or fp8."""

    weight: Tensor  # (experts, out, in)
    scale: Tensor  # (experts, out)

    def __init__(self, scheme: Scheme, weight: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.scheme = scheme
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    def multiply(self, expert: int, rows: Tensor) -> Tensor:
        return self.scheme.linear(rows, self.weight[expert], self.scale[expert], False, False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return keep_format(self, lambda: super(QuantExperts, self)._apply(fn, recurse))


MATRICES = ("gate", "up", "down")  # of experts


def quantize_experts(scheme: Scheme, moe: MoE) -> None:
    """Round the matrices of all experts, in place."""
    rounded = quantized.int8_quantize if scheme.name == "int8" else quantized.fp8_quantize
    for name in MATRICES:
        weight = getattr(moe, name).detach()
        pieces = [rounded(one) for one in weight]
        set_experts(moe, name, scheme, *(torch.stack(parts) for parts in zip(*pieces, strict=True)))


def set_experts(moe: MoE, name: str, scheme: Scheme, weight: Tensor, scale: Tensor) -> None:
    delattr(moe, name)
    setattr(moe, name, QuantExperts(scheme, weight, scale))
    moe.dispatch = dispatch_quantized


def dispatch_quantized(moe: MoE, rows: Tensor, counts: Tensor) -> Tensor:
    """As `model.moe.dispatch_locally`."""
    gate, up, down = (cast(QuantExperts, getattr(moe, name)) for name in MATRICES)
    results = [
        down.multiply(expert, swiglu(gate.multiply(expert, run), up.multiply(expert, run)))
        for expert, run in enumerate(rows.split(counts.tolist()))
        if len(run)
    ]
    return torch.cat([rows[:0], *results])


def keep_format(module: nn.Module, apply: Callable[[], Any]) -> Any:
    """Moves between devices apply; casts (`model.bfloat16()`) do not change the format of `weight` and `scale`."""
    was = {"weight": cast(Tensor, module.weight), "scale": cast(Tensor, module.scale)}
    applied = apply()
    for name, before in was.items():
        now = getattr(module, name)
        if now.dtype != before.dtype:
            setattr(module, name, before.to(now.device))
    return applied


def round_to_nearest(scheme: Scheme, layer: nn.Linear, group: int = quantized.GROUPS[0]) -> QuantLinear:
    """Quantize a layer: every weight to the nearest value of the format."""
    bias = None if layer.bias is None else layer.bias.detach()
    weight = layer.weight.detach()
    if scheme.name == "int4":
        found = group_size(weight.shape[1], group)
        scale = quantized.int4_scale(weight, found)
        return QuantLinear(scheme, quantized.int4_pack(quantized.int4_round(weight, scale), found), scale, bias)
    tensors = quantized.int8_quantize(weight) if scheme.name == "int8" else quantized.fp8_quantize(weight)
    return QuantLinear(scheme, *tensors, bias)


def group_size(inputs: int, wanted: int) -> int:
    group = quantized.int4_group(inputs, wanted)
    if group is None:
        raise SpecError(
            f"int4 needs layers whose inputs are a multiple of {2 * quantized.GROUPS[-1]}, but one has {inputs}; "
            "use int8 or fp8"
        )
    return group


def merge_layers(layers: Sequence[nn.Module]) -> QuantLinear | None:
    """One layer with the concatenated outputs of these; None where their formats differ."""
    parts = [layer for layer in layers if isinstance(layer, QuantLinear)]
    first = parts[0] if parts else None
    if first is None or len(parts) != len(layers) or any(not same_format(first, part) for part in parts):
        return None
    biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
    weight, scale = (torch.cat([getattr(part, name) for part in parts]) for name in ("weight", "scale"))
    one = QuantLinear(first.scheme, weight, scale, torch.cat(biases) if biases else None)
    one.batch_invariant, one.label = first.batch_invariant, first.label
    return one


def same_format(a: QuantLinear, b: QuantLinear) -> bool:
    return (
        a.scheme == b.scheme
        and a.weight.shape[1:] == b.weight.shape[1:]
        and a.scale.shape[1:] == b.scale.shape[1:]
        and (a.bias is None) == (b.bias is None)
    )


def apply_quantization(model: GPT, scheme: str, group: int = quantized.GROUPS[0]) -> GPT:
    """Round all matrices, in place and one at a time. Calibrated rounding: `engine.quantization.quantize`."""
    chosen = get_scheme(scheme)
    check_quantizable(model, scheme)
    for name, layer in list(linears(model)):
        replace_layer(model, name, round_to_nearest(layer_scheme(chosen, name), layer, group))
    for moe in moe_layers(model):
        quantize_experts(chosen, moe)
    return model


def check_quantizable(model: GPT, scheme: str) -> None:
    if quantized_layers(model):
        raise SpecError("the network is quantized already: quantize what it was made from")
    if moe_layers(model) and scheme == "int4":
        raise SpecError("scheme 'int4' does not support networks with experts; use int8 or fp8")


def linears(model: GPT) -> Iterator[tuple[str, Linear]]:
    """The layers that a scheme applies to, by name."""
    for name, module in model.named_modules():
        if (name.startswith("blocks.") or name == HEAD) and isinstance(module, Linear):
            yield name, module


def quantized_layers(model: nn.Module) -> list[QuantLinear]:
    return [module for module in model.modules() if isinstance(module, QuantLinear)]


def replace_layer(model: GPT, name: str, layer: QuantLinear) -> None:
    layer.label = name
    set_layer(model, name, layer)
    if name == HEAD:
        model.project, model.chunked_loss = layer.project, False


def set_layer(model: GPT, name: str, layer: nn.Module | None) -> None:
    """Set or remove the module of that name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


def set_batch_invariant(model: nn.Module, batch_invariant: bool = True) -> None:
    """Batch-invariant products in all quantized layers."""
    for layer in quantized_layers(model):
        layer.batch_invariant = batch_invariant


def served_bytes(model: nn.Module) -> int:
    """Bytes of weights on a GPU: quantized ones as stored, others in half precision. Tied weights count once."""
    rest = sum(2 * parameter.numel() for parameter in model.parameters())
    experts = [module for module in model.modules() if isinstance(module, QuantExperts)]
    stored: list[QuantLinear | QuantExperts] = [*quantized_layers(model), *experts]
    return rest + sum(layer.weight.nbytes + layer.scale.nbytes for layer in stored)


def empty_like_quantized(model: GPT, scheme: str, groups: Mapping[str, int]) -> None:
    """Replace linear layers by quantized ones without values. `groups`: int4 group size by layer."""
    for name, layer in list(linears(model)):
        chosen = layer_scheme(get_scheme(scheme), name)
        out, inputs = layer.weight.shape
        weight: tuple[int, ...] = (out, inputs)
        scale: tuple[int, ...] = (out,)
        if chosen.name == "int4":
            if inputs % (2 * groups.get(name, inputs)):
                raise SpecError(f"no group that fits {inputs} inputs is given for layer '{name}'")
            weight, scale = (out, inputs // 8), (out, inputs // groups[name])
        tensors = torch.empty(weight, dtype=chosen.stored), torch.empty(scale, dtype=chosen.scales)
        replace_layer(model, name, QuantLinear(chosen, *tensors, layer.bias))
    for moe in moe_layers(model):
        chosen = get_scheme(scheme)
        for name in MATRICES:
            sizes = getattr(moe, name).shape
            tensors = torch.empty(sizes, dtype=chosen.stored), torch.empty(sizes[:2], dtype=chosen.scales)
            set_experts(moe, name, chosen, *tensors)


# --- meta device ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MetaModel:
    """A network on the meta device: what is known of it before its weights are read."""

    spec: ModelSpec
    scheme: str = ""  # of its quantized matrices
    groups: Mapping[str, int] = field(default_factory=dict)  # int4 group size by layer

    def blank(self, device: torch.device, dtype: torch.dtype, layers: int | None = None) -> GPT:
        """The network (or its first `layers`) with uninitialised weights; unquantized ones in `dtype`."""
        return to_empty(self.shape(layers), device, dtype)

    def shape(self, layers: int | None = None) -> GPT:
        """The network on the meta device."""
        with torch.device("meta"):
            model = GPT(self.spec if layers is None else self.spec.replace(layers=layers))
            if self.scheme:
                empty_like_quantized(model, self.scheme, self.groups)
        return model
