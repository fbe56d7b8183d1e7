"""The request handler of both generation endpoints: authenticate, find the model, respond whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from .body import read_body
from .forward import forward
from .generation_request import GenerationRequest, RequestOutput, collect_output, in_thread_with_logprobs
from .openai_types import ChatRequest, CompletionRequest
from .serving import Caller, LocalModel, Serving
from .sse import encode, start_stream, while_connected
from .upstream import Upstream

Body = TypeVar("Body", ChatRequest, CompletionRequest)


SLICE = 256  # places whose log-probabilities are written at once


class RequestHandler(Protocol):
    """How an endpoint formats its response: whole, or as a stream of events."""

    generation: GenerationRequest

    def full_response(self, found: RequestOutput) -> Any: ...

    def stream(self) -> AsyncGenerator[bytes, None]: ...


async def handle_request(
    serving: Serving,
    request: Request,
    kind: type[Body],
    make_handler: Callable[[Serving, Caller, LocalModel, str | None, Body], Awaitable[RequestHandler]],
) -> Response:
    caller = serving.authenticate(request)
    body, raw = await read_body(serving, request, caller, kind)
    model, adapter = serving.find(caller, body.model)
    if isinstance(model, Upstream):
        return await forward(serving, caller, request, body, raw)
    answer = await make_handler(serving, caller, model, adapter, body)
    if body.stream:
        return await start_stream(request, answer.stream())
    found = await while_connected(request.receive, collect_output(answer.generation))
    content = await in_thread_with_logprobs(answer.generation, lambda: to_json(answer.full_response(found)))
    return Response(content, media_type="application/json")


def to_json(answer: Mapping[str, Any]) -> str:
    """JSON, encoded list by list: the encoder holds the GIL."""
    around = encode({name: value for name, value in answer.items() if name != "choices"})
    return f'{around[:-1]},"choices":[{",".join(map(choice, answer["choices"]))}]}}'


def choice(one: Mapping[str, Any]) -> str:
    if one["logprobs"] is None:
        return encode(one)
    around = encode({name: value for name, value in one.items() if name != "logprobs"})
    lists = (f"{encode(name)}:{encode_in_slices(value)}" for name, value in one["logprobs"].items())
    return f'{around[:-1]},"logprobs":{{{",".join(lists)}}}}}'


def encode_in_slices(found: Any) -> str:
    if not isinstance(found, list):
        return encode(found)
    parts = (encode(found[at : at + SLICE])[1:-1] for at in range(0, len(found), SLICE))
    return f"[{','.join(parts)}]"
