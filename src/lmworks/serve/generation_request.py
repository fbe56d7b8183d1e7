"""A generation request: sampling parameters from its body, admission, its events, its output."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..engine.core.request import Logprob
from ..engine.core.sampling_params import SEEDS, SHAPES, SamplingParams
from .backend import BackendError, EngineRequest, Event, Usage
from .cache_events import PROMPT_BLOCKS, prompt_blocks
from .limits import APIError, check_params, max_answer_tokens, size_of
from .request_bodies import GUIDED, SCHEMA_FIELD, Continuation, Pooled, Sampling, StructuredOutputs
from .response_bodies import PromptLogprob, TokenTexts, UsageObject, finite, top_tokens
from .serving import Caller, LocalModel, Serving

Found = TypeVar("Found")

MAX_BUFFERED_EVENTS = 64  # of several prompts, for a slow reader

# Fields of a body → fields of SamplingParams.
PARAM_NAMES = {
    name: name
    for name in (
        "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "min_tokens", "n", "best_of", "stop", "stop_token_ids", "ignore_eos", "bad_words", "allowed_token_ids",
        "prompt_logprobs", "skip_special_tokens", "cache_salt",
    )
} | {
    "include_stop_str_in_output": "include_stop",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}  # fmt: skip


def sampling_params(
    body: Sampling, caller: Caller, defaults: Mapping[str, Any] | None = None, **more: Any
) -> SamplingParams:
    """The body's sampling parameters, checked against the limits. `more` overrides them; `defaults` are the model's."""
    asked = {ours: value for name, ours in PARAM_NAMES.items() if (value := getattr(body, name, None)) is not None}
    given = {**(defaults or {}), **asked}
    if body.top_k == -1:
        given["top_k"] = 0
    if body.seed is not None:
        given["seed"] = body.seed % SEEDS
    if body.continuation is not None and not body.stream:
        raise APIError(400, "invalid_request", "continuation is for streams: set stream = true", "continuation")
    if body.continuation is not None and body.continuation.answers:
        caller.check_gateway("streams of other servers are continued")
    if body.stream_options is not None and not body.stream:
        raise APIError(400, "invalid_request", "stream_options are for streams: set stream = true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs are not part of a stream: set stream = false"
        raise APIError(400, "invalid_request", message, "prompt_logprobs")
    if body.spaces_between_special_tokens is False:
        message = "spaces_between_special_tokens = false: the blanks of a text are those that its tokens stand for"
        raise APIError(400, "invalid_request", message, "spaces_between_special_tokens")
    shapes = [name for name in (*GUIDED, "structured_outputs") if getattr(body, name) is not None]
    if shapes and (len(shapes) > 1 or more.get("json_schema") is not None):
        raise APIError(400, "invalid_request", f"{shapes[0]} cannot be combined with another guided output", shapes[0])
    if body.structured_outputs is not None:
        given |= structured_output(body.structured_outputs)
    params = SamplingParams(**given | {"logit_bias": parse_logit_bias(body.logit_bias or {})} | more)
    check_params(caller.limits, caller.key, params)
    return params


def structured_output(wanted: StructuredOutputs) -> dict[str, Any]:
    """The one shape that is asked for, as a sampling parameter."""
    given = {name: value for name, value in wanted.model_dump(by_alias=True).items() if value not in (None, False)}
    if len(given) != 1:
        message = f"structured_outputs holds {' and '.join(given) or 'nothing'}: give one of its shapes"
        raise APIError(400, "invalid_request", message, "structured_outputs")
    [(name, value)] = given.items()
    if name in ("json", "json_object"):
        return {"json_schema": {"type": "object"} if name == "json_object" else value}
    return {name: value}


def shape_fields(body: Sampling, schema_field: str = SCHEMA_FIELD) -> dict[str, str]:
    """Sampling parameters of structured output → the fields of the client's body that they came from."""
    if body.structured_outputs is not None:
        return {name: f"structured_outputs.{'json' if name == 'json_schema' else name}" for name in SHAPES}
    guided = {PARAM_NAMES[name]: name for name in GUIDED if getattr(body, name) is not None}
    return guided or {"json_schema": schema_field}


@contextmanager
def naming_fields(fields: Mapping[str, str]) -> Iterator[None]:
    """The engine's refusal of a shape names the client's field instead of the sampling parameter it begins with."""
    try:
        yield
    except BackendError as error:
        message = str(error)
        name = next((name for name in fields if re.match(rf"{name}\b", message)), None)
        if error.kind != "refused" or name is None:
            raise
        raise APIError(400, "invalid_request", fields[name] + message[len(name) :], fields[name]) from error


def resolve_priority(body: Sampling | Pooled, caller: Caller) -> int:
    """A request may wait behind others of its key, and not go ahead of them."""
    own = caller.key.priority
    if body.priority is not None and body.priority < own:
        message = f"priority = {body.priority} would go first: this key's requests have {own} or more"
        raise APIError(400, "limit_exceeded", message, "priority")
    return own if body.priority is None else body.priority


