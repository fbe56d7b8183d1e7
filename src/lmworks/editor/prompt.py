"""A completion prompt of the file under the cursor and of files like it, in the order in which a model was trained.

    <file_sep>PATH⏎TEXT … <file_sep>PATH⏎text before the cursor     and, as `suffix`, the text after it

Other files come first, the most similar next to the cursor (`data.similar_files`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..data.repository import FILE


@dataclass(frozen=True)
class Budget:
    """Characters of a prompt. What a part leaves is not given to another: latency stays what it was."""

    before: int = 6000  # of the file, up to the cursor
    after: int = 2000
    others: int = 8000  # of other files; 0: none, and no path


@dataclass(frozen=True)
class CompletionPrompt:
    prompt: str
    suffix: str


ContextFiles = Callable[[str, str, int], list[tuple[str, str]]]
"""Path and text of files like a text in a path, in at most so many characters; the most similar last."""


def build_prompt(path: str, text: str, cursor: int, similar: ContextFiles, budget: Budget) -> CompletionPrompt:
    """For the text at `cursor`, an offset in characters. Paths are relative to the project's root, as in training."""
    before, after = text[max(0, cursor - budget.before) : cursor], text[cursor : cursor + budget.after]
    if not budget.others:
        return CompletionPrompt(before, after)
    around = text[max(0, cursor - budget.before) : cursor + budget.after]
    chosen = similar(path, around, budget.others)
    parts = [*(f"{FILE}{other}\n{content}" for other, content in chosen), f"{FILE}{path}\n{before}"]
    return CompletionPrompt("".join(parts), after)
