"""Saving and loading the state of a run, whatever its layout.

Names are imported on first use: `format`, which the writer process uses, does without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .format.folders import RetentionPolicy as RetentionPolicy
    from .format.folders import committed as committed
    from .format.folders import folders as folders
    from .format.folders import intact as intact
    from .format.folders import prune as prune
    from .format.index import verify as verify
    from .format.manifest import Manifest as Manifest
    from .format.manifest import commit as commit
    from .format.manifest import step_of as step_of
    from .store import find as find
    from .store import load as load
    from .store import save as save

EXPORTS = {
    ".format.folders": ("RetentionPolicy", "committed", "folders", "intact", "prune"),
    ".format.index": ("verify",),
    ".format.manifest": ("Manifest", "commit", "step_of"),
    ".store": ("find", "load", "save"),
}


def __getattr__(name: str) -> Any:
    for module, names in EXPORTS.items():
        if name in names:
            return getattr(importlib.import_module(module, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
