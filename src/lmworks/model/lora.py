"""Low-rank adapters over a frozen network: LoRA (Hu et al. 2022), rsLoRA, DoRA (Liu et al. 2024).

`add_adapters` is a pass over a built model: it freezes all weights, and the target layers get one module for each
adapter name. One adapter is active at a time, or none, which is the base model: a reference model costs nothing, and
a reward model or a critic costs another adapter and a scalar head (`add_scalar_adapter`).

    with use_adapter(model, None):      # the base model
        reference = model(tokens)

Names and shapes of adapter weights, and how tensor parallelism shards them, are in `spec.lora`. Initial values are
those of PEFT, as a function of (seed, name).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..spec import SpecError, components
from ..spec.lora import ADAPTERS, LoraSpec, ScalarAdapter, adapter_of, block_adapter_weights, target_linears
from .moe import MoE

if TYPE_CHECKING:
    from .gpt import GPT, Block, Linear


WeightRows = Callable[[slice | None], Tensor]  # rows of a layer's weight, or all of them


@dataclass
class ActiveAdapter:
    """Which adapter runs: one object for all layers of a network, or of all its pipeline stages on a rank."""

    name: str | None

    @contextmanager
    def use(self, name: str | None) -> Iterator[None]:
        before, self.name = self.name, name
        try:
            yield
        finally:
            self.name = before

    def bind(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`forward` with the adapter that is active now: activation checkpointing calls it again in a backward pass,
        when another may be."""
        name = self.name

        def run(*args: Any) -> Tensor:
            with self.use(name):
                return forward(*args)

        return run


class LowRankAdapter(nn.Module):
    """The update of one weight W (out, in)."""

    def __init__(self, inputs: int, outputs: int, lora: LoraSpec) -> None:
        super().__init__()
        self.scale = lora.scale
        self.lora_A = nn.Parameter(torch.empty(lora.rank, inputs))
        self.lora_B = nn.Parameter(torch.empty(outputs, lora.rank))
        self.magnitude = nn.Parameter(torch.empty(outputs)) if lora.dora else None
        # Row-parallel layers: squared norms of rows, of which each rank has some columns, are summed over ranks.
        self.sum_over_ranks: Callable[[Tensor], Tensor] = lambda squares: squares

    def forward(self, x: Tensor, y: Tensor, weight: WeightRows, rows: slice | None) -> Tensor:
        """y = x·Wᵀ with the update; `weight` gives W, or those of its `rows` that the layer computes."""
        up = self.lora_B if rows is None else self.lora_B[rows]
        y = torch.add(y, F.linear(F.linear(x, self.lora_A), up), alpha=self.scale)
        if self.magnitude is None:
            return y
        magnitude = self.magnitude if rows is None else self.magnitude[rows]
        return y * (magnitude / self.row_norms(weight(rows), up)).to(y.dtype)

    @torch.no_grad()
    def row_norms(self, weight: Tensor, up: Tensor) -> Tensor:
        """‖W + scale · B·A‖ of each output row: a constant in the backward pass (DoRA's paper, 4.3; PEFT)."""
        with torch.autocast(weight.device.type, enabled=False):
            updated = torch.addmm(weight.float(), up.float(), self.lora_A.float(), alpha=self.scale)
        return self.sum_over_ranks(updated.square().sum(dim=1)).sqrt()


class LayerAdapters(nn.ModuleDict):
    """The adapters of one linear layer by name."""

    def __init__(self, active: ActiveAdapter) -> None:
        super().__init__()
        self.active = active

    def forward(self, x: Tensor, y: Tensor, weight: WeightRows, rows: slice | None = None) -> Tensor:
        name = self.active.name or ""
        return cast(Tensor, self[name](x, y, weight, rows)) if name in self else y


def merged_weight(weight: Tensor, down: Tensor, up: Tensor, scale: float, magnitude: Tensor | None) -> Tensor:
    """W + scale · B·A, or DoRA's weight, in fp32."""
    updated = torch.addmm(weight.float(), up.float(), down.float(), alpha=scale)
    return updated if magnitude is None else updated * (magnitude.float() / updated.norm(dim=1)).unsqueeze(1)


