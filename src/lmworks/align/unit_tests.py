"""Unit tests of the code in an answer, in the sandbox."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ..sandbox import Limits, Program, SandboxResult, run_programs
from .answers import completion_text, last_code

# Reads the secret word with which it reports from standard input, so that it stands neither in its text nor in a file:
# code that ends early, or prints that it has passed, has not passed.
HARNESS = """
import ast, json, os, sys

def run():
    word, code, tests = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    report = os.dup(1)
    say = lambda text: os.write(report, f"\\n{word} {text}\\n".encode())
    names = {"__name__": "solution", "__builtins__": __builtins__}
    steps = []
    for test in tests:
        for node in ast.parse(test).body:
            counts = isinstance(node, ast.Assert) or isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            steps.append((counts, compile(ast.Module([node], []), "tests", "exec")))
    functions = [node.name for test in tests for node in ast.parse(test).body
                 if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    steps += [(True, compile(f"{name}()", "tests", "exec")) for name in functions]
    say(f"tests {sum(counts for counts, _ in steps)}")
    exec(compile(code, "solution.py", "exec"), names)
    for counts, step in steps:
        try:
            exec(step, names)
        except BaseException as error:
            if not counts:
                raise
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        else:
            if counts:
                say("passed")

run()
"""


def unit_tests(
    completions: Sequence[Any],
    tests: Sequence[Any],
    *,
    partial: bool = False,
    seconds: float = 5.0,
    memory_mb: int = 512,
    workers: int | None = None,
    isolation: str = "auto",
    **columns: Any,
) -> list[float | None]:
    """1 where the last code block, or the whole text without one, passes all `tests`: Python source, or a list of it.

    A test is an assertion, a call (`check(f)`) or a function `test_…`; other statements prepare. With `partial`, the
    share of tests that pass. `seconds` (of CPU; twice as many by the clock) and `memory_mb` are for all tests of an
    answer together.
    """
    word = secrets.token_hex(16)
    asked = [index for index, one in enumerate(tests) if one is not None]
    programs = []
    for index in asked:
        text = completion_text(completions[index])
        block = last_code(text)
        programs.append(program_of_tests(word, tests[index], code=text if block is None else block))
    limits = Limits(cpu_seconds=seconds, wall_seconds=2 * seconds, memory_bytes=memory_mb << 20)
    results = run_programs(programs, limits=limits, workers=workers, isolation=isolation)
    values: list[float | None] = [None] * len(completions)
    for index, result in zip(asked, results, strict=True):
        passed, total = passed_tests(word, result)
        values[index] = (passed / total if total else 0.0) if partial else float(0 < passed == total)
    return values


def program_of_tests(word: str, tests: Any, code: str = "", files: Mapping[str, str] | None = None) -> Program:
    """`word`: with which it reports, secret and new for every program or batch of them."""
    listed = [tests] if isinstance(tests, str) else list(tests)
    check_tests(listed)
    return Program(HARNESS, stdin=json.dumps([word, code, listed]), files=files or {})


def passed_tests(word: str, result: SandboxResult) -> tuple[int, int]:
    """How many tests have passed, and how many there are; 0 where the program ended before it could say so."""
    said = [line.split()[1:] for line in result.text.splitlines() if line.startswith(word)]
    return said.count(["passed"]), next((int(line[1]) for line in said if line[0] == "tests"), 0)


def check_tests(listed: Sequence[str]) -> None:
    for test in listed:
        compile(test, "tests", "exec")  # SyntaxError: the data is wrong, not the answer
    if not any("assert" in test or "(" in test for test in listed):
        raise ValueError("tests hold no assertion, no call and no function test_…")
