"""Where the course's source has an exercise: what stands between its marks is the solution.

    # exercise rmsnorm(self, x)                      the body of a function
    # exercise attention(self, q, k, v) -> out       a part of one, which leaves `out`
    # exercise triton_add() -> add_kernel            a whole function of the file: what Triton compiles cannot call
                                                     `unfinished`
    # exercise ddp_checkpoint.save(self, path)       one of several parts of an exercise
    …
    # end rmsnorm

The learner's file has the same marks with a stub between them, so both are read alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import dedent, indent

from ..spec.errors import SpecError

MARK = re.compile(r"^(?P<indent> *)# exercise (?P<name>[a-z0-9_.]+)\((?P<arguments>[^)]*)\)(?: -> (?P<results>.+))?$")


@dataclass(frozen=True)
class Hole:
    name: str  # rmsnorm, ddp_checkpoint.save
    arguments: str
    results: str  # "": the part returns
    indentation: str
    start: int  # lines of the text, counted from 0: the first between the marks, and the mark after them
    stop: int
    body: str  # without indentation

    @property
    def exercise(self) -> str:
        return self.name.partition(".")[0]

    @property
    def stub(self) -> str:
        call = f'unfinished("{self.name}"{", " + self.arguments if self.arguments else ""})'
        return f"{self.results} = {call}\n" if self.results else f"return {call}\n"

    @property
    def written(self) -> bool:
        """Something of its own stands here, not the stub."""
        code = [line for line in self.body.splitlines() if not line.lstrip().startswith("#")]
        return not any(f'unfinished("{self.name}"' in line for line in code)


def find_holes(text: str, path: str) -> list[Hole]:
    lines = text.splitlines(keepends=True)
    found: list[Hole] = []
    opened: tuple[re.Match[str], int] | None = None
    for number, line in enumerate(lines):
        if mark := MARK.match(line.rstrip("\n")):
            if opened:
                raise SpecError(without_end(path, opened[0]["name"], opened[1]))
            opened = mark, number + 1
        elif opened and line.strip() == f"# end {opened[0]['name']}":
            mark, start = opened
            body = dedent("".join(lines[start:number]))
            found.append(
                Hole(mark["name"], mark["arguments"], mark["results"] or "", mark["indent"], start, number, body)
            )
            opened = None
    if opened:
        raise SpecError(without_end(path, opened[0]["name"], opened[1]))
    return found


def without_end(path: str, name: str, line: int) -> str:
    return (
        f"{path}:{line}: the line `# end {name}` is missing; write it again, or `lmworks learn reset {path}` writes "
        "the file anew (yours is kept)"
    )


def replace_holes(text: str, path: str, body: Callable[[Hole], str | None]) -> tuple[str, list[int]]:
    """With other bodies (None: as it is), and for each line of the result the line, from 1, it stands for."""
    lines, at = text.splitlines(keepends=True), 0
    out: list[str] = []
    origin: list[int] = []
    for hole in find_holes(text, path):
        new = body(hole)
        if new is None:
            continue
        out += lines[at : hole.start]
        origin += range(at + 1, hole.start + 1)
        written = indent(new, hole.indentation).splitlines(keepends=True)
        out += written
        origin += [min(hole.start + 1 + index, hole.stop) for index in range(len(written))]
        at = hole.stop
    out += lines[at:]
    origin += range(at + 1, len(lines) + 1)
    return "".join(out), origin
