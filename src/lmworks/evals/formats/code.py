"""Functions to be written, tested by running them: HumanEval, its infilling, MBPP, CRUXEval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...spec.errors import DataError
from ..problem import Problem
from .format import Format, filled

if TYPE_CHECKING:
    from ..suite import Suite

TOP_LEVEL = ("\nclass ", "\ndef ", "\n#", "\n@", "\nprint", "\nif ", "\nassert", "\n```")


def humaneval(row: dict[str, Any], place: str, suite: Suite) -> Problem:
    return Problem(
        id=str(row["task_id"]),
        prompt=filled(suite.prompt, row["prompt"], row),
        answer=row.get("canonical_solution") or "",
        before=row["prompt"],
        tests=check_call(row, place),
        entry_point=row["entry_point"],
    )


def infilling(row: dict[str, Any], place: str, suite: Suite) -> Problem:
    return Problem(
        id=str(row["task_id"]),
        prompt=filled(suite.prompt, row["prompt"], row),
        suffix=row["suffix"],
        answer=row.get("canonical_solution") or "",
        before=row["prompt"],
        after=row["suffix"],
        tests=check_call(row, place),
    )


def check_call(row: dict[str, Any], place: str) -> str:
    test, name = row["test"], row["entry_point"]
    if not isinstance(test, str):  # a list of assertions, as an expression, would pass whatever is in it
        raise DataError(f"{place}: its test is no program but {type(test).__name__}; format 'mbpp' has lists of tests")
    if not test.strip():
        raise DataError(f"{place}: its test is empty: every answer would pass")
    return f"{test}\ncheck({name})" if "def check(" in test else test


def mbpp(row: dict[str, Any], place: str, suite: Suite) -> Problem:
    tests: Sequence[str] = row["test_list"]
    if not isinstance(tests, list) or not tests:
        raise DataError(f"{place}: test_list holds no tests: every answer would pass")
    text = row.get("text") or row.get("prompt")
    if not text:
        raise DataError(f"{place}: no field 'text' (or 'prompt'); it has {', '.join(row)}")
    shown = "\n".join(tests)
    prepare = [row.get("test_setup_code") or "", *(row.get("test_imports") or [])]
    return Problem(
        id=str(row["task_id"]),
        prompt=filled(suite.prompt, f'"""\n{text}\n{shown}\n"""\n', row),
        answer=row.get("code") or "",
        tests="\n".join([*filter(None, prepare), *tests]),
    )


def cruxeval_output(row: dict[str, Any], place: str, suite: Suite) -> Problem:
    own = f"{row['code']}\n\nassert f({row['input']}) =="
    return Problem(
        id=str(row["id"]),
        prompt=filled(suite.prompt, own, row),
        answer=row["output"],
        before=f"{row['code']}\nprediction = (",
        after=")\n",
        tests=f"assert prediction == {row['output']}",
        forbidden="f(",
    )


def cruxeval_input(row: dict[str, Any], place: str, suite: Suite) -> Problem:
    own = f"{row['code']}\n\nassert {row['output']} == f("
    return Problem(
        id=str(row["id"]),
        prompt=filled(suite.prompt, own, row),
        answer=f"{row['input']})",
        before=f"{row['code']}\nprediction = f(",
        after="\n",
        tests=f"assert prediction == {row['output']}",
    )


HUMANEVAL = Format(
    "complete a function from its docstring (task_id, prompt, entry_point, test)",
    ("pass",),
    ("task_id", "prompt", "entry_point", "test"),
    humaneval,
    stop=TOP_LEVEL,
)
INFILLING = Format(
    "fill a gap in a function (task_id, prompt, suffix, entry_point, test)",
    ("pass", "exact"),
    ("task_id", "prompt", "suffix", "entry_point", "test"),
    infilling,
)
MBPP = Format(
    "write a function from one sentence and its tests (task_id, text, test_list)",
    ("pass",),
    ("task_id", "test_list"),
    mbpp,
    stop=("\nclass ", "\nassert", '\n"""', "\nprint", "\nif ", "\n```"),
)
CRUXEVAL_OUTPUT = Format(
    "what a function returns (id, code, input, output)",
    ("pass",),
    ("id", "code", "input", "output"),
    cruxeval_output,
    stop=("\n",),
)
CRUXEVAL_INPUT = Format(
    "an argument for which a function returns this (id, code, input, output)",
    ("pass",),
    ("id", "code", "input", "output"),
    cruxeval_input,
    stop=("\n",),
)
