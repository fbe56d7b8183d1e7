"""New weights for a running engine: by the names of the training network, into the tensors of the fused one.

Tensors keep their addresses, so CUDA graphs stay valid. A trainer in the same process may also adopt these tensors as
its own weights (`share`): its updates are then the engine's, and nothing has to be copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ...model.gpt import GPT
from ...spec import LMWorksError
from ..tensor_parallel.tp_shards import RowParallelExperts, RowParallelLinear
from .fusion import AddNorm, FusedAttention, FusedBlock, FusedMLP, FusedMoE, RowByRow, Unfused
from .latent_attention import AbsorbedLatentAttention


@dataclass(frozen=True)
class Slot:
    """Where a weight is stored: a tensor of its shape, or of its rows `start` to `stop` within each of `groups`."""

    tensor: Tensor
    groups: int = 0  # 0: the whole weight
    start: int = 0
    stop: int = 0

    @property
    def whole(self) -> bool:
        return not self.groups

    def load(self, weight: Tensor) -> None:
        if self.groups:
            weight = weight.unflatten(0, (self.groups, -1))[:, self.start : self.stop]
        self.tensor.copy_(weight.view(self.tensor.shape), non_blocking=True)


class LiveWeights:
    """The weights of a fused network (of a tensor-parallel rank's shard of it) by their names in the training one."""

    def __init__(self, model: GPT) -> None:
        self.slots: dict[str, list[Slot]] = {}
        for name, slot in slots(model):
            self.slots.setdefault(name, []).append(slot)

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]], shared: Collection[str] = ()) -> int:
        """Copy weights, cast to the engine's dtype; returns the bytes written.

        All must come but those that are `shared`.
        """
        missing, written = self.slots.keys() - set(shared), 0
        for name, weight in weights:
            if name not in self.slots:
                raise LMWorksError(f"the engine's network has no weight {name!r}")
            for slot in self.slots[name]:
                slot.load(weight)
                written += slot.tensor.nbytes
            missing.discard(name)
        if missing:
            raise LMWorksError(f"{len(missing)} weights of the engine's network were not given, e.g. {min(missing)!r}")
        return written

    @torch.no_grad()
    def share(self, model: nn.Module, keep: Collection[str] = ()) -> set[str]:
        """Make the parameters of the training network views of the engine's tensors; returns the names of those.

        Not those to `keep`, in another dtype or on another device, nor those that the engine stores in another form.
        """
        shared = set()
        for name, parameter in model.named_parameters():
            found = [] if name in keep else self.slots.get(name, [])
            if len(found) == 1 and found[0].whole and matches(parameter, found[0].tensor):
                found[0].tensor.copy_(parameter)
                parameter.data = found[0].tensor
                shared.add(name)
        return shared


def matches(parameter: Tensor, tensor: Tensor) -> bool:
    same = parameter.dtype == tensor.dtype and parameter.device == tensor.device
    return same and parameter.shape == tensor.shape and tensor.is_contiguous()


def slots(model: GPT) -> Iterator[tuple[str, Slot]]:
    for name in ("embed", "positions", "head"):
        table = getattr(model, name)
        if table is not None:
            yield f"{name}.weight", Slot(table.weight.data)
    assert model.norm is not None
    yield from whole("norm", model.norm)
    for layer, block in model.blocks.items():
        assert isinstance(block, FusedBlock)
        at = f"blocks.{layer}"
        yield from whole(f"{at}.attention_norm", block.attention_norm)
        yield from whole(f"{at}.mlp_norm", block.mlp_norm)
        for name in ("attention_post_norm", "mlp_post_norm"):
            if getattr(block, name) is not None:
                yield from whole(f"{at}.{name}", getattr(block, name))
        yield from attention_slots(f"{at}.attention", block.attention)
        yield from mlp_slots(f"{at}.mlp", block.mlp, ("gate", "up") if model.spec.gated_mlp else ("up",))


def attention_slots(at: str, attention: nn.Module) -> Iterator[tuple[str, Slot]]:
    if isinstance(attention, FusedAttention):
        head_dim = columns(attention.out) // attention.heads
        sizes = [head_dim * count for count in (attention.heads, attention.kv_heads, attention.kv_heads)]
        yield from merged(at, ("q", "k", "v"), attention.qkv, sizes)
        yield from whole(f"{at}.out", attention.out)
        for name in ("q_norm", "k_norm"):
            if getattr(attention, name) is not None:
                yield from whole(f"{at}.{name}", getattr(attention, name))
        for name, parameter in attention.per_head.items():
            yield f"{at}.{name}", Slot(parameter.data)
    elif isinstance(attention, AbsorbedLatentAttention):
        yield from whole(at, attention.module)
        nope, heads = attention.module.nope_dim, attention.w_uk.shape[0]
        yield f"{at}.kv_b.weight", Slot(attention.w_uk, heads, 0, nope)
        yield f"{at}.kv_b.weight", Slot(attention.w_uv, heads, nope, nope + attention.module.v_dim)
    else:
        yield from whole(at, attention)


def mlp_slots(at: str, mlp: nn.Module, inputs: tuple[str, ...]) -> Iterator[tuple[str, Slot]]:
    if isinstance(mlp, RowParallelExperts):
        mlp = mlp.part
    if isinstance(mlp, FusedMLP):
        yield from merged(at, inputs, mlp.into, [columns(mlp.down)] * len(inputs))
        yield from whole(f"{at}.down", mlp.down)
    elif isinstance(mlp, FusedMoE):
        for name in ("gate", "up", "down"):
            yield f"{at}.{name}", Slot(getattr(mlp, name).data)
        for name in ("router", "shared_gate"):
            if getattr(mlp, name) is not None:
                yield from whole(f"{at}.{name}", getattr(mlp, name))
        for name, buffer in mlp.named_buffers(recurse=False):
            yield f"{at}.{name}", Slot(buffer)
        if mlp.shared is not None:
            yield from mlp_slots(f"{at}.shared", mlp.shared, inputs)
    else:
        yield from whole(at, mlp)


def whole(at: str, module: nn.Module) -> Iterator[tuple[str, Slot]]:
    """A module that fusion has left as it was, or only wrapped."""
    while isinstance(module, AddNorm | Unfused | RowByRow):
        inner = module.norm if isinstance(module, AddNorm) else module.was
        assert isinstance(inner, nn.Module)
        module = inner
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield f"{at}.{name.replace('part.', '')}", Slot(tensor.data)  # of a row-parallel layer


def merged(at: str, names: Iterable[str], layer: nn.Module, sizes: list[int]) -> Iterator[tuple[str, Slot]]:
    """Layers whose outputs were concatenated."""
    for kind, parameter in layer.named_parameters():
        for name, part in zip(names, parameter.data.split(sizes), strict=True):
            yield f"{at}.{name}.{kind}", Slot(part)


def columns(layer: nn.Module) -> int:
    layer = layer.part if isinstance(layer, RowParallelLinear) else layer
    return cast(Tensor, layer.weight).shape[1]
