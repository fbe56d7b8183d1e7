"""Multiple choice by likelihood, with the prompts of lm-evaluation-harness: MMLU, HellaSwag, ARC, and plain rows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ...spec.errors import DataError
from ..problem import Problem
from .format import CHOOSE, Format, filled

if TYPE_CHECKING:
    from ..suite import Suite

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def multiple_choice(row: dict[str, Any], place: str, suite: Suite) -> Problem:
    choices = [str(one) for one in row["choices"]]
    return problem(row, place, suite, str(row["question"]), [f" {one}" for one in choices], row["answer"])


def mmlu(row: dict[str, Any], place: str, suite: Suite) -> Problem:
    listed = [f"{letter}. {one}" for letter, one in zip(LETTERS, row["choices"], strict=False)]
    asked = "\n".join([str(row["question"]).strip(), *listed, "Answer:"])
    letters = [f" {letter}" for letter in LETTERS[: len(listed)]]
    return problem(row, place, suite, asked, letters, row["answer"], str(row.get("subject") or ""))


def hellaswag(row: dict[str, Any], place: str, suite: Suite) -> Problem:
    begun = f"{row['ctx_a']} {str(row['ctx_b']).capitalize()}"
    asked = without_wikihow(f"{row['activity_label']}: {begun}")
    endings = [f" {without_wikihow(one)}" for one in row["endings"]]
    return problem(row, place, suite, asked, endings, row["label"])


def without_wikihow(text: str) -> str:
    """WikiHow's marks go, as in lm-evaluation-harness."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def arc(row: dict[str, Any], place: str, suite: Suite) -> Problem:
    labels = [str(one) for one in row["choices"]["label"]]
    texts = [f" {one}" for one in row["choices"]["text"]]
    if str(row["answerKey"]) not in labels:
        raise DataError(f"{place}: answerKey {row['answerKey']!r} is none of {', '.join(labels)}")
    return problem(
        row, place, suite, f"Question: {row['question']}\nAnswer:", texts, labels.index(str(row["answerKey"]))
    )


def problem(
    row: dict[str, Any], place: str, suite: Suite, asked: str, choices: list[str], answer: Any, group: str = ""
) -> Problem:
    correct = LETTERS.find(answer) if isinstance(answer, str) and not answer.isdecimal() and answer else int(answer)
    if not 0 <= correct < len(choices):
        raise DataError(f"{place}: answer {answer!r} is none of its {len(choices)} choices")
    name = str(row.get("id") or row.get("ind") or place.rpartition(" ")[2])
    return Problem(
        id=name,
        prompt=filled(suite.prompt, asked, row),
        choices=choices,
        correct=correct,
        answer=choices[correct],
        group=group,
    )


MULTIPLE_CHOICE = Format(
    "question, choices, answer (index or letter)",
    ("accuracy_norm", "accuracy"),
    ("question", "choices", "answer"),
    multiple_choice,
    task=CHOOSE,
)
MMLU = Format(
    "question, choices by letter, answer (index), subject",
    ("accuracy",),
    ("question", "choices", "answer"),
    mmlu,
    task=CHOOSE,
)
HELLASWAG = Format(
    "ctx_a, ctx_b, activity_label, endings, label",
    ("accuracy_norm", "accuracy"),
    ("ctx_a", "ctx_b", "activity_label", "endings", "label"),
    hellaswag,
    task=CHOOSE,
)
ARC = Format(
    "question, choices (text, label), answerKey",
    ("accuracy_norm", "accuracy"),
    ("question", "choices", "answerKey"),
    arc,
    task=CHOOSE,
)
