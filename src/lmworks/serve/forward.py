"""The proxy: requests for a model of an upstream server are checked and metered here, then forwarded."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response

from .backend import Usage
from .body import LARGE_BODY_BYTES
from .generation_request import record_usage, resolve_priority, sampling_params
from .limits import BYTES_A_TOKEN, Admission, APIError, size_of
from .request_bodies import ChatRequest, CompletionRequest
from .serving import CONNECT_S, Caller, Serving, Upstream
from .sse import DONE, sse_event, start_stream, while_connected
from .workers import PromptProcessor

LINE_END = re.compile(rb"[\r\n]")
LONGEST_LINE = 16 * 2**20  # bytes of one event


async def forward(
    serving: Serving,
    caller: Caller,
    request: Request,
    body: CompletionRequest | ChatRequest,
    raw: bytes,
) -> Response:
    """The body is forwarded unchanged, except for caps that our limits add."""
    proxied = ProxyRequest(serving, caller, serving.upstreams_of(body.model), body, raw)
    if body.stream:
        return await start_stream(request, proxied.stream())
    return Response(await while_connected(request.receive, proxied.full_response()), media_type="application/json")


@dataclass
class ProxyRequest:
    serving: Serving
    caller: Caller
    upstreams: list[Upstream]  # that serve the model, in the order in which they are tried
    body: CompletionRequest | ChatRequest
    raw: bytes
    changes: dict[str, Any] = field(default_factory=dict)  # fields of the body that are replaced

    @property
    def path(self) -> str:
        return "chat/completions" if isinstance(self.body, ChatRequest) else "completions"

    async def admit(self) -> Admission:
        """Checks the limits; caps that the request does not have are added to `changes`."""
        body, card = self.body, self.upstreams[0].card(self.body.model)
        resolve_priority(body, self.caller)
        lengths = lengths_of(body)
        caps = [self.caller.limits.max_tokens, self.caller.key.max_tokens]
        if card.context:
            caps.append(max(1, card.context - max(lengths)))
        if self.caller.key.tokens_per_minute:
            caps.append(max(1, self.caller.key.tokens_per_minute - sum(lengths)))
        cap = min((one for one in caps if one), default=None)
        requested = (
            body.max_tokens if isinstance(body, CompletionRequest) else body.max_completion_tokens or body.max_tokens
        )
        most = requested if requested is not None else 16 if isinstance(body, CompletionRequest) else cap
        if requested is None and cap is not None:
            self.changes["max_tokens"] = min(most or cap, cap)
        elif isinstance(body, ChatRequest) and body.max_completion_tokens and body.max_tokens:
            self.changes["max_tokens"] = requested  # the upstream may read either
        chat_logprobs = (body.top_logprobs or 0) if isinstance(body, ChatRequest) and body.logprobs else None
        logprobs = body.logprobs if isinstance(body, CompletionRequest) else chat_logprobs
        params = sampling_params(body, self.caller, max_tokens=max(1, most or 1), logprobs=logprobs)
        prompt_scored = isinstance(body, CompletionRequest) and body.echo
        if prompt_scored and params.logprobs is not None:
            params = replace(params, prompt_logprobs=params.logprobs)
        echoed = BYTES_A_TOKEN * sum(lengths) if prompt_scored else 0
        size = size_of(params, lengths, echoed, kept=not body.stream)
        return await self.serving.admit(self.caller.meter, self.caller.limits, card, params, size)

    async def content(self) -> bytes:
        if len(self.raw) <= LARGE_BODY_BYTES:
            return apply_changes(None, self.raw, self.changes)
        return await self.serving.workers.run(self.caller.key.name, None, apply_changes, self.raw, self.changes)

    @asynccontextmanager
    async def response(self) -> AsyncGenerator[httpx.Response, None]:
        """The response of the first upstream that answers with status 200."""
        upstream, response = await self.send(await self.content())
        with open_request(upstream):
            try:
                yield response
            finally:
                await response.aclose()

    async def send(self, content: bytes) -> tuple[Upstream, httpx.Response]:
        """Tries the upstreams in order. A client error is final: the others would answer the same."""
        first_error = upstream_unreachable()
        for place, upstream in enumerate(self.upstreams):
            try:
                return upstream, await self.send_to(upstream, content)
            except APIError as error:
                first_error = error if place == 0 else first_error
                if error.code == "upstream_timeout" or (error.status < 500 and error.status != 429):
                    break
        raise first_error

    async def send_to(self, upstream: Upstream, content: bytes) -> httpx.Response:
        seconds = self.caller.limits.request_seconds or None
        timeout = httpx.Timeout(CONNECT_S, read=seconds, write=CONNECT_S)
        headers = {"x-request-id": self.caller.log_fields["request_id"], "content-type": "application/json"}
        request = upstream.client.build_request(
            "POST", f"{upstream.url}/{self.path}", content=content, headers=headers, timeout=timeout
        )
        with open_request(upstream):
            try:
                response = await upstream.client.send(request, stream=True)
                if response.status_code == 200:
                    return response
                try:
                    raise upstream_error(response, await response.aread())
                finally:
                    await response.aclose()
            except (httpx.ConnectTimeout, httpx.NetworkError) as error:
                upstream.mark_down(error)
                raise

    async def full_response(self) -> bytes:
        with await self.admit() as admission:
            self.caller.log_fields["asked"] = time.time()
            async with self.response() as response, self.charged(admission):
                content = await response.aread()
                self.count(admission, parse_json_object(content))
            return content

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Usage is always requested, for metering; it is forwarded where the client asked for it."""
        wanted = bool(self.body.stream_options and self.body.stream_options.include_usage)
        options = self.body.stream_options.model_dump(exclude_unset=True) if self.body.stream_options else {}
        self.changes["stream_options"] = {**options, "include_usage": True}
        seconds = self.caller.limits.request_seconds or math.inf
        deadline = time.monotonic() + seconds
        with await self.admit() as admission:
            self.caller.log_fields["asked"] = time.time()
            async with self.response() as response, self.charged(admission):
                async for text in lines_of(response.aiter_bytes()):
                    if time.monotonic() > deadline:
                        raise APIError(504, "request_timeout", f"the request was not finished within {seconds:g} s")
                    if not text.startswith(b"data:"):
                        continue
                    if (data := text[5:].strip()) == b"[DONE]":
                        yield DONE
                        return
                    chunk = parse_json_object(data)
                    if chunk.get("usage"):
                        self.count(admission, chunk)
                    if chunk.get("choices") or wanted or "error" in chunk:
                        yield sse_event(chunk)
        raise APIError(502, "upstream_lost", "the upstream server ended its response too early")

    @asynccontextmanager
    async def charged(self, admission: Admission) -> AsyncGenerator[None, None]:
        """A response without usage is charged all tokens that it was admitted with."""
        try:
            yield
        finally:
            if not admission.used:
                admission.use(admission.tokens)

    def count(self, admission: Admission, answer: dict[str, Any]) -> None:
        used = answer.get("usage")
        if not isinstance(used, dict):
            return
        details = used.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else 0
        usage = Usage(count_of(used.get("prompt_tokens")), count_of(used.get("completion_tokens")), count_of(cached))
        record_usage(self.caller.log_fields, usage)
        admission.use(usage.prompt_tokens + usage.completion_tokens)


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
            raise APIError(502, "upstream_invalid", "the upstream server sent an event without an end")
    yield bytes(held)


