"""Post-training: losses and estimators as plain functions of tensors.

A loss returns (scalar, metrics): the metrics are detached means of the batch at hand. Its scalar is the mean over the
batch, or, where `denominator` is given, the sum divided by that count of the global batch, so that micro-batches and
ranks of any size add up to the loss and gradients of the whole (docs/post-training.md).
Names are loaded when they are used, as torch is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .masked import masked_mean as masked_mean
    from .masked import masked_var as masked_var
    from .masked import masked_whiten as masked_whiten

EXPORTS = {
    "masked_mean": "masked",
    "masked_var": "masked",
    "masked_whiten": "masked",
}


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module 'lmworks.align' has no attribute '{name}'")
    return getattr(importlib.import_module(f".{EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(EXPORTS)
