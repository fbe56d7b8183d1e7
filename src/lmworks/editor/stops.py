"""Where a completion ends, found while it streams: what an editor does not show is not waited for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Stop = Callable[[str], int | None]
"""Where a completion ends, in characters, given what has come of it; None: it may go on."""


def end_of_line(completion: str) -> int | None:
    at = completion.find("\n")
    return at if at >= 0 else None


def end_of_block(before: str) -> Stop:
    """Before the first line that is indented less than the line of the cursor: it belongs to another block."""
    line = before[before.rfind("\n") + 1 :]
    depth = indentation(line)

    def stop(completion: str) -> int | None:
        for found in re.finditer(r"\n(?=[^\n]*\S)", completion):
            following = completion[found.end() :]
            if following.strip(" \t") and indentation(following) < depth:
                return len(completion[: found.start()].rstrip())
        return None

    return stop


def indentation(text: str) -> int:
    first = text.split("\n", 1)[0].expandtabs(8)
    return len(first) - len(first.lstrip(" "))


def end_of_syntax(before: str, after: str, parser: Any) -> Stop:
    """After the first whole line with which the file has no more errors than without the line of the cursor."""
    errors = count_errors(parser, before[: before.rfind("\n") + 1] + after.partition("\n")[2])

    def stop(completion: str) -> int | None:
        at = completion.find("\n")
        while at >= 0:
            if completion[:at].strip() and count_errors(parser, before + completion[:at] + after) <= errors:
                return at
            at = completion.find("\n", at + 1)
        return None

    return stop


def count_errors(parser: Any, text: str) -> int:
    """Nodes that a tree-sitter grammar could not read, or had to make up."""
    nodes, found = [parser.parse(text.encode("utf-8")).root_node], 0
    while nodes:
        node = nodes.pop()
        found += node.type == "ERROR" or node.is_missing
        if node.has_error:
            nodes.extend(node.children)
    return found
