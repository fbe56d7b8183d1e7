"""Suites that need no download: made from the standard library of the Python that runs.

A tenth of its modules, chosen by a hash of their names, is held out for infilling and imports: a model trained on the
others has not seen them (`held_out`). Functions with doctests are few, so all of them are taken.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ...data.sources import read_text, stdlib_files
from ...spec.errors import SpecError
from ..problem import Problem
from .format import Format

if TYPE_CHECKING:
    from ..suite import Suite

BEFORE, AFTER = 4000, 2000  # characters of a file around a gap
MOST = 200  # problems of infilling and of imports
OF_A_MODULE = 24  # functions with doctests: _pydecimal has a hundred alike
BATCH = 8  # candidates that are tried at once
SHARE = 10  # one module in so many is held out
# `examples` are those of the original docstring, whatever an answer made of it.
RUN_DOCTESTS = """
import doctest
examples = doctest.DocTestParser().get_doctest({docstring}, globals(), {name}, None, 0)
flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
assert not doctest.DocTestRunner(verbose=False, optionflags=flags).run(examples, out=print).failed
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Empty for files of other Pythons, which lib2to3 has."""
        try:
            return ast.parse(self.text)
        except SyntaxError:
            return ast.Module([], [])

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines(keepends=True)

    @cached_property
    def functions(self) -> list[tuple[str, Function]]:
        """Top-level functions and methods of top-level classes, by dotted name."""
        found: list[tuple[str, Function]] = []
        for node in self.tree.body:
            if isinstance(node, Function):
                found.append((node.name, node))
            elif isinstance(node, ast.ClassDef):
                found += [(f"{node.name}.{one.name}", one) for one in node.body if isinstance(one, Function)]
        return found

    @cached_property
    def names(self) -> set[str]:
        """Functions, classes and variables at its top level."""
        found = set()
        for node in self.tree.body:
            if isinstance(node, Function | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign):
                found |= {one.id for one in node.targets if isinstance(one, ast.Name)}
        return {name for name in found if not name.startswith("_")}

    def until(self, line: int) -> str:
        """The text before a line, which counts from 1."""
        return "".join(self.lines[: line - 1])

    def after(self, line: int) -> str:
        return "".join(self.lines[line:])


def modules() -> Iterator[Module]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in stdlib_files():
        path = Path(file).relative_to(root).with_suffix("")
        text = read_text(file)
        if text and not {"\t", "\f", "\r"} & set(text):  # columns are characters, lines end alike
            yield Module(".".join(path.parts).removesuffix(".__init__"), text)


def held_out(module: str) -> bool:
    return int(hashlib.sha256(module.encode()).hexdigest()[:8], 16) % SHARE == 0


def order(problem: Problem) -> str:
    """A fixed shuffle, so that --limit takes a sample of all modules."""
    return hashlib.sha256(problem.id.encode()).hexdigest()


def check_data(suite: Suite) -> None:
    if suite.data not in ("", "stdlib"):
        raise SpecError(f"suite {suite.name}: data = {suite.data!r}: it is made from the standard library alone")


# --- functions with doctests -----------------------------------------------------------------------------


def doctests(suite: Suite, limit: int) -> list[Problem]:
    """Functions whose doctests pass, and fail once the body is gone: the others would test nothing."""
    check_data(suite)
    candidates: list[Problem] = []
    for module in modules():
        if ">>>" in module.text:
            candidates += sorted(doctest_problems(module), key=order)[:OF_A_MODULE]
    candidates.sort(key=order)
    found: list[Problem] = []
    for start in range(0, len(candidates), BATCH):
        found += tested(candidates[start : start + BATCH], suite)
        if limit and len(found) >= limit:
            break
    return found[: limit or None]


def tested(problems: Sequence[Problem], suite: Suite) -> list[Problem]:
    from ..execution import run_answers

    own = [(one, str(one.answer)) for one in problems]
    gone = [(one, f"{indent_of(str(one.answer))}raise NotImplementedError\n") for one in problems]
    runs = run_answers([*own, *gone], suite.execution)
    return [
        one for one, whole, none in zip(problems, runs, runs[len(own) :], strict=False) if whole.passed > none.passed
    ]


def doctest_problems(module: Module) -> Iterator[Problem]:
    for name, node in module.functions:
        docstring = ast.get_docstring(node, clean=True) or ""
        if ">>>" not in docstring or len(node.body) < 2:
            continue
        first, last = node.body[1].lineno, node.end_lineno or 0
        before = module.until(first)
        indent = " " * node.col_offset
        yield Problem(
            id=f"{module.name}.{name}",
            prompt=tail(before),
            answer="".join(module.lines[first - 1 : last]),
            before=before,
            after=module.after(last),
            tests=RUN_DOCTESTS.format(docstring=repr(docstring), name=repr(name)),
            group=module.name.partition(".")[0],
            stop=[f"\n{indent}{word}" for word in ("def ", "class ", "@", "#")] + (["\n    def "] if indent else []),
        )


def tail(text: str) -> str:
    """The last lines, as many as there is room for."""
    if len(text) <= BEFORE:
        return text
    return text[-BEFORE:].partition("\n")[2]


def indent_of(text: str) -> str:
    return text[: len(text) - len(text.lstrip(" "))]


# --- gaps in held-out modules ----------------------------------------------------------------------------


def infilling(suite: Suite, limit: int) -> list[Problem]:
    """One statement of one to four lines, gone from a function."""
    check_data(suite)
    found = [one for module in modules() if held_out(module.name) for one in gaps(module)]
    return sorted(found, key=order)[: limit or MOST]


def gaps(module: Module) -> Iterator[Problem]:
    for name, node in module.functions:
        inner = [one for one in ast.walk(node) if isinstance(one, ast.stmt) and one is not node]
        fitting = [one for one in inner if 0 <= (one.end_lineno or 0) - one.lineno <= 3 and not is_text(one)]
        if len(fitting) < 4:
            continue
        one = random.Random(f"{module.name}.{name}").choice(fitting)
        last = one.end_lineno or one.lineno
        lines = module.lines[one.lineno - 1 : last]
        indent = indent_of(lines[0])
        if len(indent) != one.col_offset or len("".join(lines).strip()) < 8:  # two statements in a line, or `pass`
            continue
        yield Problem(
            id=f"{module.name}.{name}:{one.lineno}",
            prompt=tail(module.until(one.lineno)),
            suffix=module.after(last)[:AFTER],
            answer="".join(lines),
            group=type(one).__name__,
            lines=len(lines),
            max_tokens=256,
        )


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


# --- names of imported modules ---------------------------------------------------------------------------


def imports(suite: Suite, limit: int) -> list[Problem]:
    """The name after `module.`, with that module's definitions in the prompt."""
    check_data(suite)
    known = {module.name: module for module in modules()}
    found = [one for module in known.values() if held_out(module.name) for one in uses(module, known)]
    return sorted(found, key=order)[: limit or MOST]


