"""`data.path` of a spec → a prepared folder. `stdlib:TOKENIZER` is prepared on first use and kept."""

from __future__ import annotations

import platform
from pathlib import Path

from ..spec.errors import SpecError
from ..spec.files import cache_root
from .index import INDEX_FILE, VERSION, read_index
from .pipeline import prepare
from .progress import Progress, silent
from .tokenizer import bpe_size


def resolve(path: str, progress: Progress = silent) -> Path:
    """Any number of processes may ask at once: one prepares, the others wait for it."""
    if path != "stdlib" and not path.startswith("stdlib:"):
        read_index(path)
        return Path(path)
    tokenizer = path.removeprefix("stdlib").removeprefix(":")
    if tokenizer.startswith("bpe:"):
        bpe_size(tokenizer)
    elif tokenizer != "bytes":
        raise SpecError(f"data.path = {path!r}: write stdlib:bytes, or stdlib:bpe:N, e.g. stdlib:bpe:4096")
    # Named by what it is made from, so that another Python or format has a folder of its own.
    folder = cache_root() / "data" / f"stdlib-{platform.python_version()}-{tokenizer.replace(':', '-')}-v{VERSION}"
    if not (folder / INDEX_FILE).exists():
        prepare(["stdlib"], folder, tokenizer, progress=progress)
    return folder
