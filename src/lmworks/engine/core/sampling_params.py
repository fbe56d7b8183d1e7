"""Sampling parameters: how tokens are sampled, when to stop, what to report."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from ...spec import SpecError

SEEDS = 2**63
MAX_LOGPROBS = 32
MAX_N = 128
MAX_TOKENS = 2**31 - 1  # more than any context
FP32_MAX = 3e38
SHAPES = ("json_schema", "regex", "choice", "grammar", "structural_tag")  # of structured output: one of them


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request, validated. temperature = 0 is greedy; top_k = 0, top_p = 1, min_p = 0: off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0  # minimum probability, relative to the likeliest token
    repetition_penalty: float = 1.0  # divides positive logits of tokens seen (prompt too), multiplies negative ones
    presence_penalty: float = 0.0  # subtracted from the logit of every token in the output
    frequency_penalty: float = 0.0  # the same, once for each occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None  # no other token is sampled
    bad_words: Sequence[str] = ()  # texts whose last token is not sampled after their other tokens
    seed: int | None = None  # None: drawn by the engine
    max_tokens: int = 16
    min_tokens: int = 0  # no stop token or string before
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # leave the stop string in the text
    skip_special_tokens: bool = True  # leave the names of special tokens out of the text
    truncate_prompt_tokens: int | None = None  # keep so many of the prompt's last tokens (−1: as many as fit)
    cache_salt: str | None = None  # the prefix cache is shared only with requests of the same salt
    n: int = 1  # answers
    best_of: int | None = None  # sequences to generate, of which the n likeliest are returned
    logprobs: int | None = None  # log-probability of each token, and of so many of the likeliest (0: of it alone)
    prompt_logprobs: int | None = None
    json_schema: Mapping[str, Any] | str | None = None  # structured output
    regex: str | None = None  # the whole answer matches
    choice: Sequence[str] | None = None  # the answer is one of these
    structure_after: str | None = None  # structured output begins after this text, the end of the reasoning
    grammar: str | None = None  # a context-free grammar of the answer: Lark, or EBNF as llama.cpp writes it (GBNF)
    structural_tag: Mapping[str, Any] | str | None = None  # text, in which tags hold answers to JSON schemas
    adapter: str | None = None  # name of a loaded LoRA adapter

    def __post_init__(self) -> None:
        self.as_tuple("stop", str, "texts")
        self.as_tuple("stop_token_ids", int, "token ids")
        self.as_tuple("choice", str, "texts")
        self.as_tuple("bad_words", str, "texts")
        self.as_tuple("allowed_token_ids", int, "token ids")
        object.__setattr__(self, "logit_bias", biases(self.logit_bias))
        self.check_number("temperature", 0, math.inf)
        self.check_int("top_k", 0)
        self.check_number("top_p", 0, 1, open_below=True)
        self.check_number("min_p", 0, 1)
        self.check_number("repetition_penalty", 0, math.inf, open_below=True)
        self.check_number("presence_penalty", -2, 2)
        self.check_number("frequency_penalty", -2, 2)
        self.check_int("seed", 0, SEEDS - 1)
        self.check_int("max_tokens", 1, MAX_TOKENS)
        self.check_int("min_tokens", 0, self.max_tokens)
        self.check_int("n", 1, MAX_N)
        self.check_int("best_of", self.n, MAX_N)
        self.check_int("logprobs", 0, MAX_LOGPROBS)
        self.check_int("prompt_logprobs", 0, MAX_LOGPROBS)
        self.check_int("truncate_prompt_tokens", -1, MAX_TOKENS)
        for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"{name} = {getattr(self, name)!r:.60}: true or false is expected")
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise SpecError(f"adapter = {self.adapter!r:.60}: the name of an adapter is expected")
        if not isinstance(self.structure_after, str | None) or self.structure_after == "":
            raise SpecError(f"structure_after = {self.structure_after!r:.60}: a text is expected")
        if self.truncate_prompt_tokens == 0:
            raise SpecError("truncate_prompt_tokens = 0 would leave nothing of the prompt: give −1 or at least 1")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise SpecError("allowed_token_ids is empty: no token could be sampled")
        if not all(word.strip() for word in self.bad_words):
            raise SpecError("bad_words holds an empty text")
        if not isinstance(self.cache_salt, str | None):
            raise SpecError(f"cache_salt = {self.cache_salt!r:.60}: a text is expected")
        if self.cache_salt == "":
            raise SpecError("cache_salt is empty: give a text, or leave it out")
        if "" in self.stop:
            raise SpecError("stop holds an empty string: every text would end at once")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise SpecError(f"{name} = {getattr(self, name)!r:.60}: it must be text")
        for name in ("json_schema", "structural_tag"):
            if not isinstance(getattr(self, name), Mapping | str | None):
                raise SpecError(f"{name} = {getattr(self, name)!r:.60}: it must be an object, or the text of one")
        shapes = [name for name in SHAPES if getattr(self, name) is not None]
        if len(shapes) > 1:
            raise SpecError(f"{' and '.join(shapes)} cannot be combined: use one of them")

    # --- validation ---

    def as_tuple(self, name: str, kind: type, what: str) -> None:
        """Normalise a list to a tuple; a single stop string becomes one element."""
        value = getattr(self, name)
        if value is None and getattr(type(self), name) is None:
            return
        given = (value,) if name == "stop" and isinstance(value, str) else () if value is None else value
        several = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
        several = several and getattr(given, "ndim", 1) > 0  # a 0-dimensional array is iterable by type only
        found = tuple(given) if several else ()
        if set(map(type, found)) - {kind}:  # plain values need no look at each: lists may be long
            found = tuple(index(each) if kind is int else each for each in found)
            several = several and all(isinstance(each, kind) for each in found)
        if not several:
            raise SpecError(f"{name} = {value!r:.60}: a list of {what} is expected")
        object.__setattr__(self, name, found)

    def check_int(self, name: str, low: int, high: float = math.inf) -> None:
        """None is allowed where it is the default."""
        value = getattr(self, name)
        if value is None and getattr(type(self), name) is None:
            return
        found = index(value)
        if found is None:
            raise SpecError(f"{name} = {value!r:.60}: a whole number is expected")
        self.check_range(name, found, low, high)

    def check_number(self, name: str, low: float, high: float, open_below: bool = False) -> None:
        value = getattr(self, name)
        found = finite(value)
        if found is None:
            raise SpecError(f"{name} = {value!r:.60}: a finite number is expected")
        self.check_range(name, found, low, high, open_below)

    def check_range(self, name: str, value: float, low: float, high: float, open_below: bool = False) -> None:
        if value < low or value > high or (open_below and value == low):
            least = f"more than {low:g}" if open_below else f"at least {low:g}"
            most = "" if math.isinf(high) else f" and at most {high if isinstance(high, int) else f'{high:g}'}"
            shown = value if isinstance(value, int) else f"{value:g}"
            raise SpecError(f"{name} = {shown} is out of range: it must be {least}{most}")
        object.__setattr__(self, name, value)

    # --- derived ---

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def answers(self) -> int:
        """Number of sequences."""
        return self.best_of or self.n

    @property
    def needs_logprobs(self) -> bool:
        """Whether each token's log-probability is needed: for `logprobs`, or to rank best_of."""
        return self.logprobs is not None or self.answers > self.n

    @property
    def structured(self) -> bool:
        """Whether a grammar constrains the output."""
        return any(getattr(self, name) is not None for name in SHAPES)

    @property
    def restricted(self) -> bool:
        """Whether some tokens are ruled out beforehand, or after others."""
        return bool(self.bad_words) or self.allowed_token_ids is not None


def index(value: Any) -> int | None:
    """An integer of any type, numpy's too; None for anything else. Nothing is rounded."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def finite(value: Any) -> float | None:
    """A number of any kind that fp32, in which the sampler computes, can hold; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if abs(found) <= FP32_MAX else None


def biases(given: Any) -> dict[int, float]:
    """By token. JSON knows only texts as keys, so a token may be written as one."""
    if given is not None and not isinstance(given, Mapping):
        raise SpecError(f"logit_bias = {given!r:.60}: a mapping of token ids to numbers is expected")
    found = {}
    for key, value in (given or {}).items():
        written = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10
        token, bias = int(key) if written else index(key), finite(value)
        if token is None:
            raise SpecError(f"logit_bias: {key!r:.60} is not a token id")
        if bias is None:
            raise SpecError(f"logit_bias of token {token} is {value!r:.60}: it must be finite (−100 bans, 100 forces)")
        found[token] = bias
    return found