def uses(module: Module, known: dict[str, Module]) -> Iterator[Problem]:
    """The first use of each imported module's function or class."""
    imported = {alias.name for node in module.tree.body if isinstance(node, ast.Import) for alias in node.names}
    seen = set()
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        source, name = node.value.id, node.attr
        if source not in imported or source not in known or name not in known[source].names or (source, name) in seen:
            continue
        seen.add((source, name))
        line, column = node.value.end_lineno or 0, node.value.end_col_offset or 0
        here = module.until(line) + module.lines[line - 1].encode()[:column].decode() + "."
        yield Problem(
            id=f"{module.name}:{source}.{name}",
            prompt=f"{outline(known[source], name)}\n# {module.name}.py\n{tail(here)}",
            answer=name,
            known=sorted(known[source].names),
            group=source,
            max_tokens=16,
            stop=["\n"],
        )


def outline(module: Module, wanted: str, most: int = 24) -> str:
    """First lines of definitions, the wanted one among others of the same module, as comments."""
    heads = {
        node.name: module.lines[node.lineno - 1].rstrip()
        for node in module.tree.body
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")
    }
    heads.setdefault(wanted, wanted)
    names = sorted(heads, key=lambda name: (name != wanted, hashlib.sha256(f"{wanted} {name}".encode()).hexdigest()))
    return "\n".join([f"# {module.name}.py", *(f"#   {heads[name]}" for name in sorted(names[:most]))])


STDLIB_DOCTEST = Format("functions of the standard library, tested by their doctests", ("pass",), build=doctests)
STDLIB_INFILL = Format("a statement of a held-out module of the standard library", ("exact", "edit"), build=infilling)
STDLIB_IMPORTS = Format("the name after `module.`, with what that module defines", ("exact", "resolves"), build=imports)
