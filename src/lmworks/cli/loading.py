"""The line that is printed while a model is loaded."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ..record import RunFolder
from ..record.formatting import binary_bytes
from ..spec.errors import LMWorksError
from ..spec.model import ModelSpec
from ..spec.presets import PRESETS
from ..weight_prefetch import weight_files


def loading(source: str | Path, step: int | None = None) -> str:
    """'loading runs/demo: …'. Errors of the source are ignored here: the loader reports them."""
    if str(source) in PRESETS and not Path(source).exists():
        return f"loading {source}: {ModelSpec.from_preset(str(source)).params:,} parameters, random weights of a preset"
    with suppress(LMWorksError, OSError, ValueError, LookupError, AttributeError, TypeError):
        if (Path(source) / "spec.toml").is_file():
            which = "newest checkpoint" if step is None else f"step {step}"
            return f"loading {source}: {RunFolder.open(source).spec().model.params:,} parameters, {which}"
        if files := weight_files(Path(source)):
            return f"loading {source}: {binary_bytes(sum(file.stat().st_size for file in files))} of weights"
    return f"loading {source}"
