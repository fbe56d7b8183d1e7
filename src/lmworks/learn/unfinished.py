"""What an exercise that is not written yet does: the reference runs in its place."""

from __future__ import annotations

import functools
import linecache
import sys
from textwrap import indent
from types import CodeType, FunctionType
from typing import Any

from .course_files import course_holes

announced: set[str] = set()


def unfinished(name: str, *arguments: Any) -> Any:
    """The reference of this part of an exercise, among the caller's own functions and classes."""
    exercise = name.partition(".")[0]
    if exercise not in announced:
        announced.add(exercise)
        print(f"exercise {exercise} is not written yet: the reference runs in its place", file=sys.stderr)
    return FunctionType(reference_code(name), sys._getframe(1).f_globals)(*arguments)


@functools.cache
def reference_code(name: str) -> CodeType:
    hole = course_holes()[name]
    after = f"return {hole.results}\n" if hole.results else ""
    source = f"def reference({hole.arguments}):\n{indent(hole.body + after, '    ')}"
    file = f"<reference of {name}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # Triton reads a kernel's source
    module = compile(source, file, "exec")
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))
