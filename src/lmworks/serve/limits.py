"""Limits per request, per key and in total. Requests that exceed one are rejected before they cost anything.

Rate limits are sliding windows: never more in any 60 seconds. A request is charged when it begins, its prompt tokens
when they have been tokenized, and at admission the most tokens that it can use; what it did not use is refunded:

    meter = RequestMeter(rate_limiter, key)
    meter.begin()
    meter.charge_prompt(len(prompt))
    with rate_limiter.admit(meter, limits, card, params, size) as admission:
        async for event in events:
            admission.use(…)
    meter.release()
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Self

from ..engine.core.request import MAX_PRIORITY
from ..engine.core.sampling_params import MAX_LOGPROBS, MAX_N, SamplingParams
from ..spec import LMWorksError
from ..spec.schema import Section, opt
from .backend import ModelCard

MINUTE_S = 60.0
RETRY_S = 1.0  # retry-after where all slots are taken
BYTES_A_TOKEN = 3  # of text that is not tokenized here: what is charged
TEXT_BYTES = 8  # of an answer's token, as JSON
LOGPROB_BYTES = 96  # of one log-probability and its token, as JSON


class APIError(LMWorksError):
    """An error response: HTTP status, and the fields of OpenAI's error object."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry_after = retry_after  # seconds

    @property
    def fields(self) -> tuple[Any, ...]:
        """Arguments of an equal error, for another process."""
        return self.status, self.code, str(self), self.param, self.retry_after


@dataclass(frozen=True)
class Limits(Section):
    """For every request. 0 is no limit, where it is allowed."""

    section: ClassVar[str] = "limits"

    body_bytes: int = opt(4 * 2**20, "largest request", ge=1024)
    depth: int = opt(128, "levels of nesting in a body", ge=8)
    values: int = opt(2**17, "objects, lists and strings in a body", ge=64)
    header_bytes: int = opt(32 * 2**10, "all headers of a request together", ge=1024)
    connections: int = opt(4096, "connections at once, idle ones included", ge=1)
    connections_per_address: int = opt(1024, "…from one address; behind a proxy all have the proxy's (0: any)", ge=0)
    queue: int = opt(256, "sequences that may wait, beyond those that the engine runs at once", ge=0)
    compile_seconds: float = opt(30.0, "longest time for the grammar of a request, waiting included (0: any)", ge=0)
    queue_seconds: float = opt(60.0, "longest time in the queue (0: any)", ge=0)
    request_seconds: float = opt(600.0, "longest time that a request may take in all (0: any)", ge=0)
    max_tokens: int = opt(0, "longest answer (0: what the context holds)", ge=0)
    n: int = opt(16, "answers to one prompt", ge=1, le=MAX_N)
    prompts: int = opt(256, "prompts in one request", ge=1)
    messages: int = opt(2048, "messages in one request, and parts and tool calls in all of them", ge=1)
    tools: int = opt(128, "tools in one request", ge=0)
    metadata: int = opt(64, "entries of metadata in one request", ge=0)
    logprobs: int = opt(20, "top log-probabilities at each position", ge=0, le=MAX_LOGPROBS)
    stop: int = opt(16, "stop strings and stop tokens of one request", ge=0)
    stop_chars: int = opt(256, "characters in one stop string", ge=1)
    bad_words: int = opt(64, "texts that one request may rule out", ge=0)
    logit_bias: int = opt(1024, "tokens whose logits one request may shift", ge=0)
    reported_logprobs: int = opt(2**18, "log-probabilities in one answer: n × positions × (logprobs + 1)", ge=0)
    answer_bytes: int = opt(32 * 2**20, "largest answer that is not streamed, estimated beforehand", ge=1024)
    kept_bytes: int = opt(2**29, "echoes and log-probabilities of all such answers together; beyond that 429", ge=1024)
    stored_responses: int = opt(1024, "responses kept for previous_response_id, of each tenant", ge=0)
    stored_bytes: int = opt(2**26, "…and their bytes as JSON; the oldest are dropped", ge=0)
    batch_file_bytes: int = opt(64 * 2**20, "largest input file of a batch", ge=1024)
    batch_lines: int = opt(50_000, "requests in one batch", ge=1)
    batch_files: int = opt(1024, "files of each tenant, those of results included", ge=1)
    batch_stored_bytes: int = opt(2**30, "…and their bytes, beyond which nothing is uploaded", ge=1024)
    batches: int = opt(16, "batches of each tenant under way at once", ge=1)
    batch_in_flight: int = opt(32, "requests of all batches at once; read when the server starts", ge=1)
    stuck_seconds: float = opt(30.0, "an engine with work and without a step for so long is unhealthy", gt=0)
    kill_seconds: float = opt(120.0, "…and is killed and restarted after so long (0: never)", ge=0)