def truncation(body: Sampling | Pooled, local: LocalModel, max_tokens: int | None) -> int | None:
    """How many of a prompt's last tokens are kept; None: all."""
    wanted = body.truncate_prompt_tokens
    if wanted == 0:
        message = "truncate_prompt_tokens = 0 would leave nothing of the prompt"
        raise APIError(400, "invalid_request", message, "truncate_prompt_tokens")
    return max(1, local.backend.card.context - (max_tokens or 1)) if wanted == -1 else wanted


def token_texts(body: Sampling, local: LocalModel) -> TokenTexts:
    """How tokens are written beside their log-probabilities."""
    return local.token_texts.as_ids() if body.return_tokens_as_token_ids else local.token_texts


def identity(continuation: Continuation | None, *fields: str) -> dict[str, Any]:
    """`id` and `created` of an answer that another server began."""
    return {} if continuation is None else continuation.model_dump(include=set(fields), exclude_none=True)


def parse_logit_bias(given: dict[str, float]) -> dict[int, float]:
    wrong = next((token for token in given if not (token.isascii() and token.isdecimal() and len(token) < 10)), None)
    if wrong is not None:
        raise APIError(400, "invalid_request", f"logit_bias: {wrong[:40]!r} is not a token id", "logit_bias")
    return {int(token): bias for token, bias in given.items()}


def resolve_max_tokens(
    caller: Caller, local: LocalModel, prompts: Sequence[Sequence[int]], requested: int | None, default: int | None
) -> int:
    """max_tokens: what was requested, if it fits; else `default`, or (None) all that fits."""
    limits, key, context = caller.limits, caller.key, local.backend.card.context
    longest = max(map(len, prompts))
    if longest + (requested or 1) > context:
        what = f"the prompt has {longest} tokens" + (f" and max_tokens is {requested}" if requested else "")
        message = f"{what}: the model's context is {context} tokens, prompt and answer together"
        raise APIError(400, "context_length_exceeded", message, "messages" if default is None else "prompt")
    fits = max_answer_tokens(limits, key, context, longest)
    return requested or (fits if default is None else min(default, fits))


# --- answers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GenerationRequest:
    """Prompts for a local model with one set of sampling parameters."""

    serving: Serving
    caller: Caller
    local: LocalModel
    params: SamplingParams
    prompts: list[Sequence[int]]
    stream: bool
    echoed: int = 0  # bytes of prompts that are repeated in their answers
    priority: int = 0
    pooling: str | None = None  # the prompts as vectors, beside the answers
    continuation: Continuation | None = None
    kv_remote: str | None = None  # a server that has computed the prompt
    shape_fields: Mapping[str, str] = field(default_factory=dict)  # of the client's body, for errors

    async def events(self) -> AsyncGenerator[tuple[int, Event], None]:
        """Events, each with the number of its prompt. Closing it cancels the request."""
        limits, card = self.caller.limits, self.local.backend.card
        log_fields = self.caller.log_fields
        log_fields["asked"] = time.time()
        self.report_blocks()
        lengths = [len(prompt) for prompt in self.prompts]
        size = size_of(self.params, lengths, self.echoed, kept=not self.stream)
        with (
            await self.serving.admit(self.caller.meter, limits, card, self.params, size) as admission,
            naming_fields(self.shape_fields),
        ):
            requests = [self.engine_request(place, prompt) for place, prompt in enumerate(self.prompts)]
            made: dict[int, int] = {}  # tokens of answers so far, by prompt
            async with aclosing(merge_streams(self.local, requests)) as found:
                async for place, event in found:
                    if event.finish_reason == "error":
                        # A grammar without a way on is the client's error; anything else is ours.
                        status = 400 if self.params.structured else 500
                        raise APIError(status, "answer_failed", event.error or "the answer could not be finished")
                    if place not in made:
                        admission.use(lengths[place])
                    now = made.get(place, 0) + len(event.tokens)
                    if event.final is not None:
                        now = event.final.completion_tokens  # with best_of, also of answers that are not shown
                        record_usage(log_fields, event.final)
                    admission.use(now - made.get(place, 0))
                    made[place] = now
                    yield place, event

    def report_blocks(self) -> None:
        """For a router that asked: the blocks of the first prompt."""
        caller, card, params = self.caller, self.local.backend.card, self.params
        if caller.wants_prompt_blocks and card.block_size:
            caller.answer_headers[PROMPT_BLOCKS] = prompt_blocks(
                card.id,
                card.block_size,
                caller.config.tenant(caller.key),
                params.adapter,
                params.cache_salt,
                self.prompts[0],
            )

    def prompt_comment(self) -> bytes:
        """A comment before the first event of such a stream: the tokens of its prompts, for who counts them."""
        return b"" if self.continuation is None else b": prompt %d\n" % sum(map(len, self.prompts))

    def journal(self, place: int, event: Event) -> bytes:
        """A comment before an event in a stream that can be continued: the answer's number, and its new tokens."""
        if self.continuation is None:
            return b""
        number = place * self.params.n + event.index
        return f": tokens {number} {' '.join(map(str, event.tokens))}\n".encode()

    def group(self, event: Event, written: Sequence[bytes]) -> bytes:
        """What is sent for an event in the APIs that say it in several of their own, or in none.

        A gateway passes them on together: another server could not go on after half of them.
        """
        if self.continuation is None:
            return b"".join(written)
        count = b": events %d\n" % len(written) if written else b"\n"
        return self.journal(0, event) + count + b"".join(written)

    def generated(self, place: int) -> tuple[list[int], ...]:
        """What another server generated for this prompt."""
        answers = self.continuation.answers if self.continuation is not None else []
        if answers and len(answers) != len(self.prompts) * self.params.n:
            message = f"continuation has {len(answers)} answers: there are {len(self.prompts) * self.params.n}"
            raise APIError(400, "invalid_request", message, "continuation")
        return tuple(answers[place * self.params.n : (place + 1) * self.params.n])

    def engine_request(self, place: int, prompt: Sequence[int]) -> EngineRequest:
        config, key = self.caller.config, self.caller.key
        return EngineRequest(
            prompt,
            self.params,
            self.priority,
            config.tenant(key),
            self.generated(place),
            # Under a token limit, streamed: tokens of cancelled answers are charged too.
            self.stream or key.tokens_per_minute > 0,
            self.caller.share,
            config.limits.compile_seconds,
            config.limits.queue_seconds,
            config.limits.request_seconds,
            pooling=self.pooling,
            kv_remote=self.kv_remote,
        )


