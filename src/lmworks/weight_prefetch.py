"""What can begin before torch is loaded, which takes seconds: weights are read from the disk into memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from threading import Thread

from .plan.memory.host import available_bytes
from .spec.names import unsafe_name

THREADS = 4
PIECE = 8 * 2**20  # bytes asked for at once


def read_ahead(source: str | Path) -> list[Thread]:
    """Begin to read the weights of a folder, so that whoever loads them finds them in the page cache.

    No thread where there are none, or where they would push others, or one another, out of memory. Nothing fails here:
    what is wrong with a file is told by who reads it in earnest.
    """
    try:
        files = weight_files(Path(source))
        pieces = [(file, start) for file in files for start in range(0, file.stat().st_size, PIECE)]
    except (OSError, ValueError, LookupError, AttributeError, TypeError):  # an index of another kind
        return []
    if not pieces or 2 * PIECE * len(pieces) > (available_bytes() or 0):
        return []
    threads = [Thread(target=skim, args=(pieces[first::THREADS],), daemon=True) for first in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads


def weight_files(folder: Path) -> list[Path]:
    """Those that are loaded: some folders hold their weights twice, in another layout."""
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return []
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return sorted(folder / name for name in names if not unsafe_name(name))


def skim(pieces: list[tuple[Path, int]]) -> None:
    """Have the system read them; what they say is thrown away."""
    room = bytearray(PIECE)
    for file, start in pieces:
        try:
            with file.open("rb", buffering=0) as handle:
                os.preadv(handle.fileno(), [room], start)
        except OSError:
            return
