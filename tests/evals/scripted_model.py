"""A model whose answers are written down."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lmworks.evals.models import Completion, Likelihood, OnCompletion, OnLikelihood, Pair, Prompt


class ScriptedModel:
    """`answer(prompt, number)`: text of an answer, by the count of how often this prompt was asked."""

    def __init__(self, answer: Callable[[Prompt, int], str], name: str = "scripted") -> None:
        self.answer, self.facts = answer, {"model": name}
        self.asked: list[Prompt] = []

    def generate(self, prompts: Sequence[Prompt], on_result: OnCompletion) -> None:
        for place, prompt in enumerate(prompts):
            number = sum(one.text == prompt.text for one in self.asked)
            self.asked.append(prompt)
            on_result(place, Completion(self.answer(prompt, number), 3, "stop"))

    def likelihoods(self, pairs: Sequence[Pair], on_result: OnLikelihood) -> None:
        for place, (_, continuation) in enumerate(pairs):
            on_result(place, Likelihood(-float(len(continuation)), 1))

    def text_likelihoods(self, texts: Sequence[str], on_result: OnLikelihood) -> None:
        for place, text in enumerate(texts):
            on_result(place, Likelihood(-float(len(text)), len(text) // 2))


ADD = {
    "task_id": "add",
    "prompt": 'def add(a, b):\n    """Sum."""\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n",
}
DOUBLE = {
    "task_id": "double",
    "prompt": 'def double(a):\n    """Twice."""\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * a\n",
    "test": "def check(candidate):\n    assert candidate(4) == 8\n",
}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