@dataclass(frozen=True)
class KeyLimits(Section):
    """For one key, or for everyone where there are no keys. 0 is no limit."""

    section: ClassVar[str] = "keys"

    name: str = opt("", "name in logs and metrics")
    tenant: str = opt("", "keys of one tenant share cached prefixes (empty: the key's name)")
    requests_per_minute: int = opt(0, "requests in any 60 seconds", ge=0)
    tokens_per_minute: int = opt(0, "tokens in any 60 seconds, prompts and answers together", ge=0)
    concurrent: int = opt(0, "answers at once: a request counts as prompts × n", ge=0)
    max_tokens: int = opt(0, "longest answer", ge=0)
    n: int = opt(0, "answers to one prompt", ge=0)
    priority: int = opt(0, "the smallest is served first", ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    admin: bool = opt(False, "may put engines to sleep, reset caches, and load and unload adapters")
    gateway: bool = opt(False, "of a gateway: may continue streams of other servers, and follow the prefix caches")
    models: list[str] = opt(list, "names of the models it may use (empty: all)")


# --- one request ------------------------------------------------------------------------------------------


def check_model(key: KeyLimits, model: str) -> None:
    if key.models and model not in key.models:
        raise APIError(403, "model_not_allowed", f"this key may not use the model {model!r}", "model")


def max_answer_tokens(limits: Limits, key: KeyLimits, context: int, prompt_tokens: int) -> int:
    """The most tokens that an answer may have: the default of `max_tokens`."""
    caps = [limits.max_tokens, key.max_tokens, key.tokens_per_minute and max(1, key.tokens_per_minute - prompt_tokens)]
    return min([context - prompt_tokens, *(cap for cap in caps if cap)])


def check_params(limits: Limits, key: KeyLimits, params: SamplingParams) -> None:
    """Sampling parameters that are valid, but above a limit."""
    check_at_most(params.answers, min(limits.n, key.n or limits.n), "n" if params.best_of is None else "best_of")
    check_at_most(
        params.max_tokens, min(cap for cap in (limits.max_tokens, key.max_tokens, math.inf) if cap), "max_tokens"
    )
    check_at_most(params.logprobs or 0, limits.logprobs, "logprobs")
    check_at_most(params.prompt_logprobs or 0, limits.logprobs, "prompt_logprobs")
    check_at_most(len(params.stop) + len(params.stop_token_ids), limits.stop, "stop", "strings and tokens")
    check_at_most(max(map(len, params.stop), default=0), limits.stop_chars, "stop", "characters in one string")
    check_at_most(len(params.bad_words), limits.bad_words, "bad_words", "texts")
    check_at_most(max(map(len, params.bad_words), default=0), limits.stop_chars, "bad_words", "characters in one text")
    check_at_most(len(params.logit_bias), limits.logit_bias, "logit_bias", "tokens")


def check_at_most(value: float, limit: float, param: str, what: str = "") -> None:
    if value > limit:
        message = f"{param} has {value:g} {what}" if what else f"{param} = {value:g}"
        raise APIError(400, "limit_exceeded", f"{message}: at most {limit:g} are allowed", param)


@dataclass(frozen=True)
class Size:
    """The cost of a request, as far as it is known before admission."""

    prompts: list[int]  # tokens of each
    answers: int  # that are computed: of all prompts together
    reported: int = 0  # log-probabilities in what is shown
    bytes: int = 0  # of an answer that is kept until it is complete
    extra: int = 0  # of those, beyond the text of the answers: texts are mostly shorter than they may be

    def tokens(self, params: SamplingParams) -> int:
        return sum(self.prompts) + params.max_tokens * self.answers


def size_of(params: SamplingParams, prompts: list[int], echoed: int, kept: bool) -> Size:
    """`echoed`: bytes of prompts that are repeated in their answers. `kept`: the answer is not streamed."""
    positions = 0 if params.logprobs is None else params.max_tokens * len(prompts) * (params.logprobs + 1)
    if params.prompt_logprobs is not None:
        positions += sum(prompts) * (params.prompt_logprobs + 1)
    extra = params.n * (echoed + LOGPROB_BYTES * positions) if kept else 0
    text = params.n * TEXT_BYTES * params.max_tokens * len(prompts) if kept else 0
    return Size(prompts, params.answers * len(prompts), params.n * positions, text + extra, extra)


def max_open_answers(limits: Limits, card: ModelCard) -> int:
    """Running and queued."""
    return max(1, card.max_seqs + limits.queue)


def check_size(limits: Limits, key: KeyLimits, card: ModelCard, params: SamplingParams, size: Size) -> None:
    """Rejects requests that could never be admitted: every value is within its limit, but not their product."""
    requested = f"{len(size.prompts)} prompts with {params.answers} answers each"
    together = min(max_open_answers(limits, card), key.concurrent or math.inf)
    if size.answers > together:
        raise APIError(400, "limit_exceeded", f"{requested}: at most {together:g} answers at once", "n")
    if size.reported > limits.reported_logprobs:
        message = f"{requested} would report {size.reported} log-probabilities"
        raise APIError(400, "limit_exceeded", f"{message}: at most {limits.reported_logprobs} are allowed", "logprobs")
    if size.bytes > limits.answer_bytes:
        message = f"{requested} may come to {size.bytes} bytes: at most {limits.answer_bytes} are allowed"
        raise APIError(400, "limit_exceeded", f"{message}; lower max_tokens, or stream", "max_tokens")
    if key.tokens_per_minute and size.tokens(params) > key.tokens_per_minute:
        message = f"prompt and max_tokens come to {size.tokens(params)} tokens"
        raise APIError(
            400,
            "limit_exceeded",
            f"{message}, and this key has {key.tokens_per_minute} a minute: request fewer",
            "max_tokens",
        )


# --- rate limits ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Charge:
    at: float
    amount: int


class SlidingWindow:
    """Usage within the last minute."""

    def __init__(self) -> None:
        self.charges: deque[Charge] = deque()
        self.total = 0

    def wait(self, now: float, amount: int, limit: int) -> float:
        """Seconds until `amount` more is within the limit."""
        while self.charges and self.charges[0].at <= now - MINUTE_S:
            self.total -= self.charges.popleft().amount
        excess, free = self.total + amount - limit, 0.0
        for charge in self.charges:
            if excess <= 0:
                break
            excess -= charge.amount
            free = charge.at + MINUTE_S - now
        return free

    def add(self, now: float, amount: int) -> Charge:
        self.charges.append(charge := Charge(now, amount))
        self.total += amount
        return charge

    def refund(self, charge: Charge, amount: int) -> None:
        """A charge older than a minute has left the total already."""
        if self.charges and charge.at >= self.charges[0].at:
            self.total -= amount
        charge.amount -= amount


@dataclass(eq=False)
class KeyUsage:
    """Rate-limit state of one key."""

    requests: SlidingWindow = field(default_factory=SlidingWindow)
    tokens: SlidingWindow = field(default_factory=SlidingWindow)
    open: int = 0  # answers in progress; a request whose body is being read counts as one


class RateLimiter:
    """Admits requests under the limits. For one event loop: no method awaits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.usage_by_key: defaultdict[str, KeyUsage] = defaultdict(KeyUsage)  # by the key's name
        self.open: defaultdict[str, int] = defaultdict(int)  # answers under way, by model
        self.batched: defaultdict[str, int] = defaultdict(int)  # …of batches, which have room of their own
        self.kept = 0  # bytes of echoes and log-probabilities that answers under way may come to

    def admit(
        self, meter: RequestMeter, limits: Limits, card: ModelCard, params: SamplingParams, size: Size
    ) -> Admission:
        """For a request whose size is known; raises APIError. Exit the admission when the request has ended."""
        key, usage, now = meter.key, meter.usage, self.clock()
        check_size(limits, key, card, params, size)
        tokens = size.tokens(params)
        others = usage.open - meter.open
        if key.concurrent and not meter.batch and others + size.answers > key.concurrent:
            message = f"this key has {others} answers under way and may have {key.concurrent}"
            raise rate_limit_error("concurrent_requests", message, RETRY_S)
        if key.tokens_per_minute and usage.tokens.wait(now, tokens - meter.charged_tokens, key.tokens_per_minute):
            # A retry is tokenized again: what tokenizing cost is not refunded.
            wait = usage.tokens.wait(now, tokens, key.tokens_per_minute)
            raise rate_limit_error("tokens_per_minute", f"this key has {key.tokens_per_minute} tokens a minute", wait)
        under_way = self.batched if meter.batch else self.open
        if under_way[card.id] + size.answers > max_open_answers(limits, card):
            raise rate_limit_error(
                "queue_full", f"{under_way[card.id]} answers are under way, as many as may be", RETRY_S
            )
        if self.kept and self.kept + size.extra > limits.kept_bytes:
            message = f"{self.kept} bytes of echoes and log-probabilities are under way, as many as are kept at once"
            raise rate_limit_error("answers_too_large", message, RETRY_S)
        return Admission(meter, card.id, size, tokens, now)


def rate_limit_error(code: str, message: str, wait: float) -> APIError:
    return APIError(429, code, f"{message}: try again in {max(1, math.ceil(wait))} s", None, max(1, math.ceil(wait)))


class RequestMeter:
    """Meters a request from its headers to the last byte of its response, on behalf of its key."""

    def __init__(self, rate_limiter: RateLimiter, key: KeyLimits, batch: bool = False) -> None:
        """`batch`: a line of one, which takes no live request's place."""
        self.rate_limiter, self.key, self.batch = rate_limiter, key, batch
        self.usage = rate_limiter.usage_by_key[key.name]
        self.open = 0  # answers that count as in progress
        self.bytes = 0  # of the body, not charged as tokens so far
        self.charged_tokens = 0  # prompt tokens that were charged
        self.kept = 0

    def begin(self) -> None:
        """Before anything of the body is read."""
        key, usage, now = self.key, self.usage, self.rate_limiter.clock()
        if key.concurrent and not self.batch and usage.open >= key.concurrent:
            raise rate_limit_error(
                "concurrent_requests", f"this key has {key.concurrent} requests under way already", RETRY_S
            )
        if key.requests_per_minute and (wait := usage.requests.wait(now, 1, key.requests_per_minute)):
            raise rate_limit_error(
                "requests_per_minute", f"this key has {key.requests_per_minute} requests a minute", wait
            )
        if key.tokens_per_minute and (wait := usage.tokens.wait(now, 1, key.tokens_per_minute)):
            raise rate_limit_error("tokens_per_minute", f"this key has {key.tokens_per_minute} tokens a minute", wait)
        if key.requests_per_minute:
            usage.requests.add(now, 1)
        self.set_open(1)

    async def start(self) -> None:
        """`begin`, here or in the engine host: see `serve.api_process`."""
        self.begin()

    def set_open(self, answers: int) -> None:
        if not self.batch:
            self.usage.open += answers - self.open
        self.open = answers

    def reserve_bytes(self, size: int) -> None:
        """Reserves memory for a response until it is sent."""
        self.rate_limiter.kept += size - self.kept
        self.kept = size

    def charge_prompt(self, tokens: int) -> None:
        """Tokenizing is charged whatever becomes of the request."""
        self.bytes = 0
        self.charge(tokens)
        self.charged_tokens += tokens

    def charge(self, tokens: int) -> None:
        if self.key.tokens_per_minute and tokens:
            self.usage.tokens.add(self.rate_limiter.clock(), tokens)

    def release(self) -> None:
        """A body that was read and never tokenized is charged by its length."""
        self.charge(self.bytes // BYTES_A_TOKEN)
        self.bytes = 0
        self.set_open(0)
        self.reserve_bytes(0)


class Admission:
    """A request that was admitted, until it ends."""

    def __init__(self, meter: RequestMeter, model: str, size: Size, tokens: int, now: float) -> None:
        self.meter, self.model, self.answers, self.tokens = meter, model, size.answers, tokens
        self.used = 0
        meter.bytes = 0
        meter.set_open(size.answers)
        meter.reserve_bytes(size.extra)
        self.under_way = meter.rate_limiter.batched if meter.batch else meter.rate_limiter.open
        self.under_way[model] += size.answers
        charged = bool(meter.key.tokens_per_minute)
        self.charge = meter.usage.tokens.add(now, max(0, tokens - meter.charged_tokens)) if charged else None

    def use(self, tokens: int) -> None:
        """Tokens that were used, of prompts and answers."""
        self.used += tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.meter.set_open(min(1, self.meter.open))
        self.under_way[self.model] -= self.answers
        if self.charge is not None and self.used < self.tokens:
            self.meter.usage.tokens.refund(self.charge, min(self.charge.amount, self.tokens - self.used))
