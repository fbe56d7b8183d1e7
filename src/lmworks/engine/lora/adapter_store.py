"""Adapters by the thousand: all are registered, few are warm, which means loaded. Requests warm those they name.

A store is a folder with a folder for each adapter, as PEFT writes them. At most so many of them are loaded at once: the
one that was not asked for longest goes first, never one that a request under way uses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from pathlib import Path

from ...spec import SpecError
from .digest import FILES


class AdapterStore:
    def __init__(self, root: Path, warm: int) -> None:
        """`warm`: adapters that are loaded at once."""
        if not root.is_dir():
            raise SpecError(f"engine.adapter_store = {str(root)!r}: there is no such folder")
        self.root, self.limit = root, warm
        self.names = frozenset(
            folder.name for folder in root.iterdir() if all((folder / name).is_file() for name in FILES)
        )
        self.warm: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self.loads = 0

    def folder(self, name: str) -> Path:
        return self.root / name

    def use(self, name: str) -> None:
        """It is warm, and the last to go."""
        self.warm[name] = None
        self.warm.move_to_end(name)

    def victim(self, used: Container[str | None]) -> str | None:
        """The one to unload for another; None if there is room, or all are in use (`full` tells)."""
        if len(self.warm) < self.limit:
            return None
        return next((name for name in self.warm if name not in used), None)

    @property
    def full(self) -> bool:
        return len(self.warm) >= self.limit
