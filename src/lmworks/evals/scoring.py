"""What one answer is worth, by metric."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..align.answers import final_number
from ..align.verifiers import equal, gold_number
from ..sandbox import Sandbox
from .execution import run_answer
from .metrics import TEXT_METRICS
from .problem import Problem
from .suite import Suite

NAME = re.compile(r"[A-Za-z_]\w*")
RELATIVE = 1e-6  # of numbers

Scores = dict[str, float]


def truncated(text: str, stops: Sequence[str], lines: int) -> str:
    """Up to the first stop, and to that many lines: a server may not know all stops."""
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    text = text[: min(ends)] if ends else text
    return "".join(text.splitlines(keepends=True)[:lines]) if lines else text


def score_text(suite: Suite, problem: Problem, text: str, sandbox: Sandbox) -> tuple[Scores, dict[str, Any]]:
    """Scores of an answer, and the log of its program."""
    scores: Scores = {}
    log: dict[str, Any] = {}
    if problem.known:  # the answer is a name
        found = NAME.match(text)
        text = found[0] if found else ""
    golds = problem.answer if isinstance(problem.answer, list) else [problem.answer]
    for name in suite.metrics:
        if name == "pass":
            if problem.tests or problem.cases:
                run = run_answer(problem, text, sandbox, suite.execution)
                scores[name], log = float(run.passed), run.log
        elif name == "resolves":
            scores[name] = float(text in problem.known)
        elif name == "numeric":
            scores[name] = float(equal(final_number(text), gold_number(problem.answer), RELATIVE))
        elif name == "recall":
            scores[name] = float(np.mean([TEXT_METRICS["contains"](text, one) for one in golds]))
        elif name in TEXT_METRICS:
            scores[name] = max(TEXT_METRICS[name](text, gold) for gold in golds)
    return scores, log


def score_choices(problem: Problem, logprobs: Sequence[float]) -> Scores:
    """The first of equals is chosen; a length counts characters without the leading space (lm-evaluation-harness)."""
    lengths = [len(choice.removeprefix(" ")) for choice in problem.choices]
    each = [logprob / max(1, length) for logprob, length in zip(logprobs, lengths, strict=True)]
    chosen, normed = logprobs.index(max(logprobs)), each.index(max(each))
    return {"accuracy": float(chosen == problem.correct), "accuracy_norm": float(normed == problem.correct)}


def score_document(text: str, logprob: float, tokens: int) -> tuple[Scores, dict[str, float]]:
    """Means over tokens and bytes, and how many there were: documents weigh as they are long."""
    size = len(text.encode())
    nll = -logprob
    scores = {"nll": nll / max(1, tokens), "bits_per_byte": nll / math.log(2) / max(1, size)}
    return scores, {"nll": tokens, "bits_per_byte": size}
