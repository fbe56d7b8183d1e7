"""A repository as one document: its files in the order in which they need each other, with names and paths.

    <repo_name>NAME <file_sep>PATH⏎TEXT <file_sep>PATH⏎TEXT …         as StarCoder2
    <file_sep>TEXT <file_sep>TEXT …                                  where metadata is dropped

A file comes after those that it imports, so that a model reads a definition before its use. Python's imports are
resolved; files of other languages, and files in a circle of imports, come by path.
"""

from __future__ import annotations

import ast
import hashlib
import heapq
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

REPOSITORY, FILE = "<repo_name>", "<file_sep>"

Pieces = tuple[tuple[str, str], ...]  # a special token by name and the text after it


def repository_pieces(name: str, files: Mapping[str, str], metadata_dropout: float) -> Pieces:
    """The document of a repository; `files`: text by path within it."""
    ordered = order_files(files)
    if share_of(name) < metadata_dropout:
        return tuple((FILE, files[path]) for path in ordered)
    return ((REPOSITORY, name), *((FILE, f"{path}\n{files[path]}") for path in ordered))


def share_of(name: str) -> float:
    """A number in [0, 1) that follows from the name: whether it loses its metadata does not depend on the others."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8"), digest_size=6).digest(), "big") / 2**48


# --- order ------------------------------------------------------------------------------------------------


def order_files(files: Mapping[str, str]) -> list[str]:
    """Paths, each after the files that it imports; the first by path where there is a choice.

    In a circle of imports the file that waits for the fewest others goes first.
    """
    modules = module_index(files)
    needs = {path: set(imported_files(path, text, modules)) - {path} for path, text in files.items()}
    users: dict[str, list[str]] = {path: [] for path in files}
    for path, needed in needs.items():
        for other in needed:
            users[other].append(path)
    ready = [path for path in files if not needs[path]]
    heapq.heapify(ready)
    waiting = {path for path in files if needs[path]}
    ordered = []
    while ready or waiting:
        if not ready:
            first = min(waiting, key=lambda path: (len(needs[path]), path))
            needs[first].clear()
            waiting.remove(first)
            ready.append(first)
        path = heapq.heappop(ready)
        ordered.append(path)
        for user in users[path]:
            needs[user].discard(path)
            if not needs[user] and user in waiting:
                waiting.remove(user)
                heapq.heappush(ready, user)
    return ordered


def module_index(paths: Sequence[str] | Mapping[str, str]) -> dict[tuple[str, ...], str]:
    """Files by every name that may import them: src/a/b.py as src.a.b, a.b and b. The shortest path has the name."""
    found: dict[tuple[str, ...], str] = {}
    for path in sorted(paths, key=lambda path: (path.count("/"), path)):
        if path.endswith(".py"):
            name = module_of(path)
            for start in range(len(name)):
                found.setdefault(name[start:], path)
    return found


def module_of(path: str) -> tuple[str, ...]:
    parts = PurePosixPath(path).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported_files(path: str, text: str, modules: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    """Files of the repository that a Python file imports; none where it cannot be parsed."""
    if not path.endswith(".py"):
        return
    for name in imported_modules(path, text):
        for length in range(len(name), 0, -1):  # `from a.b import c`: a/b/c.py, or a/b.py
            if name[:length] in modules:
                yield modules[name[:length]]
                break


def imported_modules(path: str, text: str) -> Iterator[tuple[str, ...]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the source's escapes
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    here = PurePosixPath(path).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                package = here[: max(0, len(here) - node.level + 1)] + package
            yield from ((*package, alias.name) for alias in node.names)
