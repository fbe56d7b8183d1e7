"""Saving and loading the state of a run, whatever its layout.

Names are imported on first use: `format`, which the writer process uses, does without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .format.folders import RetentionPolicy, committed, folders, intact, prune
    from .format.index import verify
    from .format.manifest import Manifest, commit, step_of
    from .store import find, load, save

HOMES = {
    ".format.folders": ("RetentionPolicy", "committed", "folders", "intact", "prune"),
    ".format.index": ("verify",),
    ".format.manifest": ("Manifest", "commit", "step_of"),
    ".store": ("find", "load", "save"),
}

__all__ = [
    "Manifest",
    "RetentionPolicy",
    "commit",
    "committed",
    "find",
    "folders",
    "intact",
    "load",
    "prune",
    "save",
    "step_of",
    "verify",
]


def __getattr__(name: str) -> Any:
    for module, names in HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
