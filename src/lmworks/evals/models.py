"""What is evaluated: anything that continues texts and says how likely they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Prompt:
    """A request for one answer."""

    text: str
    seed: int
    max_tokens: int
    temperature: float
    top_p: float
    stop: Sequence[str] = ()
    suffix: str | None = None


@dataclass(frozen=True)
class Completion:
    text: str
    tokens: int = 0
    finish_reason: str = ""
    error: str = ""


@dataclass(frozen=True)
class Likelihood:
    """Of the tokens of a text that follows another."""

    logprob: float
    tokens: int
    greedy: bool = False  # whether each token was the likeliest
    error: str = ""


OnCompletion = Callable[[int, Completion], None]
OnLikelihood = Callable[[int, Likelihood], None]
Pair = tuple[str, str]  # a context, and the text after it that is scored


class EvalModel(Protocol):
    """Results are told as they come, with their place in the request."""

    @property
    def facts(self) -> dict[str, Any]:
        """What it is: equal facts, equal answers. Kept with the samples; a folder is not mixed of two models."""
        ...

    def generate(self, prompts: Sequence[Prompt], on_result: OnCompletion) -> None: ...
    def likelihoods(self, pairs: Sequence[Pair], on_result: OnLikelihood) -> None: ...
    def text_likelihoods(self, texts: Sequence[str], on_result: OnLikelihood) -> None:
        """Of whole texts, from their first token on."""
        ...
