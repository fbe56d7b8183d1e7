"""Rounding errors of number formats on the tensors of a step: elements flushed to zero, saturated, relative error.

The tensors are those of a pass in fp32, where fp8 training rounds: inputs and weights of the blocks' linear layers, and
gradients of their outputs. So all formats are compared on the same values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...model import GPT

LOSS_SCALE = 65_536.0
ROLES = ("inputs", "weights", "gradients")
COUNTS = ("elements", "flushed", "saturated", "error", "square")  # the last two: sums of squares


@dataclass(frozen=True)
class Format:
    """`scaling`: the factor that a tensor is multiplied by before rounding, and divided by after.

    tensor, row: the format's largest number over the largest element of the tensor, or of each row of it ("dynamic").
    delayed: as tensor, with the largest element of the batch before. loss: LOSS_SCALE, on gradients alone.
    """

    name: str
    dtype: torch.dtype
    scaling: Literal["none", "loss", "tensor", "row", "delayed"] = "none"

    @property
    def largest(self) -> float:
        return torch.finfo(self.dtype).max

    @property
    def limit(self) -> float:
        """The smallest value that rounds beyond the largest number."""
        return self.largest + math.ldexp(torch.finfo(self.dtype).eps, math.frexp(self.largest)[1] - 2)


FORMATS = (
    Format("bf16", torch.bfloat16),
    Format("fp16", torch.float16),
    Format("fp16, loss scaled", torch.float16, "loss"),
    Format("e5m2", torch.float8_e5m2),
    Format("e5m2 tensorwise", torch.float8_e5m2, "tensor"),
    Format("e5m2 delayed", torch.float8_e5m2, "delayed"),
    Format("e4m3", torch.float8_e4m3fn),
    Format("e4m3 tensorwise", torch.float8_e4m3fn, "tensor"),
    Format("e4m3 delayed", torch.float8_e4m3fn, "delayed"),
    Format("e4m3 rowwise", torch.float8_e4m3fn, "row"),
)


def count(values: Tensor, form: Format, before: float) -> Tensor:
    """COUNTS of fp32 `values` (…, row) in a format; `before`: amax of the same tensor in the previous batch."""
    scale = scale_of(values, form, before)
    scaled = values * scale
    rounded = scaled.clamp(-form.largest, form.largest).to(form.dtype).float()
    flushed = (rounded == 0) & (values != 0)
    saturated = scaled.abs() >= form.limit
    error = (rounded / scale - values).double().square().sum()
    sums = values.numel(), flushed.sum(), saturated.sum(), error, values.double().square().sum()
    return torch.tensor([float(one) for one in sums], dtype=torch.float64)


def scale_of(values: Tensor, form: Format, before: float) -> Tensor:
    if form.scaling == "none":
        return values.new_ones(())
    if form.scaling == "loss":
        return values.new_tensor(LOSS_SCALE)
    if form.scaling == "delayed":
        most = values.new_tensor(before)
    else:
        most = values.abs().amax(dim=-1, keepdim=True) if form.scaling == "row" else values.abs().amax()
    return torch.where(most > 0, form.largest / most, 1.0)


Place = tuple[str, str, str]  # block, layer inside it, role


class RoundingStats:
    """Counts over a pass: `with stats.largest(model):` the previous batch, then `with stats.counting(model):`."""

    def __init__(self) -> None:
        self.before: dict[Place, float] = {}
        self.found: dict[str, dict[str, dict[str, Tensor]]] = {}  # role, format, block

    @contextmanager
    def largest(self, model: GPT) -> Iterator[None]:
        with hooked(model, self.record_amax):
            yield

    @contextmanager
    def counting(self, model: GPT) -> Iterator[None]:
        with hooked(model, self.count):
            yield
        for block, layer, module in linears(model):
            self.count((block, layer, "weights"), module.weight)

    def record_amax(self, place: Place, values: Tensor) -> None:
        self.before[place] = max(self.before.get(place, 0.0), float(values.abs().amax()))

    @torch.no_grad()
    def count(self, place: Place, values: Tensor) -> None:
        block, _, role = place
        values = values.detach().float()
        for form in FORMATS:
            if form.scaling == "loss" and role != "gradients":
                continue
            before = self.before.get(place) or float(values.abs().amax())  # weights hardly change in a step
            rows = self.found.setdefault(role, {}).setdefault(form.name, {})
            rows[block] = rows.get(block, torch.zeros(len(COUNTS), dtype=torch.float64)) + count(values, form, before)

    def to_dict(self) -> dict[str, dict[str, dict[str, list[float]]]]:
        return {
            role: {form: {block: sums.tolist() for block, sums in rows.items()} for form, rows in forms.items()}
            for role, forms in self.found.items()
        }


def linears(model: GPT) -> Iterator[tuple[str, str, nn.Linear]]:
    """The blocks' linear layers: those that fp8 covers."""
    for block, part in model.blocks.items():
        for layer, module in part.named_modules():
            if isinstance(module, nn.Linear):
                yield block, layer, module


@contextmanager
def hooked(model: GPT, look: Any) -> Iterator[None]:
    """Call look(place, tensor) on every input of those layers and every gradient of their outputs."""

    def forward(place: Place, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        look(place, inputs[0].detach())

    def backward(place: Place, _module: nn.Module, _inputs: Any, outputs: tuple[Tensor, ...]) -> None:
        look(place, outputs[0].detach())

    handles = []
    for block, layer, module in linears(model):
        handles.append(module.register_forward_pre_hook(partial(forward, (block, layer, "inputs"))))
        handles.append(module.register_full_backward_hook(partial(backward, (block, layer, "gradients"))))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
