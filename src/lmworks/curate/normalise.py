"""Text as it should have been written: one kind of line end, no control characters, encodings that went wrong repaired.

What is changed is counted; nothing is dropped except text that is noise.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

from ..spec.schema import opt
from .documents import KEPT, Decide, Document, DocumentStage

CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")  # not tab, newline, form feed, return


@dataclass(frozen=True)
class Normalise(DocumentStage):
    section: ClassVar[str] = "stages.normalise"
    name: ClassVar[str] = "normalise"
    about: ClassVar[str] = "Unicode form, line ends, control characters, mojibake."

    unicode: str = opt("NFC", "Canonical form: é is one character in NFC, two in NFD.", choices=("", "NFC", "NFKC"))
    line_ends: bool = opt(True, r"\r\n and \r become \n.")
    control_characters: bool = opt(True, "Removed: all but tab, newline and form feed; byte order marks too.")
    mojibake: bool = opt(True, "UTF-8 that was read as Windows-1252 (Ã© for é) is read again as UTF-8.")
    max_replacement_share: float = opt(
        0.01, "More U+FFFD characters than this: too many bytes were lost, the document is dropped.", ge=0, le=1
    )

    def open(self) -> Decide:
        return functools.partial(normalise, self)


def normalise(keys: Normalise, document: Document) -> str:
    text = document.text
    if keys.line_ends and "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        document.note("line_ends")
    if keys.control_characters:
        text, removed = CONTROL.subn("", text)
        if removed:
            document.note("control_characters", removed)
    if not text.isascii():
        if text.count("\ufffd") > keys.max_replacement_share * len(text):
            return "too_many_replacement_characters"
        if keys.mojibake and (repaired := without_mojibake(text)) != text:
            text = repaired
            document.note("mojibake")
        form = cast(Literal["NFC", "NFKC"], keys.unicode)
        if form and not unicodedata.is_normalized(form, text):
            text = unicodedata.normalize(form, text)
            document.note("unicode_form")
    if not text.strip():
        return "empty"
    document.text = text
    return KEPT


# --- UTF-8 that was read as Windows-1252 ------------------------------------------------------------------

# Characters that Windows-1252 has for the bytes 80-FF, with Latin-1's for the five that it has none for.
HIGH = "".join(bytes([byte]).decode("cp1252", "replace").replace("\ufffd", chr(byte)) for byte in range(0x80, 0x100))
BYTE = {character: byte for byte, character in enumerate(HIGH, 0x80)}
LEAD = re.escape("".join(character for character, byte in BYTE.items() if 0xC2 <= byte <= 0xF4))
CONTINUED = re.escape("".join(character for character, byte in BYTE.items() if byte < 0xC0))
SEQUENCE = re.compile(f"(?:[{LEAD}][{CONTINUED}]{{1,3}})+")


def without_mojibake(text: str) -> str:
    """Runs of characters that are UTF-8 once they are bytes again: by chance, real text has hardly any."""
    if not SEQUENCE.search(text):
        return text
    return SEQUENCE.sub(reread, text)


def reread(found: re.Match[str]) -> str:
    try:
        return bytes(BYTE[character] for character in found.group()).decode("utf-8")
    except UnicodeDecodeError:
        return found.group()


STAGES = (Normalise,)
