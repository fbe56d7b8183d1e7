"""What the environments that run code have in common: one sandbox for all of them, and output as a short text."""

from __future__ import annotations

import functools
import re

from ...sandbox import Sandbox, SandboxResult

# A temporary folder has another name each time.
FOLDER = re.compile(r'(?:/sandbox|/[^\s"\']*/lmworks-sandbox-[^\s"\'/]*)/?')
LIMITS = {
    "cpu": "too much time",  # as by the clock: which of both is hit first depends on what else runs
    "wall": "too much time",
    "memory": "too much memory",
    "processes": "too many processes",
    "output": "too much output",
    "disk": "too much on the disk",
}


@functools.cache
def shared_sandbox(isolation: str = "auto") -> Sandbox:
    """Its processes are kept for the whole run, and end with it."""
    return Sandbox(isolation=isolation)


def shown(result: SandboxResult, max_chars: int) -> str:
    """Output, errors and the limit that was hit."""
    text = result.text
    errors = result.stderr.decode(errors="replace")
    parts = [text.rstrip("\n"), FOLDER.sub("", errors).rstrip("\n")]
    if result.limit:
        parts.append(f"Killed: {LIMITS[result.limit]}")
    elif result.signal:
        parts.append(f"Killed by signal {result.signal}")
    return shortened("\n".join(filter(None, parts)) or "(no output)", max_chars)


def shortened(text: str, max_chars: int) -> str:
    """Beginning and end, where it is too long."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
