"""The shard of each linear layer that a rank holds for inference.

    q, k, v, gate, up, head   column-parallel: some outputs (rows of the weight), with their scales and biases
    out, down                 row-parallel: some inputs (columns of the weight); products are all-reduced
    experts                   both, within each expert; their sum is all-reduced

`parallel.tensor_parallel` shards a network for training. Inference needs no gradients: where ranks outnumber key heads,
a rank keeps the rows of its head alone. Quantized weights are sharded as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...kernels.inference import quantized
from ...model.gpt import GPT, Linear
from ...model.moe import MoE
from ...parallel.sharding_plan import ShardingPlan
from ...parallel.tensor_parallel import ReplicatedKVLinear, RowShardedLinear
from ...spec import ModelSpec, SpecError, components
from ..lora.peft_files import Delta
from ..quantization.quantized_model import MetaModel, QuantLinear, linears, replace_layer, set_layer


class RowParallelLinear(nn.Module):
    """`part` computes this rank's partial product, adapters included; the bias is added after the all-reduce."""

    def __init__(self, part: nn.Module, bias: Tensor | None, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.reduce = part, reduce
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.all_reduce(self.part(x))

    def all_reduce(self, product: Tensor) -> Tensor:
        y = self.reduce(product)
        return y if self.bias is None else y + self.bias


class RowParallelExperts(nn.Module):
    """`part` computes this rank's slice of every expert, the shared ones included."""

    def __init__(self, part: nn.Module, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.reduce = part, reduce

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.part(x))


OUTPUTS, INPUTS = 0, 1
PACKED = 2 * quantized.GROUPS[-1]  # int4 packs inputs in pairs of groups: the smallest


# --- validation -----------------------------------------------------------------------------------------


def check_tp_divides(meta_model: MetaModel, tp: int) -> None:
    """Validate the layout before anything is read."""
    if tp > 1 and meta_model.spec.qk_norm_whole:
        raise SpecError(f"engine.tp = {tp} does not go with model.qk_norm_whole: ranks hold parts of what is normed")
    if (width := indivisible_width(meta_model.spec, tp)) is not None:
        raise SpecError(f"engine.tp = {tp} does not divide the model's {width[0]} = {width[1]}")
    heads = meta_model.spec.kv_heads
    if heads % tp and tp % heads:
        raise SpecError(f"engine.tp = {tp} and the model's kv_heads = {heads}: one must divide the other")
    if meta_model.scheme and meta_model.spec.experts:
        raise SpecError(
            f"engine.tp = {tp}: quantized experts are not sharded; serve them with engine.tp = 1, or unquantized"
        )
    if (found := indivisible_int4_layer(meta_model, tp)) is not None:
        layer, inputs = found
        raise SpecError(
            f"engine.tp = {tp}: layer '{layer}' has {inputs} inputs in int4 groups of {meta_model.groups[layer]}, and "
            f"a rank's share of {inputs // tp} is not a multiple of {PACKED}, the packing unit; "
            f"engine.tp = {largest_valid_tp(meta_model, tp)} works"
        )


def indivisible_width(spec: ModelSpec, tp: int) -> tuple[str, int] | None:
    widths = [("heads", spec.heads), ("vocab", spec.vocab)]
    if spec.experts:
        widths.append(("expert_ffn", spec.expert_ffn))
    if not spec.experts or spec.mlp_layers:
        widths.append(("ffn", spec.ffn))
    return next(((key, size) for key, size in widths if size % tp), None)


def indivisible_int4_layer(meta_model: MetaModel, tp: int) -> tuple[str, int] | None:
    """An int4 layer whose inputs cannot be split over so many ranks."""
    rows = {linear.name: linear.inputs for linear in components.linears(meta_model.spec) if linear.shard == "row"}
    for layer in meta_model.groups:
        count = rows.get(layer.split(".", 2)[-1], 0)
        if count % (PACKED * tp):
            return layer, count
    return None


def largest_valid_tp(meta_model: MetaModel, tp: int) -> int:
    """The largest tp below this that works; 1 always does."""
    heads = meta_model.spec.kv_heads
    return next(
        fewer
        for fewer in range(tp - 1, 0, -1)
        if indivisible_width(meta_model.spec, fewer) is None
        and not (heads % fewer and fewer % heads)
        and indivisible_int4_layer(meta_model, fewer) is None
    )


# --- shards -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearShard:
    """The outputs or inputs of a layer that this rank holds."""

    dim: int
    indices: slice

    def quantized(self, whole: QuantLinear) -> QuantLinear:
        """The shard of a quantized layer; a row-parallel one keeps the whole bias."""
        weight, scale = whole.weight, whole.scale
        bias: Tensor | None = whole.bias
        if self.dim == OUTPUTS:
            weight, scale = weight[self.indices], scale[self.indices]
            bias = None if bias is None else bias[self.indices]
        elif whole.scheme.name == "int4":
            weight, scale = int4_inputs(weight, scale, self.indices)
        else:
            weight = weight[:, self.indices]
        # Copies: a view would keep all of it.
        weight, scale = (each.clone(memory_format=torch.contiguous_format) for each in (weight, scale))
        return QuantLinear(whole.scheme, weight, scale, None if bias is None else bias.clone())

    def outputs(self, whole: int) -> int:
        """Number of outputs of this shard, of `whole`."""
        return self.indices.stop - self.indices.start if self.dim == OUTPUTS else whole

    def delta(self, whole: Delta) -> Delta:
        """The shard of an adapter: rows of B for column-parallel layers, columns of A for row-parallel ones."""
        if self.dim == OUTPUTS:
            return Delta(whole.down, whole.up[self.indices])
        return Delta(whole.down[:, self.indices], whole.up)


def int4_inputs(words: Tensor, scale: Tensor, inputs: slice) -> tuple[Tensor, Tensor]:
    """Words and scales of some inputs; where a pair of groups is split, repacked in smaller groups."""
    group = quantized.int4_group_of(words, scale)
    smaller = quantized.int4_group(inputs.stop - inputs.start, group)
    assert smaller is not None, "check_tp_divides has rejected it"
    if smaller == group:  # whole pairs
        return words[:, inputs.start // 8 : inputs.stop // 8], scale[:, inputs.start // group : inputs.stop // group]
    q = quantized.int4_unpack(words, group)[:, inputs]
    scales = scale.repeat_interleave(group // smaller, dim=1)
    return quantized.int4_pack(q, smaller), scales[:, inputs.start // smaller : inputs.stop // smaller]


def linear_shards(model: GPT, sharding_plan: ShardingPlan, rank: int) -> dict[str, LinearShard]:
    """By layer name, of a sharded network."""
    shards = {}
    for name, layer in linears(model):
        if isinstance(layer, ReplicatedKVLinear):
            shards[name] = LinearShard(OUTPUTS, layer.rows)
        elif (dim := sharding_plan.axes(f"{name}.weight").get("tp")) is not None:
            size = layer.weight.shape[dim]
            shards[name] = LinearShard(dim, slice(rank * size, (rank + 1) * size))
    return shards


def make_plain(model: GPT, all_reduce: Callable[[Tensor], Tensor]) -> None:
    """Replace the layers of training by plain ones, which the engine can fuse. `all_reduce`: sums over ranks."""
    for name, layer in list(linears(model)):
        if isinstance(layer, ReplicatedKVLinear):
            bias = None if layer.bias is None else layer.bias[layer.rows].clone()
            set_layer(model, name, plain(layer.weight[layer.rows].clone(), bias))
        elif isinstance(layer, RowShardedLinear):
            set_layer(model, name, RowParallelLinear(plain(layer.weight), layer.bias, all_reduce))
    for block in model.blocks.values():
        if isinstance(moe := block.mlp, MoE):
            moe._forward_pre_hooks.clear()  # the region of training, which also sums gradients
            moe._forward_hooks.clear()
            block.mlp = RowParallelExperts(moe, all_reduce)


def plain(weight: Tensor, bias: Tensor | None = None) -> Linear:
    layer = Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def detach_linears(model: GPT) -> dict[str, Linear]:
    """Remove the layers that quantized ones will replace, so that no memory is allocated for them."""
    taken = dict(linears(model))
    for name in taken:
        set_layer(model, name, None)
    return taken


def attach_quantized_shards(
    model: GPT,
    taken: dict[str, Linear],
    shards: dict[str, LinearShard],
    whole: Callable[[str], QuantLinear],
    all_reduce: Callable[[Tensor], Tensor],
    device: torch.device,
) -> None:
    """Attach this rank's shards; one whole layer is in host memory at a time."""
    for name, was in taken.items():
        layer = whole(name)
        part = (shards[name].quantized(layer) if name in shards else layer).to(device)  # some are replicated
        replace_layer(model, name, part)
        if isinstance(was, RowShardedLinear):
            bias, part.bias = part.bias, None
            set_layer(model, name, RowParallelLinear(part, bias, all_reduce))
