"""Frozen weights in 4 or 8 bits under adapters (QLoRA), dequantized layer by layer when they are multiplied.

The product dequantizes in the forward pass, and again in the backward pass: no dequantized weight is kept. Bytes are
those of `spec.lora.quantized_bytes`. FSDP2 shards and gathers what is stored, and a block dequantizes what it gathered.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import nf4
from ..spec import components
from ..spec.lora import NF4_BLOCK, NF4_GROUP, quantized_pieces

if TYPE_CHECKING:
    from .gpt import GPT, Linear


BITS = torch.int32  # as which fp32 numbers are stored


class QuantizedWeight(nn.Module):
    """A weight (out, in) that is not trained; its parts are parameters, so that they move with the model.

    It is cut into `pieces` along `dim`, each quantized on its own: every tensor-parallel layout holds whole pieces, and
    has the same numbers. Parts are flat, so that FSDP2 shards them evenly, and of whole numbers, scales as the bits of
    fp32: no cast of weights touches them.
    """

    def __init__(self, shape: torch.Size, dim: int, pieces: int) -> None:
        super().__init__()
        self.shape, self.dim, self.pieces = shape, dim, pieces

    def hold(self, **parts: tuple[int, torch.dtype]) -> None:
        for name, (size, dtype) in parts.items():
            setattr(self, name, nn.Parameter(torch.empty(self.pieces * size, dtype=dtype), requires_grad=False))

    def part(self, name: str) -> Tensor:
        """(pieces, size). Of FSDP2's shards, outside of its passes, this is a collective."""
        held: Any = getattr(self, name)
        whole: Tensor = (held.full_tensor() if hasattr(held, "full_tensor") else held).view(self.pieces, -1)
        return whole.view(torch.float32) if whole.dtype == BITS else whole

    def cut(self, weight: Tensor) -> Tensor:
        """(pieces, rows, columns)"""
        return weight.unflatten(self.dim, (self.pieces, -1)).movedim(self.dim, 0)

    def join(self, pieces: Tensor) -> Tensor:
        return pieces.movedim(0, self.dim).reshape(self.shape)

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns of one."""
        rows, columns = self.shape
        return (rows // self.pieces, columns) if self.dim == 0 else (rows, columns // self.pieces)

    def store(self, weight: Tensor) -> None:
        for name, part in self.encode(weight).items():
            cast(Tensor, getattr(self, name)).copy_(part)

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """What each part holds of a weight, flat."""
        return {name: as_bits(part).flatten() for name, part in self.quantize(weight).items()}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        raise NotImplementedError


def as_bits(part: Tensor) -> Tensor:
    return part.contiguous().view(BITS) if part.is_floating_point() else part


class Int8Weight(QuantizedWeight):
    """8 bits, symmetric, with a scale for each row of a piece."""

    def __init__(self, shape: torch.Size, dim: int, pieces: int) -> None:
        super().__init__(shape, dim, pieces)
        self.hold(codes=(shape.numel() // pieces, torch.int8), scales=(self.piece[0], BITS))

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        pieces = self.cut(weight.float())
        scales = pieces.abs().amax(dim=2) / 127
        codes = (pieces / scales.clamp(min=nf4.LEAST).unsqueeze(2)).round().to(torch.int8)
        return {"codes": codes, "scales": scales}

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        pieces = self.part("codes").unflatten(1, self.piece).float() * self.part("scales").unsqueeze(2)
        return self.join(pieces.to(dtype))


class NF4Weight(QuantizedWeight):
    def __init__(self, shape: torch.Size, dim: int, pieces: int) -> None:
        super().__init__(shape, dim, pieces)
        blocks = -(-math.prod(self.piece) // NF4_BLOCK)
        scales = {"scales": (blocks, torch.uint8), "group_scales": (-(-blocks // NF4_GROUP), BITS)}
        self.hold(codes=(blocks * NF4_BLOCK // 2, torch.uint8), **scales, offset=(1, BITS))

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        return vars(nf4.quantize(self.cut(weight).flatten(1)))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        stored = nf4.NF4(*(self.part(name) for name in ("codes", "scales", "group_scales", "offset")))
        return self.join(nf4.dequantize(stored, math.prod(self.piece), dtype).unflatten(1, self.piece))


FORMATS: dict[str, type[QuantizedWeight]] = {"int8": Int8Weight, "nf4": NF4Weight}


def empty_weight(described: components.Weight, local: torch.Size, base: str) -> QuantizedWeight:
    """Of a linear layer's weight, of which a rank has the shape `local`."""
    dim, pieces = quantized_pieces(described, tuple(local))
    return FORMATS[base](local, dim, pieces)


def quantize_base(model: GPT, base: str) -> None:
    """Replace the frozen weights of the blocks' linear layers by empty ones of the format `lora.base`.

    On the meta device, after tensor parallelism has sharded them; `QuantizedWeight.store` fills them. Routed experts,
    embedding and head stay as they are.
    """
    described = {weight.name: weight for weight in components.block_weights(model.spec)}
    for block in model.layers():
        for linear in components.linears(model.spec):
            layer, weight = cast("Linear", block.get_submodule(linear.name)), described[f"{linear.name}.weight"]
            layer.quantized = empty_weight(weight, layer.weight.shape, base).to(layer.weight.device)
            layer.register_parameter("weight", None)


def rounded(described: components.Weight, weight: Tensor, base: str) -> Tensor:
    """What the format makes of a whole weight, in fp32."""
    stored = empty_weight(described, weight.shape, base)
    stored.store(weight)
    return stored.dequantize()


def quantized_product(x: Tensor, weight: QuantizedWeight, rows: slice | None) -> Tensor:
    """x·Wᵀ, or those `rows` of it, in autocast's precision."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    return cast(Tensor, QuantizedProduct.apply(x, weight, rows))


class QuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight, rows: slice | None) -> Tensor:
        ctx.weight, ctx.rows = weight, rows
        return F.linear(x, chosen_rows(weight, rows, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad @ chosen_rows(ctx.weight, ctx.rows, grad.dtype), None, None


def chosen_rows(weight: QuantizedWeight, rows: slice | None, dtype: torch.dtype) -> Tensor:
    whole = weight.dequantize(dtype)
    return whole if rows is None else whole[rows]
