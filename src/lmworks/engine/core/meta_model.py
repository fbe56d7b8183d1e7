"""A network on the meta device: what is known of it before its weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ...model import GPT
from ...model.tensor_files import to_empty
from ...spec import ModelSpec
from ..quantization.quantized_model import empty_like_quantized


@dataclass(frozen=True)
class MetaModel:
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