@contextmanager
def open_request(upstream: Upstream) -> Iterator[None]:
    """Counts a request as open at its upstream; httpx's errors become API errors."""
    upstream.open += 1
    try:
        yield
    except httpx.HTTPError as error:
        too_slow = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
        raise (upstream_timeout() if too_slow else upstream_unreachable()) from None
    finally:
        upstream.open -= 1


def upstream_unreachable() -> APIError:
    return APIError(502, "upstream_unreachable", "the upstream server cannot be reached", None, 1)


def upstream_timeout() -> APIError:
    return APIError(504, "upstream_timeout", "the upstream server took too long")


def parse_json_object(content: str | bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise APIError(502, "upstream_invalid", "the upstream server did not answer in JSON")
    return found


def apply_changes(_: PromptProcessor | None, raw: bytes, changes: dict[str, Any]) -> bytes:
    """The body with some fields replaced."""
    return json.dumps(json.loads(raw) | changes).encode() if changes else raw


def count_of(value: Any) -> int:
    return max(0, value) if isinstance(value, int) else 0


def lengths_of(body: CompletionRequest | ChatRequest) -> list[int]:
    """Tokens of each prompt, estimated without its tokenizer."""
    if isinstance(body, ChatRequest):
        return [estimate(message.model_dump_json(exclude_none=True) for message in body.messages)]
    prompt = body.prompt
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    return [estimate([one]) if isinstance(one, str) else len(one) for one in prompts]


def estimate(texts: Any) -> int:
    return sum(-(-len(text.encode()) // BYTES_A_TOKEN) for text in texts)


def upstream_error(answer: httpx.Response, content: bytes) -> APIError:
    """Client errors are passed on; server errors, and a wrong key of ours, become 502."""
    status = answer.status_code
    retry = answer.headers.get("retry-after", "")
    after = float(retry) if retry.isdecimal() and len(retry) < 7 else None
    if status in (401, 403) or not 400 <= status < 500:
        return APIError(502, "upstream_failed", f"the upstream server failed with status {status}", None, after)
    try:
        error = json.loads(content)["error"]
        code, param = str(error.get("code") or "upstream_refused"), error.get("param")
        return APIError(status, code, str(error["message"]), param if isinstance(param, str) else None, after)
    except (ValueError, KeyError, TypeError, AttributeError):
        return APIError(
            status, "upstream_refused", f"the upstream server refused the request with status {status}", None, after
        )
