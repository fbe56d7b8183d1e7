"""Code under test: a program that runs unit tests over it and cannot be made to say that they passed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .program import Program, SandboxResult

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
