"""The FastAPI application: routes, their OpenAPI schema (`/openapi.json`), probes (`/health`, `/ready`), and the page
at `/`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, Literal, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from typing_extensions import TypedDict

from .. import __version__
from ..spec import LMWorksError
from . import chat, completions, prompts, telemetry
from .backend import State
from .body import read_body
from .errors import ErrorBody, error_response
from .forward import forward
from .generation_request import GenerationRequest, RequestOutput, collect_output, in_thread_with_logprobs
from .middleware import RequestMiddleware
from .openai_answers import ChatCompletion, Completion, Detokenized, ModelList, ModelObject, Tokenized, TokenizerInfo
from .openai_types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .serving import Caller, LocalModel, Model, Serving, Upstream
from .sse import start_stream, to_json, while_connected
from .telemetry import Tracing

BODIES: tuple[type[BaseModel], ...] = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
REFUSED = {400: "cannot be served as it is", 401: "no key, or a wrong one", 404: "no such model"}
Body = TypeVar("Body", ChatRequest, CompletionRequest)
LONGEST_PATH = 80  # characters of a path that is compared with others, and quoted
BUSY = {429: "too much at once: see retry-after", 503: "not now: see retry-after"}


def make_app(
    serving: Serving, origins: Sequence[str] = (), tracing: Tracing | None = None, local: bool = False
) -> FastAPI:
    """For models that have been started. `origins`: sites whose pages may call the API (CORS).

    `local`: the server listens on loopback alone; without keys it then rejects requests of foreign pages.
    """
    app = FastAPI(
        title="LMWorks",
        version=__version__,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["retry-after", "x-request-id"],
        )
    app.add_middleware(RequestMiddleware, serving=serving, tracing=tracing, local=local, origins=tuple(origins))
    for kind in (HTTPException, LMWorksError, ValidationError):
        app.add_exception_handler(kind, handle_error)
    add_model_routes(app, serving)
    add_generation_routes(app, serving)
    add_tokenizer_routes(app, serving)
    add_status_routes(app, serving)
    app.openapi = lambda: openapi_schema(app)  # type: ignore[method-assign]
    return app


async def handle_error(request: Request, error: Exception) -> Response:
    """Error responses for wrong requests. Internal errors are handled by the middleware."""
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        error.detail = not_found_message(request)
    return error_response(error)


def not_found_message(request: Request) -> str:
    """Lists the endpoints, and the one that was probably meant."""
    method, path = request.method, request.url.path
    served = {
        route.path_format: sorted(route.methods or ())
        for route in request.app.routes
        if isinstance(route, APIRoute) and route.include_in_schema
    }
    if path in served:
        return f"{path} takes {' and '.join(served[path])}, not {method[:20]}"
    near = get_close_matches(path, served, 1, cutoff=0.8) if len(path) <= LONGEST_PATH else []
    meant = f" (did you mean {near[0]}?)" if near else ""
    listed = ", ".join(f"{' '.join(methods)} {one}" for one, methods in served.items())
    return f"there is no {method[:20]} {path[:LONGEST_PATH]}{meant}; there are {listed}"


def error_responses(*tables: dict[int, str]) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorBody, "description": what} for table in tables for status, what in table.items()}


def request_body(body: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI's requestBody: bodies are read within limits by `serve.body`, not by FastAPI."""
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def openapi_schema(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        found = FastAPI.openapi(app)
        _, schemas = models_json_schema(
            [(body, "validation") for body in BODIES], ref_template="#/components/schemas/{model}"
        )
        components = found["components"]
        components["schemas"] |= schemas["$defs"]
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}, {}]
        app.openapi_schema = found
    return app.openapi_schema


# --- routes -----------------------------------------------------------------------------------------------


def add_model_routes(app: FastAPI, serving: Serving) -> None:
    @app.get("/v1/models", responses=error_responses({401: REFUSED[401], 503: BUSY[503]}))
    async def models(request: Request) -> ModelList:
        """Models that this key may use."""
        caller = serving.authenticate(request)
        return {"object": "list", "data": [model_object(name, *one) for name, one in serving.visible(caller).items()]}

    @app.get(
        "/v1/models/{model:path}", responses=error_responses({401: REFUSED[401], 404: REFUSED[404], 503: BUSY[503]})
    )
    async def model(request: Request, model: str) -> ModelObject:
        """One of them."""
        caller = serving.authenticate(request)
        return model_object(model, *serving.find(caller, model))


def model_object(name: str, model: Model, adapter: str | None) -> ModelObject:
    card = model.backend.card if isinstance(model, LocalModel) else model.card(name)
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "max_model_len": card.context or None,
        "parent": card.id if adapter is not None else None,
    }


def add_generation_routes(app: FastAPI, serving: Serving) -> None:
    streamed: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}

    @app.post(
        "/v1/completions",
        openapi_extra=request_body(CompletionRequest),
        response_model=Completion,
        responses={200: {"content": streamed}, **error_responses(REFUSED, BUSY)},
    )
    async def create_completion(request: Request) -> Response:
        """Continue texts."""
        return await handle_request(serving, request, CompletionRequest, completions.make_handler)

    @app.post(
        "/v1/chat/completions",
        openapi_extra=request_body(ChatRequest),
        response_model=ChatCompletion,
        responses={200: {"content": streamed}, **error_responses(REFUSED, BUSY)},
    )
    async def create_chat_completion(request: Request) -> Response:
        """Answer in a conversation."""
        return await handle_request(serving, request, ChatRequest, chat.make_handler)


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
    """Both generation endpoints: authenticate, find the model, respond whole or streamed."""
    caller = serving.authenticate(request)
    body, raw = await read_body(serving, request, caller, kind)
    model, adapter = serving.find(caller, body.model)
    if isinstance(model, Upstream):
        return await forward(serving, caller, request, body, raw)
    handler = await make_handler(serving, caller, model, adapter, body)
    if body.stream:
        return await start_stream(request, handler.stream())
    output = await while_connected(request.receive, collect_output(handler.generation))
    content = await in_thread_with_logprobs(handler.generation, lambda: to_json(handler.full_response(output)))
    return Response(content, media_type="application/json")


