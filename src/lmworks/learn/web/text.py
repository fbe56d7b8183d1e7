"""Text of the course as HTML."""

from __future__ import annotations

from html import escape

from ..lesson_pages.markdown import CODE_OR_LINK


def code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def anchor(link: str, words: str = "") -> str:
    return f'<a href="{escape(link)}" rel="noreferrer" target="_blank">{escape(words or link)}</a>'


def inline(text: str) -> str:
    """Plain text with code between backticks, and addresses."""
    parts = CODE_OR_LINK.split(text)
    return "".join(
        escape(part) if not number % 2 else code(part.strip("`")) if part.startswith("`") else anchor(part)
        for number, part in enumerate(parts)
    )