def record_usage(log_fields: dict[str, Any], usage: Usage) -> None:
    """Tokens are summed over prompts; times are those of the slowest."""
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        log_fields[name] = log_fields.get(name, 0) + getattr(usage, name)
    for name in ("queue", "first_token", "total"):
        log_fields[name] = max(log_fields.get(name, 0.0), round(getattr(usage, name), 6))


async def merge_streams(
    local: LocalModel, requests: Sequence[EngineRequest]
) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of all streams as they come. The first error ends all."""
    if len(requests) == 1:
        async with aclosing(local.backend.stream(requests[0])) as events:
            async for event in events:
                yield 0, event
        return
    ready: asyncio.Queue[tuple[int, Event] | Exception | None] = asyncio.Queue(MAX_BUFFERED_EVENTS)

    async def follow(place: int) -> None:
        try:
            async with aclosing(local.backend.stream(requests[place])) as events:
                async for event in events:
                    await ready.put((place, event))
        except Exception as error:
            await ready.put(error)
        else:
            await ready.put(None)

    tasks = [asyncio.create_task(follow(place)) for place in range(len(requests))]
    try:
        left = len(tasks)
        while left:
            found = await ready.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class CompletionOutput:
    """One whole answer."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str = "length"
    stop_reason: str | int | None = None

    def add(self, event: Event) -> None:
        self.text += event.text
        self.tokens += event.tokens
        self.logprobs += event.logprobs or []
        self.finish_reason = event.finish_reason or self.finish_reason
        self.stop_reason = event.stop_reason


@dataclass
class RequestOutput:
    """The whole output of a request: n answers to each prompt, in order."""

    answers: list[CompletionOutput]
    prompt_logprobs: dict[int, list[Logprob | None]] = field(default_factory=dict)  # by prompt
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))

    def add(self, place: int, n: int, event: Event) -> None:
        self.answers[place * n + event.index].add(event)
        if event.final is not None:
            self.usage = add_usage(self.usage, event.final)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs[place] = event.prompt_logprobs


async def in_thread_with_logprobs(generation: GenerationRequest, work: Callable[[], Found]) -> Found:
    """Log-probabilities take long to format: in a thread, so that the event loop is not blocked."""
    params = generation.params
    scored = params.logprobs is not None or params.prompt_logprobs is not None
    return await asyncio.to_thread(work) if scored else work()


async def collect_output(generation: GenerationRequest) -> RequestOutput:
    found = RequestOutput([CompletionOutput() for _ in range(len(generation.prompts) * generation.params.n)])
    async with aclosing(generation.events()) as events:
        async for place, event in events:
            found.add(place, generation.params.n, event)
    return found


def add_usage(one: Usage, other: Usage) -> Usage:
    return replace(
        one,
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        completion_tokens=one.completion_tokens + other.completion_tokens,
        cached_tokens=one.cached_tokens + other.cached_tokens,
    )


def prompt_logprobs_object(
    texts: TokenTexts, scored: Sequence[Logprob | None]
) -> list[dict[str, PromptLogprob] | None]:
    """As vLLM writes them: by token id, with its rank where it is among the likeliest."""
    return [None if one is None else ranked(texts, one) for one in scored]


def ranked(texts: TokenTexts, scored: Logprob) -> dict[str, PromptLogprob]:
    ranks = {token: place for place, (token, _) in enumerate(scored.top, start=1)}
    return {
        str(token): {"logprob": finite(logprob), "rank": ranks.get(token), "decoded_token": texts.text(token)}
        for token, logprob in top_tokens(scored)
    }


def usage_object(usage: Usage) -> UsageObject:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