def add_tokenizer_routes(app: FastAPI, serving: Serving) -> None:
    @app.post(
        "/tokenize",
        openapi_extra=request_body(TokenizeRequest),
        response_model=Tokenized,
        responses=error_responses(REFUSED, BUSY),
    )
    async def encode(request: Request) -> Response:
        """Token ids of a text or a conversation."""
        return await prompts.tokenize(serving, request)

    @app.post(
        "/detokenize",
        openapi_extra=request_body(DetokenizeRequest),
        response_model=Detokenized,
        responses=error_responses(REFUSED, BUSY),
    )
    async def decode(request: Request) -> Response:
        """The text of token ids."""
        return await prompts.detokenize(serving, request)

    @app.get("/tokenizer_info", responses=error_responses(REFUSED))
    async def info(request: Request, model: str | None = None) -> TokenizerInfo:
        """What a client must know to make prompts itself."""
        return prompts.tokenizer_info(serving, request, model)


def add_status_routes(app: FastAPI, serving: Serving) -> None:
    @app.get("/health", responses={503: {"model": Health, "description": "an engine is down, or hangs"}})
    async def healthy(request: Request) -> Health:
        """Whether all engines run and advance."""
        state = health(serving, serving.has_valid_key(request))
        return health_response(state, state["status"] in ("ok", "draining"))

    elsewhere: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "send requests elsewhere"}}

    @app.get("/ready", responses={**error_responses({404: "no such model"}), **elsewhere})
    async def ready(request: Request, model: str | None = None) -> Health:
        """Whether requests may be sent here: for each model, or for one of them."""
        state, well = health(serving, serving.has_valid_key(request)), serving.ready(model)
        return health_response({**state, "status": "ok" if well else not_ready(state)}, well)

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        """To try the models, in a browser."""
        return Response(page().html, headers=dict(page().headers))

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(telemetry.render_metrics(serving), media_type=telemetry.CONTENT_TYPE)


def not_ready(state: Health) -> Literal["draining", "unhealthy"]:
    return "draining" if state["status"] == "draining" else "unhealthy"


def health_response(state: Health, well: bool) -> Any:
    return JSONResponse(state, 200 if well else 503)


# --- /health (liveness: all engines run and take steps) and /ready ---------------------------------------


class EngineHealth(TypedDict):
    """One model. The numbers are those of the engine's last report, at most a second old while it works."""

    healthy: bool
    alive: bool
    ready: bool
    stalled_seconds: float
    restarts: int
    requests: int  # under way
    running: int  # answers
    waiting: int
    kv_cache_usage: float
    prefix_cache_hit_rate: float
    generated_tokens: int


class Health(TypedDict):
    status: Literal["ok", "unhealthy", "draining"]
    models: dict[str, EngineHealth]


def health(serving: Serving, trusted: bool) -> Health:
    """Addresses of upstreams are shown only to requests with a valid key."""
    states = {model.backend.name: model.backend.state for model in serving.local_models}
    for number, upstream in enumerate(serving.upstreams, start=1):
        states[upstream.url if trusted else f"upstream-{number}"] = upstream.state
    healthy = all(state.healthy for state in states.values())
    status: Literal["ok", "unhealthy", "draining"] = (
        "draining" if serving.draining else "ok" if healthy else "unhealthy"
    )
    return {"status": status, "models": {name: of_engine(state) for name, state in states.items()}}


def of_engine(state: State) -> EngineHealth:
    found = state.metrics
    queries = found.get("prefix_cache_queries", 0)
    return {
        "healthy": state.healthy,
        "alive": state.alive,
        "ready": state.ready,
        "stalled_seconds": round(state.stalled, 3),
        "restarts": state.restarts,
        "requests": state.open,
        "running": found.get("num_requests_running", 0),
        "waiting": found.get("num_requests_waiting", 0),
        "kv_cache_usage": found.get("kv_cache_usage_perc", 0.0),
        "prefix_cache_hit_rate": found.get("prefix_cache_hits", 0) / queries if queries else 0.0,
        "generated_tokens": found.get("generation_tokens", 0),
    }


# --- the page: a playground for the models, and the state of their engines -------------------------------

# One response holds all of it. Its content security policy allows this script and style alone, by digest, and requests
# to this server alone.


@dataclass(frozen=True)
class Page:
    html: bytes
    headers: Mapping[str, str]


@cache
def page() -> Page:
    style, script = own("page.css"), own("page_engine.js") + own("page_markdown.js") + own("page.js")
    html = own("page.html").replace("/*style*/", style).replace("/*script*/", script)
    policy = {
        "default-src": "'none'",
        "script-src": digest(script),
        "style-src": digest(style),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Page(html.encode(), headers)


def own(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
