"""The source files of a project, for prompts: read once, and again where one has changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LARGEST = 100_000  # bytes of a file that may stand in a prompt
MOST_FILES = 2_000
SKIPPED = {"node_modules", "__pycache__", "build", "dist", "target", "venv"}


@dataclass
class ProjectFiles:
    root: Path
    known: dict[str, tuple[int, str]] = field(default_factory=dict)  # path → time of its last change, text

    def like(self, path: str) -> Mapping[str, str]:
        """Texts by path of the files with the same ending, relative to the root; the first 2,000 by path."""
        found: dict[str, str] = {}
        for file in self.walk(Path(path).suffix):
            name = file.relative_to(self.root).as_posix()
            if (text := self.text(name, file)) is not None:
                found[name] = text
            if len(found) == MOST_FILES:
                break
        return found

    def walk(self, ending: str) -> list[Path]:
        files = []
        for folder, folders, names in os.walk(self.root):
            folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.startswith("."))
            files += [Path(folder, name) for name in sorted(names) if Path(name).suffix == ending]
        return files

    def text(self, name: str, file: Path) -> str | None:
        """None for what is too large, or no text."""
        try:
            status = file.stat()
            if status.st_size > LARGEST:
                return None
            if name not in self.known or self.known[name][0] != status.st_mtime_ns:
                self.known[name] = (status.st_mtime_ns, file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            return None
        return self.known[name][1]
