"""Requests for a model behind another server: checked and counted here, passed on, and their answers passed back."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response

from .backend import Usage
from .body import LARGE
from .generation_request import note, wishes
from .limits import BYTES_A_TOKEN, Entry, Refusal, size_of
from .openai_types import ChatRequest, CompletionRequest
from .serving import Caller, Serving
from .sse import DONE, begun, line, while_connected
from .upstream import CONNECT_S, Upstream
from .workers import Speech

LINE_END = re.compile(rb"[\r\n]")
LONGEST_LINE = 16 * 2**20  # bytes of one event


async def forward(
    serving: Serving,
    caller: Caller,
    request: Request,
    body: CompletionRequest | ChatRequest,
    raw: bytes,
) -> Response:
    """The body goes on as it came, but for caps that our limits put on it."""
    passing = Passing(serving, caller, serving.upstreams_of(body.model), body, raw)
    if body.stream:
        return await begun(request, passing.lines())
    return Response(await while_connected(request.receive, passing.whole()), media_type="application/json")


@dataclass
class Passing:
    serving: Serving
    caller: Caller
    upstreams: list[Upstream]  # that have the model: the first to be asked first
    body: CompletionRequest | ChatRequest
    raw: bytes
    changes: dict[str, Any] = field(default_factory=dict)  # fields that go on in another way than they came

    @property
    def path(self) -> str:
        return "chat/completions" if isinstance(self.body, ChatRequest) else "completions"

    async def enter(self) -> Entry:
        """Past the limits. Caps that the request does not know of are written into it."""
        body, card = self.body, self.upstreams[0].card(self.body.model)
        lengths = lengths_of(body)
        caps = [self.caller.limits.max_tokens, self.caller.key.max_tokens]
        if card.context:
            caps.append(max(1, card.context - max(lengths)))
        if self.caller.key.tokens_per_minute:
            caps.append(max(1, self.caller.key.tokens_per_minute - sum(lengths)))
        cap = min((one for one in caps if one), default=None)
        asked = (
            body.max_tokens if isinstance(body, CompletionRequest) else body.max_completion_tokens or body.max_tokens
        )
        most = asked if asked is not None else 16 if isinstance(body, CompletionRequest) else cap
        if asked is None and cap is not None:
            self.changes["max_tokens"] = min(most or cap, cap)
        elif isinstance(body, ChatRequest) and body.max_completion_tokens and body.max_tokens:
            self.changes["max_tokens"] = asked  # whichever of the two it goes by, it is the one that was checked
        chat_logprobs = (body.top_logprobs or 0) if isinstance(body, ChatRequest) and body.logprobs else None
        logprobs = body.logprobs if isinstance(body, CompletionRequest) else chat_logprobs
        params = wishes(body, self.caller, max_tokens=max(1, most or 1), logprobs=logprobs)
        judged = isinstance(body, CompletionRequest) and body.echo
        if judged and params.logprobs is not None:
            params = replace(params, prompt_logprobs=params.logprobs)
        echoed = BYTES_A_TOKEN * sum(lengths) if judged else 0
        size = size_of(params, lengths, echoed, kept=not body.stream)
        return await self.serving.enter(self.caller.visit, self.caller.limits, card, params, size)

    async def content(self) -> bytes:
        if len(self.raw) <= LARGE:
            return changed(None, self.raw, self.changes)
        return await self.serving.workers.run(self.caller.key.name, None, changed, self.raw, self.changes)

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[httpx.Response, None]:
        """The answer, once it has begun and is none of an error."""
        upstream, answer = await self.reached(await self.content())
        upstream.open += 1
        try:
            yield answer
        except httpx.TimeoutException:
            raise took_too_long() from None
        except httpx.HTTPError:
            raise unreachable() from None
        finally:
            upstream.open -= 1
            await answer.aclose()

    async def reached(self, content: bytes) -> tuple[Upstream, httpx.Response]:
        """By the first that answers. What one refuses for good, the others would; what it cannot do, they may."""
        refusal = unreachable()
        for place, upstream in enumerate(self.upstreams):
            try:
                return upstream, await self.asked(upstream, content)
            except Refusal as error:
                # The first reason is the one to tell: the others were asked because of it.
                refusal = error if place == 0 else refusal
                if error.code == "upstream_timeout" or (error.status < 500 and error.status != 429):
                    break
        raise refusal

    async def asked(self, upstream: Upstream, content: bytes) -> httpx.Response:
        seconds = self.caller.limits.request_seconds or None
        timeout = httpx.Timeout(CONNECT_S, read=seconds, write=CONNECT_S)
        headers = {"x-request-id": self.caller.facts["request_id"], "content-type": "application/json"}
        request = upstream.client.build_request(
            "POST", f"{upstream.url}/{self.path}", content=content, headers=headers, timeout=timeout
        )
        upstream.open += 1
        try:
            answer = await upstream.client.send(request, stream=True)
            if answer.status_code == 200:
                return answer
            try:
                raise refusal_of_upstream(answer, await answer.aread())
            finally:
                await answer.aclose()
        except (httpx.ConnectTimeout, httpx.NetworkError) as error:
            upstream.fail(error)
            raise unreachable() from None
        except httpx.TimeoutException:
            raise took_too_long() from None
        except httpx.HTTPError:
            raise unreachable() from None
        finally:
            upstream.open -= 1

    async def whole(self) -> bytes:
        with await self.enter() as entry:
            self.caller.facts["asked"] = time.time()
            async with self.opened() as answer, self.charged(entry):
                content = await answer.aread()
                self.count(entry, understood(content))
            return content

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Usage is always asked for, to be counted; it is passed on where the client asked for it too."""
        wanted = bool(self.body.stream_options and self.body.stream_options.include_usage)
        options = self.body.stream_options.model_dump(exclude_unset=True) if self.body.stream_options else {}
        self.changes["stream_options"] = {**options, "include_usage": True}
        seconds = self.caller.limits.request_seconds or math.inf
        deadline = time.monotonic() + seconds
        with await self.enter() as entry:
            self.caller.facts["asked"] = time.time()
            async with self.opened() as answer, self.charged(entry):
                async for text in lines_of(answer.aiter_bytes()):
                    if time.monotonic() > deadline:
                        raise Refusal(504, "request_timeout", f"the request was not finished within {seconds:g} s")
                    if not text.startswith(b"data:"):
                        continue
                    if (data := text[5:].strip()) == b"[DONE]":
                        yield DONE
                        return
                    chunk = understood(data)
                    if chunk.get("usage"):
                        self.count(entry, chunk)
                    if chunk.get("choices") or wanted or "error" in chunk:
                        yield line(chunk)
        raise Refusal(502, "upstream_lost", "the server behind this one ended its answer too early")

    @asynccontextmanager
    async def charged(self, entry: Entry) -> AsyncGenerator[None, None]:
        """An answer that has begun and does not say what it came to is taken for all that it might have been."""
        try:
            yield
        finally:
            if not entry.used:
                entry.use(entry.tokens)

    def count(self, entry: Entry, answer: dict[str, Any]) -> None:
        used = answer.get("usage")
        if not isinstance(used, dict):
            return
        details = used.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else 0
        usage = Usage(count_of(used.get("prompt_tokens")), count_of(used.get("completion_tokens")), count_of(cached))
        note(self.caller.facts, usage)
        entry.use(usage.prompt_tokens + usage.completion_tokens)


