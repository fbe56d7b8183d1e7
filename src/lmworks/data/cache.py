"""`data.path` of a spec → a prepared folder. `stdlib:TOKENIZER` is prepared on first use and kept."""

from __future__ import annotations

import platform
from pathlib import Path

from ..spec import RunSpec, SpecError
from ..spec.files import cache_root
from ..spec.run import NO_DATA
from .index import INDEX_FILE, VERSION, read_index
from .pipeline import prepare
from .progress import Progress, silent
from .tokenizer import bpe_size


def resolve(path: str, progress: Progress = silent) -> Path:
    """Any number of processes may ask at once: one prepares, the others wait for it."""
    if not path:
        raise SpecError(NO_DATA)
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


def check_vocabulary(spec: RunSpec, tokens: int) -> None:
    """A tokenizer with more tokens than the model has rows for; fewer are no harm."""
    if tokens > spec.model.vocab:
        raise SpecError(
            f"model.vocab = {spec.model.vocab} is less than the tokenizer's {tokens} tokens "
            f"({', '.join(spec.data.sources)}); use at least {tokens}"
        )
