"""A request for text, whichever endpoint it came to: admit it, find its model, answer at once or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from .body import read_body
from .forward import forward
from .generation_request import Job, Total, aside, collected
from .openai_types import ChatRequest, CompletionRequest
from .serving import Caller, Local, Serving
from .sse import begun, encode, while_connected
from .upstream import Upstream

Body = TypeVar("Body", ChatRequest, CompletionRequest)


SLICE = 256  # places whose log-probabilities are written at once


class Form(Protocol):
    """How an endpoint answers: all of it, or line by line as it is made."""

    job: Job

    def whole(self, found: Total) -> Any: ...

    def lines(self) -> AsyncGenerator[bytes, None]: ...


async def answered(
    serving: Serving,
    request: Request,
    kind: type[Body],
    prepared: Callable[[Serving, Caller, Local, str | None, Body], Awaitable[Form]],
) -> Response:
    caller = serving.admit(request)
    body, raw = await read_body(serving, request, caller, kind)
    model, adapter = serving.find(caller, body.model)
    if isinstance(model, Upstream):
        return await forward(serving, caller, request, body, raw)
    answer = await prepared(serving, caller, model, adapter, body)
    if body.stream:
        return await begun(request, answer.lines())
    found = await while_connected(request.receive, collected(answer.job))
    content = await aside(answer.job, lambda: written(answer.whole(found)))
    return Response(content, media_type="application/json")


def written(answer: Mapping[str, Any]) -> str:
    """As JSON, list by list: the encoder holds the interpreter's lock while it works."""
    around = encode({name: value for name, value in answer.items() if name != "choices"})
    return f'{around[:-1]},"choices":[{",".join(map(choice, answer["choices"]))}]}}'


def choice(one: Mapping[str, Any]) -> str:
    if one["logprobs"] is None:
        return encode(one)
    around = encode({name: value for name, value in one.items() if name != "logprobs"})
    lists = (f"{encode(name)}:{sliced(value)}" for name, value in one["logprobs"].items())
    return f'{around[:-1]},"logprobs":{{{",".join(lists)}}}}}'


def sliced(found: Any) -> str:
    if not isinstance(found, list):
        return encode(found)
    parts = (encode(found[at : at + SLICE])[1:-1] for at in range(0, len(found), SLICE))
    return f"[{','.join(parts)}]"
