"""One problem of a suite, in the form that all formats are read into."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """What the model gets, and what its answer is held against. Plain data: it is kept in the evaluation's folder."""

    id: str
    prompt: str  # to be continued; of choices: what stands before each
    suffix: str | None = None  # infilling: what follows the gap
    answer: str | list[str] = ""  # text of the answer, or those that count
    choices: list[str] = field(default_factory=list)  # continuations, of which `correct` is right
    correct: int = 0
    before: str = ""  # of the program: the answer stands between these two
    after: str = ""
    tests: str = ""  # Python that checks the program
    cases: list[list[Any]] = field(default_factory=list)  # [standard input, outputs that count], instead of tests
    entry_point: str = ""  # a function that an answer in chat may define whole
    forbidden: str = ""  # text that an answer must not hold
    known: list[str] = field(default_factory=list)  # names that resolve
    group: str = ""  # scores are also given by group
    stop: list[str] = field(default_factory=list)  # beside those of the suite
    max_tokens: int = 0  # 0: the suite's
    lines: int = 0  # of an answer that are looked at (0: all)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
