"""`/v1/completions`: texts or token ids are continued; `echo` with `logprobs` scores the prompt."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ..engine.core.request import Logprob
from .backend import Event, Usage
from .generation_request import (
    GenerationRequest,
    RequestOutput,
    add_usage,
    collect_output,
    identity,
    in_thread_with_logprobs,
    prompt_logprobs_object,
    resolve_max_tokens,
    resolve_priority,
    sampling_params,
    shape_fields,
    token_texts,
    truncation,
    usage_object,
)
from .limits import APIError
from .prompts import encode, encode_infilling, tokenize_prompt
from .request_bodies import CompletionRequest
from .response_bodies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Finish,
    Offsets,
    TokenTexts,
    finite,
    top_tokens,
)
from .serving import Caller, LocalModel, Serving
from .sse import DONE, sse_event

DEFAULT_MAX_TOKENS = 16  # as OpenAI has it

Scored = Sequence[Logprob]


async def make_handler(
    serving: Serving, caller: Caller, local: LocalModel, adapter: str | None, body: CompletionRequest
) -> CompletionHandler:
    prompt = body.prompt
    given = cast("list[Any]", [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt)
    long = sum(len(one) for one in given if body.echo or isinstance(one, str))
    known = local.backend.card.vocab
    special = (body.add_special_tokens, bool(body.parse_special))
    texts: list[str] = []
    stop_token_ids = body.stop_token_ids or []
    if body.suffix is None:
        texts, prompts, made = await tokenize_prompt(
            serving, caller, local, long, encode, given, known, bool(body.echo), special,
            truncation(body, local, body.max_tokens or DEFAULT_MAX_TOKENS),
        )  # fmt: skip
    else:
        for name in ("echo", "truncate_prompt_tokens"):
            if getattr(body, name):
                raise APIError(400, "invalid_request", f"{name} cannot be combined with suffix", name)
        long += len(body.suffix)
        prompts, made = await tokenize_prompt(
            serving, caller, local, long, encode_infilling, given, body.suffix, special
        )
        sentinels = local.backend.prompt_tokenizer.sentinels
        if sentinels is not None and sentinels.end is not None:
            stop_token_ids = [*stop_token_ids, sentinels.end]
    caller.meter.charge_prompt(made)
    prompt_only = bool(body.echo) and body.max_tokens == 0  # one token is generated and not shown
    if body.max_tokens == 0 and not prompt_only:
        raise APIError(400, "invalid_request", "max_tokens = 0 is valid only with echo = true", "max_tokens")
    prompt_scored = bool(body.echo) and body.logprobs is not None
    if prompt_scored and body.prompt_logprobs is not None:
        message = "prompt_logprobs cannot be combined with echo and logprobs, which hold them already"
        raise APIError(400, "invalid_request", message, "prompt_logprobs")
    params = sampling_params(
        body,
        caller,
        serving.sampling_defaults(local),
        adapter=adapter,
        stop_token_ids=stop_token_ids,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if prompt_scored else body.prompt_logprobs,
        max_tokens=1
        if prompt_only
        else resolve_max_tokens(caller, local, prompts, body.max_tokens, DEFAULT_MAX_TOKENS),
    )
    # The prompt's log-probabilities come with the last event: then the response is not streamed.
    echoed = sum(len(text.encode()) for text in texts)
    generation = GenerationRequest(
        serving,
        caller,
        local,
        params,
        prompts,
        bool(body.stream) and not prompt_scored,
        echoed,
        resolve_priority(body, caller),
        continuation=body.continuation,
        kv_remote=body.kv_transfer_params.remote if body.kv_transfer_params is not None else None,
        shape_fields=shape_fields(body),
    )
    return CompletionHandler(generation, body, texts, prompt_only, **identity(body.continuation, "id", "created"))


@dataclass
class CompletionHandler:
    """One request, and the format of its response."""

    generation: GenerationRequest
    body: CompletionRequest
    texts: list[str]  # prompts, where they are echoed
    prompt_only: bool  # the prompt is echoed, and nothing generated is shown
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, choices: list[CompletionChoice]) -> Completion:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.body.model,
            "choices": choices,
        }

    def full_response(self, found: RequestOutput) -> Completion:
        n = self.generation.params.n
        choices = []
        for number, answer in enumerate(found.answers):
            place = number // n
            prompt = self.generation.prompts[place]
            prompt_scored = found.prompt_logprobs.get(place) or []
            before = prompt_scored if self.body.prompt_logprobs is None else []
            text, scored = answer.text, answer.logprobs
            if self.prompt_only:
                text, scored = "", []
            text = self.texts[place] + text if self.texts else text
            logprobs = self.logprobs([*with_first_token(prompt, before), *scored])
            made = choice(number, text, logprobs, "length" if self.prompt_only else answer.finish_reason)
            if self.body.prompt_logprobs is not None:
                made["prompt_logprobs"] = prompt_logprobs_object(self.token_texts, prompt_scored)
            choices.append(self.with_token_ids(made, answer.tokens, prompt))
        return {**self.completion(choices), "usage": usage_object(self.shown_usage(found.usage))}

    def logprobs(self, scored: Scored, offsets: Offsets | None = None) -> CompletionLogprobs | None:
        if self.body.logprobs is None:
            return None
        texts = self.token_texts
        return logprobs_of(texts, scored, offsets or Offsets(texts))

    @property
    def token_texts(self) -> TokenTexts:
        return token_texts(self.body, self.generation.local)

    def with_token_ids(
        self, made: CompletionChoice, tokens: list[int], prompt: Sequence[int] | None
    ) -> CompletionChoice:
        """Where asked for: those of a choice, and of the prompt with its first part."""
        if self.body.return_token_ids:
            made["token_ids"] = [] if self.prompt_only else tokens
            if prompt is not None:
                made["prompt_token_ids"] = list(prompt)
        return made

    def shown_usage(self, usage: Usage) -> Usage:
        return replace(usage, completion_tokens=0) if self.prompt_only else usage

    async def stream(self) -> AsyncGenerator[bytes, None]:
        usage, include_usage = Usage(0, 0, 0), bool(self.body.stream_options and self.body.stream_options.include_usage)
        more = {"usage": None} if include_usage else {}
        if not self.generation.stream:  # a scored prompt: one chunk an answer
            found = await collect_output(self.generation)
            usage = found.usage
            full_response = await in_thread_with_logprobs(self.generation, lambda: self.full_response(found))
            for one in full_response["choices"]:
                yield sse_event({**self.completion([one]), **more})
        else:
            offsets: dict[int, Offsets] = {}  # by answer: those that have begun
            comment = self.generation.prompt_comment()
            async with aclosing(self.generation.events()) as events:
                async for place, event in events:
                    usage = usage if event.final is None else add_usage(usage, event.final)
                    found_choice = self.chunk_choice(place, event, offsets)
                    if not event.replayed:
                        journal = self.generation.journal(place, event)
                        yield comment + journal + sse_event({**self.completion([found_choice]), **more})
                        comment = b""
        if include_usage:
            yield sse_event({**self.completion([]), "usage": usage_object(self.shown_usage(usage))})
        yield DONE

    def chunk_choice(self, place: int, event: Event, offsets: dict[int, Offsets]) -> CompletionChoice:
        """Its text may be empty: an incomplete character, or the beginning of a stop string."""
        number = place * self.generation.params.n + event.index
        text = "" if self.prompt_only else event.text
        first = number not in offsets
        if first:
            echo = self.texts[place] if self.texts else ""
            text, offsets[number] = echo + text, Offsets(self.generation.local.token_texts, len(echo))
        if event.replayed:
            for token in event.tokens:
                offsets[number].next(token)
        logprobs = self.logprobs(event.logprobs or [], offsets[number])
        made = choice(number, text, logprobs, event.finish_reason)
        return self.with_token_ids(made, event.tokens, self.generation.prompts[place] if first else None)


def choice(index: int, text: str, logprobs: CompletionLogprobs | None, finish_reason: str | None) -> CompletionChoice:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": cast("Finish | None", finish_reason),
    }


def with_first_token(prompt: Sequence[int], scored: Sequence[Logprob | None]) -> list[Logprob]:
    """A prompt's first token has no log-probability: NaN."""
    return [one or Logprob(prompt[place], math.nan) for place, one in enumerate(scored)]


def logprobs_of(texts: TokenTexts, scored: Scored, offsets: Offsets) -> CompletionLogprobs:
    found: CompletionLogprobs = {"text_offset": [], "tokens": [], "token_logprobs": [], "top_logprobs": []}
    for one in scored:
        text = texts.text(one.token)
        found["text_offset"].append(offsets.next(one.token))
        found["tokens"].append(text)
        unknown = math.isnan(one.logprob)
        found["token_logprobs"].append(None if unknown else finite(one.logprob))
        found["top_logprobs"].append(None if unknown else {texts.text(token): lp for token, lp in top_tokens(one)})
    return found
