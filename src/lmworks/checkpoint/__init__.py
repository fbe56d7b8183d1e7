"""Saving and loading the state of a run, whatever its layout."""

from .format.folders import Keep, committed, folders, intact, prune
from .format.index import verify
from .format.manifest import Manifest, commit, step_of
from .store import find, load, save

__all__ = [
    "Keep",
    "Manifest",
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
