"""Files that are there whole or not at all, also after a power cut, and where files go that can be made again."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import SpecError


def write_whole(path: Path, content: bytes | str) -> None:
    """The name appears, or changes what it stands for, only once all bytes are on the disk."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """A new or renamed entry survives a power cut only once its folder has been synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_unwritable(path: Path, option: str) -> None:
    """Before any work is done for it: nothing can be made at `path`. `option` names it in the error."""
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        why = "" if above.is_dir() else " (Not a directory)"
        raise SpecError(f"{option} {path}: nothing can be written into {above}{why}; name another place")


def cache_root() -> Path:
    """LMWORKS_CACHE, or the user's cache folder: what is in it can be made again."""
    if own := os.environ.get("LMWORKS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmworks"
