"""A request as it lives in the engine: one sequence for each answer, and what comes out in the end."""

from __future__ import annotations

import enum
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .sampling_params import SamplingParams

if TYPE_CHECKING:
    import llguidance

    from ..grammars.grammar import Matcher
    from .detokenizer import IncrementalDetokenizer

PLACEHOLDER_TOKEN = -1  # a token that the device has picked and the host has not read yet

ResultCallback = Callable[[int, "Result"], None]  # which of many prompts, and what it came to


def ignore_result(_place: int, _result: Result) -> None: ...


class SequenceStatus(enum.Enum):
    WAITING = "waiting"  # holds no blocks; its tokens so far are computed (again) when it is let in
    RUNNING = "running"
    FINISHED = "done"


@dataclass(frozen=True)
class Logprob:
    """Log-probability of the token at a place, and of the likeliest ones there."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Answer:
    """One finished answer. finish_reason: length, stop, cancelled, error (then `error` says what was wrong)."""

    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[Logprob] | None = None
    stop_reason: str | int | None = None  # the string or token that ended it
    error: str | None = None
    cumulative_logprob: float | None = None  # of all its tokens, where logprobs or best_of asked for them


@dataclass(frozen=True)
class Result:
    """What a request came to. The fields of the first answer are also its own; with n > 1 see `answers`."""

    prompt_token_ids: list[int]
    answers: list[Answer]
    prompt_logprobs: list[Logprob | None] | None = None
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    times: dict[str, float] = field(default_factory=dict)  # seconds: queue, first_token, total

    @property
    def token_ids(self) -> list[int]:
        return self.answers[0].token_ids

    @property
    def text(self) -> str:
        return self.answers[0].text

    @property
    def logprobs(self) -> list[Logprob] | None:
        return self.answers[0].logprobs

    @property
    def finish_reason(self) -> str:
        return self.answers[0].finish_reason

    @property
    def error(self) -> str | None:
        return self.answers[0].error


@dataclass(eq=False)
class Sequence:
    """One answer on its way. `tokens` is prompt and answer; the last ones may be UNKNOWN while the device picks them.

    `known` counts those that the host has read; `computed` runs ahead of it by what has been launched.
    """

    request: Request
    index: int  # which of the request's answers
    seed: int
    tokens: list[int]
    prompt: int  # tokens of the prompt
    limit: int = sys.maxsize  # tokens it may come to, prompt included
    known: int = field(init=False)  # of `tokens`; what follows is UNKNOWN
    state: SequenceStatus = SequenceStatus.WAITING
    computed: int = 0  # tokens whose keys and values lie in the cache (or will, once launched steps have run)
    blocks: list[int] = field(default_factory=list)  # block i holds tokens [i·size, (i + 1)·size)
    hashes: list[bytes] = field(default_factory=list)  # of its full blocks, each over all tokens up to its end
    offered: int = 0  # of its blocks, put up for others to find
    rank: tuple[int, int, int] = (0, 0, 0)  # the scheduler's order: the smallest goes first
    slot: int = -1  # its row in the device's tables while it runs
    draft_tokens: list[int] = field(default_factory=list)  # tokens that speculation proposes to come next
    logprobs: list[Logprob] = field(default_factory=list)
    preempted: int = 0
    given: int = 0  # tokens whose keys and values others had computed, when it was let in
    alone: bool = False  # what it was given was spoilt: it computes all of its tokens itself
    text: IncrementalDetokenizer | None = None  # of the answer so far, where someone looks at it before the end
    done: Answer | None = None  # once it has ended
    latest: float = 0.0  # when its last token was read
    matcher: Matcher | None = None  # how far it has come in the shape that was asked for
    extra: dict[str, Any] = field(default_factory=dict)  # what others remember of it: a guesser its n-grams

    def __post_init__(self) -> None:
        self.known = len(self.tokens)

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt :]

    @property
    def params(self) -> SamplingParams:
        return self.request.params


@dataclass(eq=False)
class Request:
    """A prompt and its wishes. A smaller `priority` is served first; equals in order of arrival."""

    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    tenant: str = ""  # requests share cached prefixes only within a tenant
    ends: tuple[int, ...] = ()  # tokens that end an answer: end of text, unless ignored, and params.stop_token_ids
    stream: bool = False  # text is wanted token by token
    grammar: llguidance.LLMatcher | None = None  # what `params` ask for, where it was compiled before
    id: int = field(default_factory=itertools.count().__next__)
    arrived: float = field(default_factory=time.monotonic)
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)
    cached_tokens: int = 0
    started: float = 0.0  # when it was first let in (as `arrived`: seconds of the monotonic clock; 0: not yet)
    first_token: float = 0.0


@dataclass(frozen=True)
class OutputDelta:
    """What a step brought to one answer. The last piece of a request's last answer carries the result."""

    request: Request
    index: int  # which of the answers
    token_ids: list[int]
    text: str = ""  # where the request is streamed
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    result: Result | None = None
