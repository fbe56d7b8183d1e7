"""The source files of a project, indexed for prompts, and kept as they are now: on disk, and in the editor.

The first look at a large project takes seconds, so it happens in a thread, and requests use what is there so far. Later
ones read only what has another time or size.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..data.similar_files import SimilarFiles, context_files

LARGEST = 100_000  # bytes of a file that may stand in a prompt
MOST_FILES = 5_000
RESCAN_S = 10.0  # after a look at all files, none for so long: a walk over 5,000 of them is work, too
SKIPPED = {"node_modules", "__pycache__", "build", "dist", "target", "venv"}

Stamp = tuple[int, int]  # time of the last change, size


@dataclass
class ProjectIndex:
    """Files of one ending below a root; the first 5,000 by path."""

    root: Path
    ending: str
    index: SimilarFiles = field(default_factory=SimilarFiles)
    stamps: dict[str, Stamp] = field(default_factory=dict)  # of what was read from the disk
    opened: set[str] = field(default_factory=set)  # in the editor, whose text counts
    edited: dict[str, str] = field(default_factory=dict)  # texts of those that are not indexed yet
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the index; never held over a read
    scanning: threading.Lock = field(default_factory=threading.Lock)
    scanned: float = float("-inf")  # when the last look at all files ended

    def context(self, path: str, text: str, most_characters: int) -> list[tuple[str, str]]:
        """Files like `text` for a prompt in `path` (`data.similar_files`), as they are in the editor, or on disk."""
        with self.lock:
            for other in self.edited.keys() - {path}:  # the file under the cursor changes with every key
                self.index.put(other, self.edited.pop(other))
            return context_files(self.index, path, text, most_characters)

    def show(self, path: str, text: str) -> None:
        """A file was opened or edited."""
        if len(text) <= LARGEST:
            with self.lock:
                self.opened.add(path)
                self.edited[path] = text

    def read(self, path: str) -> None:
        """A file was closed: what is on disk counts again."""
        with self.lock:
            self.opened.discard(path)
            self.edited.pop(path, None)
            self.stamps.pop(path, None)
        self.update(path)

    def scan(self) -> None:
        """Look at all files, unless somebody does, or did a moment ago."""
        if time.monotonic() - self.scanned < RESCAN_S or not self.scanning.acquire(blocking=False):
            return
        try:
            found = set()
            for path in self.walk():
                found.add(path)
                self.update(path)
                if len(found) == MOST_FILES:
                    break
            for gone in self.stamps.keys() - found:
                self.forget(gone)
            self.scanned = time.monotonic()
        finally:
            self.scanning.release()

    def walk(self) -> Iterator[str]:
        for folder, folders, names in os.walk(self.root):
            folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.startswith("."))
            for name in sorted(names):
                if os.path.splitext(name)[1] == self.ending:
                    yield Path(folder, name).relative_to(self.root).as_posix()

    def update(self, path: str) -> None:
        """Index a file if it has changed. What is too large, or no text, is left out."""
        file = self.root / path
        try:
            status = file.stat()
            stamp = status.st_mtime_ns, status.st_size
            if self.stamps.get(path) == stamp:
                return
            text = file.read_text(encoding="utf-8") if status.st_size <= LARGEST else None
        except UnicodeDecodeError:
            text = None
        except OSError:
            self.forget(path)
            return
        with self.lock:
            self.stamps[path] = stamp
            if path in self.opened:
                return
            if text is None:
                self.index.remove(path)
            else:
                self.index.put(path, text)

    def forget(self, path: str) -> None:
        with self.lock:
            self.stamps.pop(path, None)
            if path not in self.opened:
                self.index.remove(path)
