"""Unit tests of the code in an answer, in the sandbox."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from ..sandbox import Limits, passed_tests, program_of_tests, run_programs
from .answers import completion_text, last_code


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
