"""Where initial weights come from: a function from a weight's name and whole shape to its whole value, on the CPU.

Each rank asks for one weight at a time and keeps its share, so every layout starts from the same numbers and no rank
holds the model twice. A source is a seed (equal under every layout by construction), or a Hugging Face folder; a run
folder's checkpoint is loaded later, straight into shards.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..model.gpt import initial_weight
from ..model.hf import HFWeights
from ..spec import RunSpec, SpecError

Source = Callable[[str, torch.Size], Tensor]


def source_of(spec: RunSpec) -> Source:
    """The seed's, unless checkpoint.init names a Hugging Face folder."""
    start = Path(spec.checkpoint.init) if spec.checkpoint.init else None
    if start is not None and is_hf(start):
        return HFWeights(start, spec.model).whole
    return lambda name, shape: initial_weight(spec.model, spec.seed, name, shape)


def is_hf(folder: Path) -> bool:
    if not folder.is_dir():
        raise SpecError(f"checkpoint.init = {str(folder)!r}: there is no such folder")
    return (folder / "config.json").is_file() and not (folder / "spec.toml").exists()
