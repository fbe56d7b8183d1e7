"""Reads weights into the page cache in threads, while torch is being imported."""

from __future__ import annotations

import json
import os
from pathlib import Path
from threading import Thread

from .plan.memory.host import available_bytes
from .spec.files import unsafe_name

THREADS = 4
PIECE = 8 * 2**20  # bytes per read


def prefetch_weights(source: str | Path) -> list[Thread]:
    """Start threads that read the weights of a folder into the page cache.

    No threads without weights, or if they take more than half of the free memory. Errors are ignored: loading reports
    them.
    """
    try:
        files = weight_files(Path(source))
        pieces = [(file, start) for file in files for start in range(0, file.stat().st_size, PIECE)]
    except (OSError, ValueError, LookupError, AttributeError, TypeError):  # an index of another kind
        return []
    if not pieces or 2 * PIECE * len(pieces) > (available_bytes() or 0):
        return []
    threads = [Thread(target=read_pieces, args=(pieces[first::THREADS],), daemon=True) for first in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads


def weight_files(folder: Path) -> list[Path]:
    """The files that will be loaded: some folders have their weights in two formats."""
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return []
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return sorted(folder / name for name in names if not unsafe_name(name))


def read_pieces(pieces: list[tuple[Path, int]]) -> None:
    """Read pieces into a buffer that is discarded."""
    buffer = bytearray(PIECE)
    for file, start in pieces:
        try:
            with file.open("rb", buffering=0) as handle:
                os.preadv(handle.fileno(), [buffer], start)
        except OSError:
            return