def add_adapters(model: GPT, lora: LoraSpec, names: tuple[str, ...], active: ActiveAdapter | None = None) -> None:
    """Freeze a model, or a part of one, and give its target layers adapters of these names; the first is active.

    Before anything shards the model. A model that has its memory needs `init_adapters` next. A scalar head, which
    starts at random, is trained with the adapters.
    """
    active = active or ActiveAdapter(names[0])
    model.requires_grad_(False)
    if model.score is not None:
        model.score.requires_grad_(True)
    model.adapter_weights = tuple(block_adapter_weights(model.spec, lora, names))
    for block in model.layers():
        block.active_adapter = active
        for linear, layer in target_layers(block, model, lora):
            layer.adapters = LayerAdapters(active)
            for name in names:
                layer.adapters[name] = new_adapter(linear, layer, lora)
            block.attention_linears += 2 * linear.name.startswith("attention.")
        if model.spec.experts:
            cast(MoE, block.mlp).balance_rate = 0.0  # a frozen router keeps its choice bias


def add_scalar_adapter(model: GPT, adapter: ScalarAdapter) -> None:
    """After `add_adapters`: one more adapter, with which the network gives one number per token."""
    from .gpt import Linear

    model.adapter_weights += tuple(block_adapter_weights(model.spec, adapter.lora, (adapter.name,)))
    for block in model.layers():
        active = block.active_adapter
        assert active is not None
        for linear, layer in target_layers(block, model, adapter.lora):
            if layer.adapters is None:  # no target of the first adapter
                layer.adapters = LayerAdapters(active)
            added = new_adapter(linear, layer, adapter.lora)
            layer.adapters[adapter.name] = added.requires_grad_(adapter.trained)
    if model.norm is not None:
        weight = next(model.norm.parameters())
        head = Linear(model.spec.hidden, 1, bias=False, device=weight.device, dtype=weight.dtype)
        model.scalar_heads[adapter.name] = head.requires_grad_(adapter.trained)


def new_adapter(linear: components.Linear, layer: Linear, lora: LoraSpec) -> LowRankAdapter:
    return LowRankAdapter(linear.inputs, linear.outputs, lora).to(layer.weight.device, layer.weight.dtype)


def target_layers(block: Block, model: GPT, lora: LoraSpec) -> list[tuple[components.Linear, Linear]]:
    return [(linear, cast("Linear", block.get_submodule(linear.name))) for linear in target_linears(model.spec, lora)]


@contextmanager
def use_adapter(model: GPT, name: str | None) -> Iterator[None]:
    """Inside, `name` is the active adapter of the model; None: the base model alone."""
    block = model.layers()[0]
    if block.active_adapter is None:
        raise SpecError("the model has no adapters: set lora.rank, e.g. 16")
    if name is not None and name not in (names := {adapter_of(weight.name) for weight in model.adapter_weights}):
        raise SpecError(f"the model has no adapter {name!r}; it has {', '.join(sorted(names))}")
    with block.active_adapter.use(name):
        yield


# --- initial values ------------------------------------------------------------------------------------------


def split_adapter_name(name: str) -> tuple[str, str, str] | None:
    """(layer, adapter, matrix) of an adapter weight's name; None for any other weight's."""
    layer, found, rest = name.partition(f".{ADAPTERS}.")
    adapter, _, matrix = rest.partition(".")
    return (layer, adapter, matrix) if found else None


def initial_adapter(seed: int, name: str, shape: torch.Size, base: Callable[[], Tensor]) -> Tensor:
    """A whole adapter weight as PEFT starts it: B zero, A uniform, DoRA's magnitudes the norms of W's rows.

    `base`: gives the weight W of the layer.
    """
    from .gpt import generator_of

    if name.endswith("lora_B"):
        return torch.zeros(shape)
    if name.endswith("magnitude"):
        return base().float().norm(dim=1)
    bound = 1 / math.sqrt(shape[1])  # Kaiming, a = √5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator_of(seed, name))


@torch.no_grad()
def init_adapters(model: GPT, seed: int) -> None:
    """Initial values of the adapters of a model that has its memory and weights."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if place := split_adapter_name(name):
            base = partial(parameters.__getitem__, f"{place[0]}.weight")
            parameter.copy_(initial_adapter(seed, name, parameter.shape, base))
        elif adapter_of(name):  # a scalar head
            parameter.zero_()


@torch.no_grad()
def merge_adapter(model: GPT, name: str) -> None:
    """Write W + scale · B·A (or DoRA's weight) into the weights, in place, and remove all adapters."""
    for block in model.layers():
        for module in block.modules():
            adapters = getattr(module, ADAPTERS, None)
            if isinstance(adapters, LayerAdapters):
                linear = cast("Linear", module)
                one = cast(LowRankAdapter, adapters[name])
                linear.weight.copy_(merged_weight(linear.weight, one.lora_A, one.lora_B, one.scale, one.magnitude))
                linear.adapters = None
        block.active_adapter = None
    model.adapter_weights, model.scalar_heads = (), nn.ModuleDict()
