"""Adapters of PEFT's format as the engine applies them; the files are read by `model.peft`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...model.peft import WEIGHTS, read_peft
from ...spec import CheckpointError, ModelSpec, SpecError


@dataclass(frozen=True)
class Delta:
    """The update of one weight: up · down, with the scale in `up`."""

    down: Tensor  # A: (rank, in)
    up: Tensor  # scale · B: (out, rank)


@dataclass(frozen=True)
class Adapter:
    name: str
    deltas: dict[str, Delta]  # by the name of our weight

    @property
    def rank(self) -> int:
        """The largest rank of its layers."""
        return max(delta.down.shape[0] for delta in self.deltas.values())


def read_adapter(name: str, folder: Path, spec: ModelSpec, dtype: torch.dtype) -> Adapter:
    """In fp32, for use in `dtype`; an adapter with anything unsupported is rejected.

    DoRA is: it rescales the base weight, which no low-rank update does. `lmworks checkpoint merge` makes it a model.
    """
    found = read_peft(folder, spec, dora=False)
    deltas = {}
    for weight, layer in found.layers.items():
        tensor = f"{folder / WEIGHTS}: '{layer.module}.lora"
        up = scaled(layer.lora_B, layer.scale, dtype, f"{tensor}_B'")
        deltas[weight] = Delta(scaled(layer.lora_A, 1.0, dtype, f"{tensor}_A'"), up)
    return Adapter(name, deltas)


def scaled(matrix: Tensor, scale: float, dtype: torch.dtype, which: str) -> Tensor:
    """In fp32. Values that are not finite in `dtype` are rejected: times zero they are NaN in every row."""
    plain = matrix.float()
    whole = plain * scale
    if bool(whole.to(dtype).isfinite().all()):
        return whole
    if not bool(plain.isfinite().all()):
        raise CheckpointError(
            f"{which} holds NaN or infinity: the file is damaged, or the training diverged; use an earlier save of it"
        )
    largest, wide = float(plain.abs().max()) * abs(scale), torch.finfo(torch.bfloat16).max
    way = "use engine.dtype = 'bf16' or 'fp32'" if largest <= wide else "no engine.dtype reaches that"
    raise SpecError(
        f"{which} has numbers up to {largest:.3g}, its scale included, "
        f"but {str(dtype).removeprefix('torch.')} ends at {torch.finfo(dtype).max:.3g}: {way}"
    )
