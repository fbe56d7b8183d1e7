"""Blocks of Markdown: wrapped text, bullets, folded parts, quizzes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from textwrap import fill

from ..exercise import Exercise, Question

WIDTH = 120
# An address of this machine is a part of a command.
CODE_OR_LINK = re.compile(r"(`[^`]+`|https?://(?!127\.)[^\s<>]*[^\s<>.,;:)])")
SPECIAL = re.compile(r"[\\*<>\[\]|]|(?<![^\W_])_|_(?![^\W_])")  # an underscore within a word is one
NUMBERED = re.compile(r"^(\d+)([.)])(?= )")  # at the start of a paragraph this would begin a list
BLOCK_START = re.compile(r" (?=(?:[-+*>]|#+|\d+[.)]) )")  # at the start of a line this would begin a list


def quiz_blocks(questions: Sequence[Question]) -> Iterator[str]:
    for number, one in enumerate(questions, 1):
        yield wrapped(f"**{number}.** {markdown(one.question)}")
        yield bullets(map(markdown, one.choices))
    yield from folded("Answers", [
        wrapped(f"**{number}.** {markdown(f'{one.choices[one.answer]}. {one.why}')}")
        for number, one in enumerate(questions, 1)
    ])  # fmt: skip


def folded(title: str, blocks: Iterable[str]) -> Iterator[str]:
    yield f"<details><summary>{title}</summary>"
    yield from blocks
    yield "</details>"


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(wrapped(line, "- ", "  ") for line in lines)


def wrapped(text: str, first: str = "", later: str = "") -> str:
    if not first:
        text = NUMBERED.sub(r"\1\\\2", text)
    kept = BLOCK_START.sub("\0", " ".join(text.split()))
    lines = fill(kept, WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False,
                 break_on_hyphens=False)  # fmt: skip
    return lines.replace("\0", " ")


def markdown(text: str) -> str:
    """Plain text with code between backticks, so that nothing else of it is markup; addresses become links."""
    parts = CODE_OR_LINK.split(text)
    return "".join(
        SPECIAL.sub(r"\\\g<0>", part) if not number % 2 else part if part.startswith("`") else f"<{part}>"
        for number, part in enumerate(parts)
    )


def link(exercise: Exercise, words: str = "") -> str:
    """To its lesson page."""
    return f"[{markdown(words or exercise.about)}]({exercise.id}.md)"
