"""A request inside the engine: one sequence for each answer, output deltas, and the result.

Admission: which requests are rejected, and why, before they take any resources.
"""

from __future__ import annotations

import enum
import itertools
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ...spec import SpecError
from ...spec.errors import did_you_mean
from .sampling_params import SamplingParams, index

if TYPE_CHECKING:
    import llguidance

    from ..grammars.delayed import DelayedGrammar
    from ..grammars.grammar import Matcher
    from .detokenizer import IncrementalDetokenizer
    from .token_filter import TokenFilter

PLACEHOLDER_TOKEN = -1  # a token that is sampled on the device and not read by the host yet

ResultCallback = Callable[[int, "Result"], None]  # index of the prompt, and its result


def ignore_result(_place: int, _result: Result) -> None: ...


class SequenceStatus(enum.Enum):
    WAITING = "waiting"  # holds no blocks; its tokens are (re)computed after admission
    RUNNING = "running"
    FINISHED = "done"


class Logprob(NamedTuple):
    """Log-probability of a token, and of the likeliest tokens at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Answer:
    """One finished answer. finish_reason: length, stop, cancelled, or error (see `error`)."""

    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[Logprob] | None = None
    stop_reason: str | int | None = None  # the stop string or token
    error: str | None = None
    cumulative_logprob: float | None = None  # of all its tokens, with logprobs or best_of


@dataclass(frozen=True)
class Result:
    """The result of a request. The fields of the first answer are also properties; with n > 1 see `answers`."""

    prompt_token_ids: list[int]
    answers: list[Answer]
    prompt_logprobs: list[Logprob | None] | None = None
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    times: dict[str, float] = field(default_factory=dict)  # seconds: queue, first_token, total
    embedding: list[float] | None = None  # of the prompt, with `Request.pooling`; not normalised

    @classmethod
    def failed(cls, prompt: list[int], error: str, n: int) -> Result:
        """The result of a rejected request: n answers with this error."""
        return cls(prompt, [Answer([], "", "error", error=error) for _ in range(n)])

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


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer in progress. `tokens`: prompt and output; the last are PLACEHOLDER_TOKEN while they are in flight.

    `num_known_tokens` counts those that the host has read; `num_computed_tokens` includes launched steps.
    """

    request: Request
    index: int  # which of the request's answers
    seed: int
    tokens: list[int]
    num_prompt_tokens: int  # in `tokens`
    limit: int = sys.maxsize  # most tokens, prompt included
    num_known_tokens: int = field(init=False)  # of `tokens`; the rest are placeholders
    state: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0  # whose KV is in the cache (or will be, after launched steps)
    blocks: list[int] = field(default_factory=list)  # block i holds tokens [i·size, (i + 1)·size)
    hashes: list[bytes] = field(default_factory=list)  # of its full blocks, each over all tokens up to its end
    num_cached_blocks: int = 0  # of its blocks, registered in the prefix cache
    rank: tuple[int, int, int] = (0, 0, 0)  # the scheduler's order: the smallest goes first
    slot: int = -1  # its row in the device tables while it is running
    draft_tokens: list[int] = field(default_factory=list)  # proposed by speculation
    logprobs: list[Logprob] = field(default_factory=list)
    preempted: int = 0
    num_shared_tokens: int = 0  # whose KV came from other sequences, at admission
    skip_prefix_cache: bool = False  # shared blocks were corrupted: recompute all tokens
    detokenizer: IncrementalDetokenizer | None = None  # for streaming and stop strings
    token_by_token: bool = False  # each token is emitted, detokenized or matched when it is read
    top_logprobs: int | None = field(init=False)  # how many beside its own a token's log-probability has (None: unused)
    final_answer: Answer | None = None  # once finished
    last_token_time: float = 0.0  # seconds of the monotonic clock
    inner_limit: int = 0  # tokens of smaller index are inner ones: see `Engine.process_output`
    matcher: Matcher | None = None  # state of its grammar
    delayed_grammar: DelayedGrammar | None = None  # one that begins later
    token_filter: TokenFilter | None = None  # bad_words, allowed_token_ids
    extra: dict[str, Any] = field(default_factory=dict)  # state of other components, such as the n-gram index

    def __post_init__(self) -> None:
        self.num_known_tokens = len(self.tokens)
        self.top_logprobs = (self.params.logprobs or 0) if self.params.needs_logprobs else None

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def masked(self) -> bool:
        """Whether its next token is not any of the vocabulary."""
        return self.matcher is not None or self.token_filter is not None


