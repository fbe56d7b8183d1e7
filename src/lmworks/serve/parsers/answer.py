"""The parsers of one answer, one after the other: reasoning first, calls in the text after it."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Arguments, Call, Parser, Piece, Text
from .harmony import HarmonyParser
from .names import ParserNames
from .qwen3_coder import Schemas
from .registry import THINK_PARSERS, TOOL_PARSERS
from .required import RequiredCallParser


@dataclass
class AnswerParser:
    """Pieces of one answer. `most_calls`: later calls are left out."""

    reasoning: Parser | None
    tools: Parser | None
    most_calls: int | None = None
    calls: int = 0

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = [Text(text)] if self.reasoning is None and text else []
        return self.limited(self.through_tools(self.reasoning.push(text) if self.reasoning is not None else pieces))

    def flush(self) -> list[Piece]:
        pieces = self.through_tools(self.reasoning.flush() if self.reasoning is not None else [])
        return self.limited(pieces + (self.tools.flush() if self.tools is not None else []))

    def through_tools(self, pieces: list[Piece]) -> list[Piece]:
        if self.tools is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found += self.tools.push(piece.text) if isinstance(piece, Text) else [piece]
        return found

    def limited(self, pieces: list[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            self.calls += isinstance(piece, Call)
            beyond = self.most_calls is not None and self.calls > self.most_calls
            if not (beyond and isinstance(piece, Call | Arguments)):
                found.append(piece)
        return found

    def call_id(self, source: str) -> str:
        return (self.tools or self.reasoning or Parser).call_id(source)


@dataclass(frozen=True)
class AnswerForm:
    """What is known of an answer before it is made."""

    names: ParserNames
    schemas: Schemas | None = None  # of the functions that may be called; None: there are none
    required: bool = False  # the answer is a call, and nothing else
    most_calls: int | None = None

    @property
    def special(self) -> bool:
        """Whether the names of special tokens have to be in the text."""
        parser = self.parser("")
        return any(part is not None and part.special for part in (parser.reasoning, parser.tools))

    def reasoning_markers(self) -> tuple[str | None, str | None]:
        """Before and after the reasoning; None: the model does not reason, or opens its reasoning itself."""
        parser = self.reasoning_parser("")
        return (None, None) if parser is None else (parser.opening, parser.closing)

    def parser(self, prompt_end: str) -> AnswerParser:
        """For one answer, to a prompt that ends so."""
        return AnswerParser(self.reasoning_parser(prompt_end), self.tool_parser(), self.most_calls)

    def reasoning_parser(self, prompt_end: str) -> Parser | None:
        if self.names.harmony:
            return HarmonyParser(self.schemas is not None and not self.required)
        kind = THINK_PARSERS.get(self.names.reasoning or "")
        return None if kind is None else kind(prompt_end.rstrip().endswith(kind.opening))

    def tool_parser(self) -> Parser | None:
        if self.schemas is None:
            return None
        if self.required:
            return RequiredCallParser()
        found = None if self.names.harmony else TOOL_PARSERS.get(self.names.tool or "")
        return None if found is None else found(self.schemas)
