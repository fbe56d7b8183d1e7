"""The network, once, for training and inference alike."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .generation import Sampling as Sampling
    from .generation import generate as generate
    from .gpt import GPT as GPT

EXPORTS = {"GPT": "gpt", "Sampling": "generation", "generate": "generation"}


def __getattr__(name: str) -> Any:
    """Loaded on use, so that `python -m lmworks.model.gpt` runs the file once."""
    if name in EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