@dataclass(eq=False)
class Request:
    """A prompt and its sampling parameters. A smaller `priority` is served first; equals in order of arrival."""

    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    tenant: str = ""  # the prefix cache is shared only within a tenant
    end_token_ids: tuple[int, ...] = ()  # end of text, unless ignored, and params.stop_token_ids
    stream: bool = False  # emit a delta for every step
    generated: tuple[list[int], ...] = ()  # of each answer, where another engine began it: its tokens so far
    grammar: llguidance.LLMatcher | None = None  # compiled in advance
    # last, mean: the prompt's hidden states as one vector, beside the answer; score: the scalar head's value
    pooling: str | None = None
    kv_remote: str | None = None  # address of a server that has computed the prompt, of engine.kv_peers
    id: int = field(default_factory=itertools.count().__next__)
    arrival_time: float = field(default_factory=time.monotonic)
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)
    pooled: list[float] | None = None  # so far: the last state, or the sum of all
    cached_tokens: int = 0
    scheduled_time: float = 0.0  # when it was first admitted (monotonic clock; 0: not yet)
    first_token_time: float = 0.0


@dataclass(frozen=True)
class OutputDelta:
    """New output of one answer. The last delta of a request carries the result."""

    request: Request
    index: int  # of the answer
    token_ids: list[int]
    text: str = ""  # of streamed requests
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    result: Result | None = None


# --- admission -------------------------------------------------------------------------------------------


MAX_PRIORITY = 1000
POOLINGS = ("last", "mean", "score")


def truncated(prompt: list[int], params: SamplingParams, context: int) -> list[int]:
    """The last tokens of a prompt, as many as truncate_prompt_tokens says."""
    most = params.truncate_prompt_tokens
    if most is None:
        return prompt
    return prompt[-(most if most > 0 else max(1, context - params.max_tokens)) :]


def check_prompt(request: Request, valid_vocab: int, context: int) -> None:
    prompt = request.prompt
    if not prompt:
        raise SpecError("the prompt is empty: give at least one token")
    usual = set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < valid_vocab
    for token in () if usual else prompt:
        if index(token) is None or not 0 <= token < valid_vocab:
            raise SpecError(f"the prompt holds token {token!r:.60}: the model's tokens are 0 to {valid_vocab - 1}")
    if len(prompt) >= context:
        raise SpecError(
            f"the prompt has {len(prompt)} tokens: with an answer of one token or more it does not fit "
            f"engine.context = {context}"
        )


def check_generated(request: Request, valid_vocab: int, limit: int) -> None:
    """Answers that another engine began."""
    params, longest = request.params, max(map(len, request.generated), default=0)
    if not request.generated:
        return
    if not request.stream or params.answers > params.n or len(request.generated) != params.n:
        raise SpecError(f"an answer is continued in a stream, without best_of, and all n = {params.n} together")
    if any(not 0 <= token < valid_vocab for answer in request.generated for token in answer):
        raise SpecError(f"an answer to be continued has a token that is not below {valid_vocab}")
    if len(request.prompt) + longest > limit:
        raise SpecError(f"an answer to be continued has {longest} tokens, more than max_tokens or the context allow")


def check_kv_capacity(request: Request, limit: int, size: int, blocks: int) -> None:
    """Alone in the pool it must fit, or it would wait forever. The last output token is never computed."""
    needed = -(-(limit - 1) // size)
    if needed > blocks:
        raise SpecError(
            f"the prompt ({len(request.prompt)} tokens) and max_tokens = {request.params.max_tokens} need {needed} "
            f"blocks of {size} tokens, and the pool has {blocks}: ask for fewer tokens, or give the engine more "
            "memory (engine.memory, engine.blocks)"
        )


def check_head(request: Request, scalar_head: bool) -> None:
    """Whether the network has the head that the answer comes from."""
    if scalar_head and request.pooling != "score":
        raise SpecError("this model has a scalar head: it scores texts, and has neither answers nor vectors of them")
    if not scalar_head and request.pooling == "score":
        raise SpecError("this model has no scalar head to score texts with")


def check_params(request: Request, adapters: Collection[str], has_tokenizer: bool) -> None:
    params = request.params
    if not isinstance(request.tenant, str):
        raise SpecError(f"tenant = {request.tenant!r:.60}: the name of a tenant is expected")
    if request.pooling not in (None, *POOLINGS):
        raise SpecError(f"pooling = {request.pooling!r:.60} is not one of: {', '.join(POOLINGS)}")
    if index(request.priority) is None:
        raise SpecError(f"priority = {request.priority!r:.60}: a whole number is expected")
    if abs(request.priority) > MAX_PRIORITY:
        raise SpecError(f"priority = {request.priority}: it must be between −{MAX_PRIORITY} and {MAX_PRIORITY}")
    if params.adapter is not None and params.adapter not in adapters:
        raise SpecError(f"adapter {params.adapter!r} is not loaded{did_you_mean(params.adapter, adapters)}")
    if not has_tokenizer and (params.stop or params.structured or params.bad_words):
        raise SpecError(
            "stop strings, bad_words and structured output need a tokenizer; this engine has none: use token ids"
        )
