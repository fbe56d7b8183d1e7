"""Answers as programs: put together, run in the sandbox with their tests, judged."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..align.answers import last_code
from ..sandbox import Limits, Program, Sandbox, SandboxResult, passed_tests, program_of_tests
from .problem import Problem

if TYPE_CHECKING:
    from .suite import Execution

LOG = 2000  # characters kept of what a program wrote


@dataclass(frozen=True)
class Run:
    """What became of one answer's program."""

    passed: bool
    log: dict[str, Any]


def source_of(problem: Problem, text: str) -> str:
    """The program: what stands before the gap, the answer, what follows. In chat an answer may be a whole function."""
    block = last_code(text)
    if block is not None:
        whole = problem.entry_point and f"def {problem.entry_point}(" in block
        return (
            f"{header(problem.before)}\n{block}{problem.after}" if whole else f"{problem.before}{block}{problem.after}"
        )
    return f"{problem.before}{text}{problem.after}"


def header(before: str) -> str:
    """Imports of the prompt, which an answer that repeats the function may leave out."""
    return "\n".join(line for line in before.splitlines() if line.startswith(("import ", "from ")))


def run_answer(problem: Problem, text: str, sandbox: Sandbox, execution: Execution) -> Run:
    if problem.forbidden and problem.forbidden in text:
        return Run(False, {"reason": f"the answer holds {problem.forbidden!r}"})
    limits = Limits(
        cpu_seconds=execution.seconds, wall_seconds=2 * execution.seconds, memory_bytes=execution.memory_mb << 20
    )
    if problem.cases:
        return run_cases(problem, text, sandbox, limits)
    word = secrets.token_hex(16)
    result = sandbox.run(program_of_tests(word, problem.tests, source_of(problem, text)), limits)
    passed, total = passed_tests(word, result)
    return Run(0 < passed == total, {"passed": passed, "tests": total, **log_of(result, word)})


def run_cases(problem: Problem, text: str, sandbox: Sandbox, limits: Limits) -> Run:
    """Each case is a run of its own: standard input in, output compared but for spaces at the ends of lines."""
    for number, (given, wanted) in enumerate(problem.cases):
        result = sandbox.run(Program(source_of(problem, text), stdin=given), limits)
        outputs = [wanted] if isinstance(wanted, str) else wanted
        if not result.ok or trimmed(result.text) not in map(trimmed, outputs):
            return Run(False, {"passed": number, "tests": len(problem.cases), **log_of(result)})
    return Run(True, {"passed": len(problem.cases), "tests": len(problem.cases)})


def trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def log_of(result: SandboxResult, word: str = "") -> dict[str, Any]:
    """What is kept: why it ended, and the last of what it wrote."""
    said = "\n".join(line for line in result.text.splitlines() if not (word and line.startswith(word))).strip()
    found = {
        "exit_code": result.exit_code,
        "limit": result.limit,
        "stdout": said[-LOG:],
        "stderr": result.stderr.decode(errors="replace").strip()[-LOG:],
        "seconds": round(result.wall_seconds, 4),
        "isolation": result.isolation,
    }
    return {name: value for name, value in found.items() if value not in (None, "")}


def run_answers(answers: Iterable[tuple[Problem, str]], execution: Execution) -> list[Run]:
    """In order, as many at once as there are cores."""
    with Sandbox() as sandbox, ThreadPoolExecutor(sandbox.size) as threads:
        return list(threads.map(lambda pair: run_answer(pair[0], pair[1], sandbox, execution), answers))
