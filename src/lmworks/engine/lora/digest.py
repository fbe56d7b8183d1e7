"""What an adapter is, as a hash of its files: names come to mean other adapters, cached prefixes must not."""

from __future__ import annotations

import hashlib
from pathlib import Path

FILES = ("adapter_config.json", "adapter_model.safetensors")


def adapter_digest(folder: Path) -> bytes:
    """Of the names and contents of its files."""
    found = hashlib.sha256()
    for name in FILES:
        if (folder / name).is_file():
            with (folder / name).open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
    return found.digest()
