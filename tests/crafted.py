"""Tampered checkpoints with valid digests: the hashes match, the contents are malicious or wrong."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmworks.checkpoint.format.manifest import INDEX, MANIFEST, commit

Change = Callable[[Any], Any]  # of parsed JSON, in place; or returns what is to be there instead


def rewrite_manifest(folder: Path, change: Change) -> None:
    path = folder / MANIFEST
    path.write_bytes(as_bytes(changed(json.loads(path.read_text()), change)))
    commit(folder)


def rewrite_index(folder: Path, change: Change) -> None:
    replace_file(folder, INDEX, as_bytes(changed(json.loads((folder / INDEX).read_text()), change)))


def replace_file(folder: Path, name: str, content: bytes) -> None:
    """Other bytes of at most one chunk, with their own size and digest in the manifest."""
    (folder / name).write_bytes(content)
    entry = {"bytes": len(content), "digests": [hashlib.sha256(content).hexdigest()]}
    rewrite_manifest(folder, lambda fields: fields["files"][name].update(entry))


def changed(value: Any, change: Change) -> Any:
    other = change(value)
    return value if other is None else other


def as_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()
