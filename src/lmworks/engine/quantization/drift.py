"""Drift monitor: compares the inputs of quantized layers with those of the calibration data.

It tracks the largest input and the mean square of every quantized layer. It is off until `attach` is called (before an
engine captures its graphs: the hooks are a few small operations on the device, which a graph captures). Nothing
synchronises with the device until `report`. Padding rows of a CUDA graph are counted too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...spec import SpecError
from .folder import read_about
from .quantized_model import quantized_layers

WIDER = 2.0  # drift: the largest input grew by more than this factor, or the RMS changed by it


@dataclass(frozen=True)
class Inputs:
    """Statistics of the inputs of a layer."""

    amax: float
    rms: float


@dataclass(frozen=True)
class LayerDrift:
    name: str
    amax_ratio: float  # seen over recorded
    rms_ratio: float

    @property
    def drifted(self) -> bool:
        return not (self.amax_ratio <= WIDER and 1 / WIDER <= self.rms_ratio <= WIDER)  # NaN drifts too


@dataclass(frozen=True)
class DriftReport:
    rows: int  # tokens seen by the first layer
    layers: tuple[LayerDrift, ...]

    @property
    def drifted(self) -> list[str]:
        return [layer.name for layer in self.layers if layer.drifted]


class DriftMonitor:
    """`with DriftMonitor(model, recorded) as monitor: …; monitor.report()`, or attach and detach by hand."""

    def __init__(self, model: nn.Module, recorded: Mapping[str, Inputs]) -> None:
        """`recorded`: by the layer's name at quantization; merged layers have that of their first part."""
        self.recorded = recorded
        self.layers = [layer for layer in quantized_layers(model) if layer.label in recorded]
        if not self.layers:
            raise SpecError("no quantized layer of this model has a record; quantize it with `lmworks quantize`")
        device = self.layers[0].weight.device
        # (layers, 3): largest, sum of squares, count. In fp64, for counts beyond 2²⁴.
        self.seen = torch.zeros(len(self.layers), 3, dtype=torch.float64, device=device)
        self.hooks: list[RemovableHandle] = []

    @classmethod
    def of_folder(cls, model: nn.Module, folder: str | Path) -> Self:
        """With the statistics that `lmworks quantize` recorded."""
        layers = read_about(Path(folder))["report"]["layers"]
        return cls(model, {layer["name"]: Inputs(layer["amax"], layer["rms"]) for layer in layers})

    def attach(self) -> None:
        self.detach()
        self.hooks = [
            layer.register_forward_pre_hook(self.hook(row)) for row, layer in zip(self.seen, self.layers, strict=True)
        ]

    def detach(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def hook(self, row: Tensor) -> Any:
        def look(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach()
            torch.maximum(row[0], x.abs().amax().double(), out=row[0])
            row[1] += x.float().square().sum()
            row[2] += x.numel()

        return look

    def report(self) -> DriftReport:
        """Since the last reset."""
        rows = self.seen.tolist()
        found = []
        for layer, (amax, squares, count) in zip(self.layers, rows, strict=True):
            was = self.recorded[layer.label]
            rms = (squares / count) ** 0.5 if count else was.rms
            found.append(LayerDrift(layer.label, amax / max(was.amax, 1e-30), rms / max(was.rms, 1e-30)))
        return DriftReport(round(rows[0][2] / self.layers[0].in_features), tuple(found))

    def reset(self) -> None:
        self.seen.zero_()

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()