async def lines_of(parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """A line of server-sent events ends in LF, CR or both (then an empty one follows), and nowhere else."""
    held = bytearray()
    async for part in parts:
        *whole, last = LINE_END.split(part)
        for one in whole:
            yield bytes(held + one)
            held.clear()
        held += last
        if len(held) > LONGEST_LINE:
            raise Refusal(502, "upstream_invalid", "the server behind this one sent an event that has no end")
    yield bytes(held)


def unreachable() -> Refusal:
    return Refusal(502, "upstream_unreachable", "the server behind this one cannot be reached", None, 1)


def took_too_long() -> Refusal:
    return Refusal(504, "upstream_timeout", "the server behind this one took too long")


def understood(content: str | bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Refusal(502, "upstream_invalid", "the server behind this one did not answer in JSON")
    return found


def changed(_: Speech | None, raw: bytes, changes: dict[str, Any]) -> bytes:
    """A body with other values in some of its fields."""
    return json.dumps(json.loads(raw) | changes).encode() if changes else raw


def count_of(said: Any) -> int:
    return max(0, said) if isinstance(said, int) else 0


def lengths_of(body: CompletionRequest | ChatRequest) -> list[int]:
    """Tokens of each prompt, as far as can be told without its tokenizer."""
    if isinstance(body, ChatRequest):
        return [estimate(message.model_dump_json(exclude_none=True) for message in body.messages)]
    prompt = body.prompt
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    return [estimate([one]) if isinstance(one, str) else len(one) for one in prompts]


def estimate(texts: Any) -> int:
    return sum(-(-len(text.encode()) // BYTES_A_TOKEN) for text in texts)


def refusal_of_upstream(answer: httpx.Response, content: bytes) -> Refusal:
    """What it refuses is refused; that it fails, or does not know us, is no fault of the client."""
    status = answer.status_code
    retry = answer.headers.get("retry-after", "")
    after = float(retry) if retry.isdecimal() and len(retry) < 7 else None
    if status in (401, 403) or not 400 <= status < 500:
        return Refusal(502, "upstream_failed", f"the server behind this one failed with status {status}", None, after)
    try:
        error = json.loads(content)["error"]
        code, param = str(error.get("code") or "upstream_refused"), error.get("param")
        return Refusal(status, code, str(error["message"]), param if isinstance(param, str) else None, after)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Refusal(
            status, "upstream_refused", f"the server behind this one refused it with status {status}", None, after
        )
