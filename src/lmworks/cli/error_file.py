"""The error file that torchrun gives every rank: why it fails, told to the agent that started it."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..spec.errors import LMWorksError


def write_error_file(error: LMWorksError, reported: bool) -> None:
    """Reports to the agent why this rank fails, in the error file that torchrun gives every rank."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)
    if path == os.devnull:
        return
    error_record = {"message": str(error), "timestamp": int(time.time()), "final": error.final, "reported": reported}
    half = Path(f"{path}.half")
    with suppress(OSError):  # the run ends anyway
        half.write_text(json.dumps(error_record))
        half.replace(path)


def read_error_file(path: Path) -> dict[str, Any] | None:
    try:
        error_record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return (
        error_record
        if isinstance(error_record, dict) and {"message", "final", "reported"} <= error_record.keys()
        else None
    )
