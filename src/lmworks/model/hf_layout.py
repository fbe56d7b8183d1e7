"""The location of each parameter in a Hugging Face checkpoint.

A stored tensor is one or several of our parameters side by side (GPT-2's fused q, k, v), possibly transposed (GPT-2's
Conv1D is (in, out)), possibly one expert of a parameter that holds them all, possibly with the rows of each head in
another order (`rotary_order`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..spec import ModelSpec, components
from ..spec.hf_families import FAMILIES

TURNED = re.compile(r"\.attention\.[qk](_norm)?\.(weight|bias)$")  # what rotary embedding is applied to


@dataclass(frozen=True)
class Stored:
    name: str  # in the checkpoint
    parts: tuple[str, ...]  # our parameters, concatenated along their output dimension
    expert: int | None = None  # only this row of them
    transposed: bool = False
    order: tuple[int, ...] = ()  # of the rows of a head there, as ours stand; of `ordered` alone
    ordered: tuple[str, ...] = ()
    offset: float = 0.0  # what ours is more

    def views(self, parameters: dict[str, Tensor]) -> list[Tensor]:
        parts = [parameters[name] for name in self.parts]
        return parts if self.expert is None else [part[self.expert] for part in parts]

    def gather(self, parameters: dict[str, Tensor]) -> Tensor:
        """The tensor as the checkpoint holds it; a copy only where the layouts differ."""
        parts = self.views(parameters)
        if self.order:
            back = sorted(range(len(self.order)), key=self.order.__getitem__)
            names = zip(self.parts, parts, strict=True)
            parts = [reorder(part, back) if name in self.ordered else part for name, part in names]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=output_dim(parts[0]))
        if self.offset:
            whole = whole - self.offset
        return (whole.t() if self.transposed else whole).contiguous()

    def shape(self, parameters: dict[str, Tensor]) -> tuple[int, ...]:
        parts = self.views(parameters)
        shape = list(parts[0].shape)
        shape[output_dim(parts[0])] = sum(part.shape[output_dim(part)] for part in parts)
        return tuple(reversed(shape)) if self.transposed else tuple(shape)

    def scatter(self, tensor: Tensor, parameters: dict[str, Tensor]) -> None:
        """Copy a stored tensor into our parameters, in their precision."""
        parts = self.views(parameters)
        tensor = tensor.t() if self.transposed else tensor
        dim = output_dim(parts[0])
        pieces = tensor.split([part.shape[dim] for part in parts], dim=dim)
        for name, part, piece in zip(self.parts, parts, pieces, strict=True):
            piece = reorder(piece, self.order) if name in self.ordered else piece
            part.copy_(piece.to(part.dtype) + self.offset if self.offset else piece)


def reorder(rows: Tensor, order: Sequence[int]) -> Tensor:
    """The rows of each head in another order."""
    return rows.unflatten(0, (-1, len(order)))[:, list(order)].flatten(0, 1)


def rotary_order(spec: ModelSpec, interleaved: bool) -> tuple[int, ...]:
    """Where the rows of one head of ours stand in a checkpoint; empty: there too.

    We turn pair (i, i + head_dim/2) of a head, the first ones by an angle. There the turned rows come first, their
    pairs in halves or side by side, and then those that stay.
    """
    turned, width = spec.rotary_dim, spec.head_dim
    if spec.kv_lora_rank or spec.positions != "rope" or (turned == width and not interleaved):
        return ()
    first = range(0, turned, 2) if interleaved else range(turned // 2)
    second = range(1, turned, 2) if interleaved else range(turned // 2, turned)
    middle = (turned + width) // 2
    return (*first, *range(turned, middle), *second, *range(middle, width))


def output_dim(parameter: Tensor) -> int:
    """Of a bias (out), a matrix (out, in) or all experts' matrices (experts, out, in)."""
    return max(0, parameter.dim() - 2)


def named_tensors(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Parameters, in `dtype`, and what a checkpoint holds beside them: the choice bias of experts, always fp32."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    if dtype is not None:
        found = {name: parameter.to(dtype) for name, parameter in found.items()}
    return found | dict(model.named_buffers())


def layout(spec: ModelSpec, family: str, names: Container[str] = ()) -> Iterator[Stored]:
    """Every tensor of a checkpoint of this family; `names` are those of the one at hand, which may pack its experts."""
    return gpt2(spec) if family == "gpt2" else decoder(spec, family, names)


def linear(theirs: str, *ours: str, bias: bool, transposed: bool = False) -> Iterator[Stored]:
    yield Stored(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), transposed=transposed)
    if bias:
        yield Stored(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours))


