"""Parsers of programming languages: tree-sitter's, with a package for each grammar."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from ..spec.errors import SpecError


@functools.cache
def syntax_parser(language: str, asked: str) -> Any:
    """`asked`: what of a request needs it, e.g. "data.fim.language = 'c'"."""
    try:
        import tree_sitter
    except ImportError:
        raise SpecError(f"{asked} needs tree-sitter: pip install 'lmworks[syntax]'") from None
    package = f"tree-sitter-{language.replace('_', '-')}"
    try:
        grammar = importlib.import_module(package.replace("-", "_"))
    except ImportError:
        raise SpecError(f"{asked} needs its grammar: pip install {package}") from None
    make = getattr(grammar, "language", None) or getattr(grammar, f"language_{language}")
    return tree_sitter.Parser(tree_sitter.Language(make()))
