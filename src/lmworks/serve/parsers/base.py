"""Pieces of an answer, and what all parsers have in common."""

from __future__ import annotations

import uuid
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ...engine.core.detokenizer import possible_start

SLICE = 4096  # characters of a whole answer that are parsed at once: every search is as short
MAX_NAME = 256  # characters of a function's name, and of a header


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Call:
    """A tool call begins."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the arguments, as JSON, of the call that began last."""

    text: str


Piece = Text | Reasoning | Call | Arguments
Found = TypeVar("Found")
Steps = Generator[None, None, Found]  # yields where it needs more text


def named_id(source: str) -> str:
    """32 hexadecimal digits: the same for the same source."""
    return uuid.uuid5(uuid.NAMESPACE_OID, source).hex


class Parser:
    """Subclasses write `run`, which takes text from the buffer and emits pieces until the answer has ended."""

    opening: str | None = None  # what a prompt ends with to make the model reason
    closing: str | None = None  # after which the answer itself begins
    special = False  # markers are special tokens, which a detokenizer leaves out by default

    def __init__(self) -> None:
        self.buffer, self.at, self.ended = "", 0, False  # text; how much of it was taken; nothing more will come
        self.held: list[str] | None = None  # what was taken since `hold`, in case it must be passed on as text
        self.pieces: list[Piece] = []
        self.running = self.run()
        next(self.running, None)

    def run(self) -> Steps[None]:
        raise NotImplementedError

    def push(self, text: str) -> list[Piece]:
        """Pieces that are certain."""
        self.buffer, self.at = self.buffer[self.at :] + text, 0
        next(self.running, None)
        pieces, self.pieces = self.pieces, []
        return pieces

    def flush(self) -> list[Piece]:
        """The answer has ended."""
        self.ended = True
        return self.push("")

    @staticmethod
    def call_id(source: str) -> str:
        """Made of its source: a server that goes on with an answer of another one gives its calls the same ids."""
        return f"call_{named_id(source)[:24]}"

    # --- for `run` ----------------------------------------------------------------------------------------

    def more(self) -> Steps[bool]:
        """Waits for text. False: the answer has ended."""
        if self.ended:
            return False
        yield
        return True

    def take(self, end: int) -> str:
        """Text up to this place in the buffer."""
        taken, self.at = self.buffer[self.at : end], end
        if self.held is not None:
            self.held.append(taken)
        return taken

    def emit(self, piece: Piece) -> None:
        if isinstance(piece, Call) or piece.text:
            self.pieces.append(piece)

    def hold(self, marker: str) -> None:
        """From this marker on, which was taken, it may be a call."""
        self.held = [marker]

    def settle(self) -> None:
        """It was one."""
        self.held = None

    def give_up(self) -> None:
        """It was none: text."""
        held, self.held = self.held or [], None
        self.emit(Text("".join(held)))

    def text_until(
        self, *markers: str, kind: type[Text] | type[Reasoning] | type[Arguments] = Text, trim: bool = False
    ) -> Steps[str]:
        """Emits text; takes the marker after it and returns it, or "" at the end. `trim`: newlines at its end go."""
        while True:
            places = [(place, each) for each in markers if (place := self.buffer.find(each, self.at)) >= 0]
            if places:
                place, marker = min(places)
                shown = self.take(place)
                self.emit(kind(shown.rstrip("\n") if trim else shown))
                self.take(place + len(marker))
                return marker
            end = len(self.buffer)
            if not self.ended:
                end -= possible_start(self.buffer[self.at :], markers)
            while trim and not self.ended and end > self.at and self.buffer[end - 1] == "\n":
                end -= 1
            self.emit(kind(self.take(end)))
            if not (yield from self.more()):
                return ""

    def literal(self, text: str) -> Steps[bool]:
        """Takes this text, if it comes next."""
        while True:
            rest = self.buffer[self.at : self.at + len(text)]
            if rest == text:
                self.take(self.at + len(text))
                return True
            if not text.startswith(rest) or not (yield from self.more()):
                return False

    def blanks(self, which: str = " \t\r\n") -> Steps[None]:
        """Takes blanks."""
        while True:
            end = self.at
            while end < len(self.buffer) and self.buffer[end] in which:
                end += 1
            self.take(end)
            if end < len(self.buffer) or not (yield from self.more()):
                return

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self.at >= len(self.buffer):
            if not (yield from self.more()):
                return ""
        return self.buffer[self.at]

    def short_text(self, *markers: str) -> Steps[tuple[str, str] | None]:
        """Takes a name or a header, and the marker after it; None, with nothing taken: there is none."""
        while True:
            rest = self.buffer[self.at : self.at + MAX_NAME]
            places = [(place, each) for each in markers if (place := rest.find(each)) >= 0]
            if places:
                place, marker = min(places)
                found = self.take(self.at + place)
                self.take(self.at + len(marker))
                return found, marker
            if len(rest) == MAX_NAME or not (yield from self.more()):
                return None


class Parsing(Protocol):
    """A parser, or several in a row."""

    def push(self, text: str) -> list[Piece]: ...

    def flush(self) -> list[Piece]: ...


def parse_whole(parser: Parsing, text: str) -> list[Piece]:
    """All pieces of an answer that is complete."""
    pieces = [piece for at in range(0, len(text), SLICE) for piece in parser.push(text[at : at + SLICE])]
    return pieces + parser.flush()