def gpt2(spec: ModelSpec) -> Iterator[Stored]:
    yield Stored("transformer.wte.weight", ("embed.weight",))
    yield Stored("transformer.wpe.weight", ("positions.weight",))
    for layer in range(spec.layers):
        h, block = f"transformer.h.{layer}", f"blocks.{layer}"
        yield from linear(f"{h}.ln_1", f"{block}.attention_norm", bias=True)
        qkv = (f"{block}.attention.{name}" for name in "qkv")
        yield from linear(f"{h}.attn.c_attn", *qkv, bias=True, transposed=True)
        yield from linear(f"{h}.attn.c_proj", f"{block}.attention.out", bias=True, transposed=True)
        yield from linear(f"{h}.ln_2", f"{block}.mlp_norm", bias=True)
        yield from linear(f"{h}.mlp.c_fc", f"{block}.mlp.up", bias=True, transposed=True)
        yield from linear(f"{h}.mlp.c_proj", f"{block}.mlp.down", bias=True, transposed=True)
    yield from linear("transformer.ln_f", "norm", bias=True)
    if spec.scalar_head:
        yield Stored("score.weight", (components.SCORE,))
    elif not spec.tie_embeddings:
        yield Stored("lm_head.weight", ("head.weight",))


def decoder(spec: ModelSpec, family: str, names: Container[str]) -> Iterator[Stored]:
    """Llama and all that are laid out like it, whose names are those of the components but for some of its own."""
    renamed = FAMILIES[family].names

    def theirs_of(name: str) -> str:
        for part, other in renamed.items():
            name = name.replace(part, other)
        return name

    order = rotary_order(spec, FAMILIES[family].interleaved)
    from_zero = FAMILIES[family].norms_from_zero

    def alone(weight: components.Weight, prefix: str = "") -> Stored:
        offset = 1.0 if from_zero and weight.init == "ones" else 0.0
        return Stored(theirs_of(prefix + weight.hf), (weight.name,), offset=offset)

    for weight in components.root_weights(spec):
        yield alone(weight)
    for layer in range(spec.layers):
        theirs = f"model.layers.{layer}"
        fused = [one for name in FAMILIES[family].fused for one in fused_layers(name, theirs, f"blocks.{layer}")]
        apart = {name for stored in fused for name in stored.parts}
        others = (one for one in components.layer_weights(spec, layer) if one.hf and one.name not in apart)
        for stored in (*fused, *(alone(weight, f"{theirs}.") for weight in others)):
            turned = tuple(name for name in stored.parts if TURNED.search(name))
            yield replace(stored, order=order, ordered=turned) if order and turned else stored
        if spec.has_experts(layer):
            yield from moe(spec, family, theirs, f"blocks.{layer}.mlp", names)


def fused_layers(name: str, theirs: str, ours: str) -> Iterator[Stored]:
    """What reads one input, as one matrix (Phi-3)."""
    if name == "qkv_proj":
        return linear(f"{theirs}.self_attn.{name}", *(f"{ours}.attention.{part}" for part in "qkv"), bias=False)
    return linear(f"{theirs}.mlp.{name}", f"{ours}.mlp.gate", f"{ours}.mlp.up", bias=False)


def moe(spec: ModelSpec, family: str, theirs: str, ours: str, names: Container[str]) -> Iterator[Stored]:
    """Published checkpoints hold each expert's matrices; transformers 5 packs them in memory, and may save them so."""
    if spec.choice_bias and "choice_bias" in FAMILIES[family].writes:
        yield Stored(f"{theirs}.mlp.gate.e_score_correction_bias", (f"{ours}.choice_bias",))
    packed = f"{theirs}.mlp.experts.gate_up_proj"
    if packed in names:
        yield from linear(f"{theirs}.mlp.gate", f"{ours}.router", bias=False)
        yield Stored(packed, (f"{ours}.gate", f"{ours}.up"))
        yield Stored(f"{theirs}.mlp.experts.down_proj", (f"{ours}.down",))
        return
    if family == "mixtral":
        place, matrices = f"{theirs}.block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}
    else:
        place, matrices = f"{theirs}.mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    yield from linear(f"{place}.gate", f"{ours}.router", bias=False)
    for name, matrix in matrices.items():  # all experts of one of our weights in a row: it is read once and freed
        for expert in range(spec.experts):
            yield Stored(f"{place}.experts.{expert}.{matrix}.weight", (f"{ours}.{name}",), expert=expert)
