"""What a request may ask for: how tokens are picked, when to stop, what to report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..spec import SpecError

SEEDS = 2**63
MAX_LOGPROBS = 32
MAX_N = 128


@dataclass(frozen=True)
class SamplingParams:
    """One request's wishes; valid by construction. temperature = 0 is greedy; top_k = 0, top_p = 1, min_p = 0: off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0  # tokens less likely than this part of the likeliest are left out
    repetition_penalty: float = 1.0  # divides positive logits of tokens seen (prompt too), multiplies negative ones
    presence_penalty: float = 0.0  # taken off the logit of every token that the answer holds
    frequency_penalty: float = 0.0  # the same, once for each time
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: drawn by the engine, another one for each request
    max_tokens: int = 16
    min_tokens: int = 0  # no stop token or string before the answer has as many
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # leave the stop string in the text
    n: int = 1  # answers to give
    best_of: int | None = None  # answers to make, of which the n likeliest are given
    logprobs: int | None = None  # log-probability of each token, and of so many of the likeliest (0: of it alone)
    prompt_logprobs: int | None = None
    json_schema: Mapping[str, Any] | str | None = None  # the answer is JSON that fits it
    regex: str | None = None  # the answer matches it as a whole
    choice: Sequence[str] | None = None  # the answer is one of these
    adapter: str | None = None  # name of a LoRA adapter that the engine holds

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self.inside("temperature", 0, math.inf)
        self.inside("top_k", 0, math.inf)
        self.inside("top_p", 0, 1, open_below=True)
        self.inside("min_p", 0, 1)
        self.inside("repetition_penalty", 0, math.inf, open_below=True)
        self.inside("presence_penalty", -2, 2)
        self.inside("frequency_penalty", -2, 2)
        self.inside("seed", 0, SEEDS - 1)
        self.inside("max_tokens", 1, math.inf)
        self.inside("min_tokens", 0, self.max_tokens)
        self.inside("n", 1, MAX_N)
        self.inside("best_of", self.n, MAX_N)
        self.inside("logprobs", 0, MAX_LOGPROBS)
        self.inside("prompt_logprobs", 0, MAX_LOGPROBS)
        if any(not text for text in self.stop):
            raise SpecError("stop holds an empty string: every text would end at once")
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise SpecError(f"logit_bias of token {token} is {bias}: it must be finite (−100 bans, 100 forces)")
        shapes = [name for name in ("json_schema", "regex", "choice") if getattr(self, name) is not None]
        if len(shapes) > 1:
            raise SpecError(f"{' and '.join(shapes)} cannot be asked for together: an answer has one shape")

    def inside(self, name: str, low: float, high: float, open_below: bool = False) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or math.isinf(value):
            raise SpecError(f"{name} = {value!r}: a finite number is expected")
        if value < low or value > high or (open_below and value == low):
            least = f"more than {low:g}" if open_below else f"at least {low:g}"
            most = "" if math.isinf(high) else f" and at most {high if isinstance(high, int) else f'{high:g}'}"
            shown = value if isinstance(value, int) else f"{value:g}"
            raise SpecError(f"{name} = {shown} is out of range: it must be {least}{most}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def answers(self) -> int:
        """How many are made."""
        return self.best_of or self.n

    @property
    def scored(self) -> bool:
        """Whether each token's log-probability is needed: it was asked for, or it chooses the best answers."""
        return self.logprobs is not None or self.answers > self.n

    @property
    def shaped(self) -> bool:
        """Whether a grammar says which tokens may come."""
        return self.json_schema is not None or self.regex is not None or self.choice is not None
