"""Source files that a parser cannot follow: another language, a truncated file, a merge conflict."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from ..data.grammars import syntax_parser
from ..spec.schema import opt
from .documents import KEPT, Decide, Document, DocumentStage

ENDINGS = {
    **dict.fromkeys((".py", ".pyi"), "python"),
    **dict.fromkeys((".c", ".h"), "c"),
    **dict.fromkeys((".cc", ".cpp", ".cxx", ".hh", ".hpp"), "cpp"),
    **dict.fromkeys((".js", ".mjs", ".cjs", ".jsx"), "javascript"),
    ".ts": "typescript",
    ".tsx": "tsx",
    ".go": "go",
    ".rs": "rust",
    ".java": "java",
    ".cs": "c_sharp",
    ".rb": "ruby",
    ".php": "php",
    ".sh": "bash",
    ".scala": "scala",
    ".kt": "kotlin",
    ".swift": "swift",
    ".lua": "lua",
    ".hs": "haskell",
    ".jl": "julia",
    ".ml": "ocaml",
    ".html": "html",
    ".css": "css",
    ".json": "json",
}
NAMES = {"c++": "cpp", "c#": "c_sharp", "shell": "bash", "js": "javascript", "ts": "typescript"}


def grammar_of(document: Document) -> str:
    """By the language that an earlier stage found, or by the name of the file."""
    if language := str(document.meta.get("language") or "").lower():
        return NAMES.get(language, language.replace(" ", "_"))
    return ENDINGS.get(os.path.splitext(str(document.meta.get("path") or document.id))[1].lower(), "")


def error_share(parser: Any, text: str) -> float:
    """Bytes in the outermost nodes that could not be parsed, and one for each token that is missing."""
    raw = text.encode("utf-8", "replace")
    root = parser.parse(raw).root_node
    bad = 0
    open_nodes = [root] if root.has_error else []
    while open_nodes:
        node = open_nodes.pop()
        if node.is_error:
            bad += node.end_byte - node.start_byte
        elif node.is_missing:
            bad += 1
        elif node.has_error:
            open_nodes += node.children
    return bad / max(1, len(raw))


@dataclass(frozen=True)
class Syntax(DocumentStage):
    section: ClassVar[str] = "stages.syntax"
    name: ClassVar[str] = "syntax"
    about: ClassVar[str] = "drops source files of which too much cannot be parsed (tree-sitter)"

    languages: list[str] = opt(
        ["python"], "checked; each needs the package tree-sitter-LANGUAGE; others pass unchecked"
    )
    max_errors: float = opt(0.05, "share of the bytes that may be outside of all rules of the grammar", ge=0, le=1)

    def require(self) -> None:
        for language in self.languages:
            self.parser(language)

    def parser(self, language: str) -> Any:
        return syntax_parser(language, f"{self.key('languages')}: '{language}'")

    def open(self) -> Decide:
        parsers = {language: self.parser(language) for language in self.languages}

        def decide(document: Document) -> str:
            parser = parsers.get(grammar_of(document))
            if parser is None:
                document.note("not checked")
                return KEPT
            return KEPT if error_share(parser, document.text) <= self.max_errors else "syntax_errors"

        return decide


STAGES = (Syntax,)
