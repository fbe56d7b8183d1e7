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
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from typing_extensions import TypedDict

from .. import __version__
from ..observability.tracing import Tracing
from ..spec import LMWorksError
from . import chat, completions, embeddings, prompts, rerank
from .admin import add_admin_routes
from .backend import Backend, ProfileRequest, State
from .batches.bodies import BatchRequest
from .batches.routes import add_batch_routes
from .beams import check_beams, collect_beams
from .body import read_body
from .cache_routes import add_cache_routes
from .errors import ErrorBody, error_response
from .forward import forward
from .generation_request import GenerationRequest, RequestOutput, collect_output, in_thread_with_logprobs
from .limits import APIError
from .metrics import render_metrics
from .middleware import RequestMiddleware
from .openapi import STREAM, component_schemas, error_responses, request_body
from .protocols.messages.bodies import CountTokensRequest, MessagesRequest
from .protocols.messages.errors import AnthropicErrorBody
from .protocols.messages.routes import add_messages_routes
from .protocols.responses.bodies import ResponsesRequest
from .protocols.responses.routes import add_responses_routes
from .request_bodies import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from .response_bodies import (
    ChatCompletion,
    ClassifyResponse,
    Completion,
    Detokenized,
    EmbeddingList,
    ModelList,
    ModelObject,
    RerankResponse,
    ScoreResponse,
    Tokenized,
    TokenizerInfo,
)
from .serving import Caller, LocalModel, Model, Serving, Upstream
from .sse import start_stream, to_json, while_connected

BODIES: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatRequest,
    EmbeddingRequest,
    ScoreRequest,
    RerankRequest,
    ClassifyRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    BatchRequest,
)
Body = TypeVar("Body", ChatRequest, CompletionRequest)
MAX_QUOTED_PATH = 80  # characters of an unknown path that are compared with endpoints and quoted


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
            allow_headers=["authorization", "content-type", "x-request-id", "x-api-key", "anthropic-version"],
            expose_headers=["retry-after", "x-request-id"],
        )
    app.add_middleware(RequestMiddleware, serving=serving, tracing=tracing, local=local, origins=tuple(origins))
    for kind in (HTTPException, LMWorksError, ValidationError):
        app.add_exception_handler(kind, handle_error)
    add_model_routes(app, serving)
    add_generation_routes(app, serving)
    add_pooling_routes(app, serving)
    add_responses_routes(app, serving)
    add_messages_routes(app, serving)
    add_batch_routes(app, serving)
    add_tokenizer_routes(app, serving)
    add_admin_routes(app, serving)
    add_cache_routes(app, serving)
    add_status_routes(app, serving)
    if serving.profile_dir is not None:
        add_profile_routes(app, serving, serving.profile_dir)
    app.openapi = lambda: openapi_schema(app)  # type: ignore[method-assign]
    return app


async def handle_error(request: Request, error: Exception) -> Response:
    """Error responses for wrong requests. Internal errors are handled by the middleware."""
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        error.detail = not_found_message(request)
    return error_response(error, request.url.path)


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
    near = get_close_matches(path, served, 1, cutoff=0.8) if len(path) <= MAX_QUOTED_PATH else []
    hint = f" (did you mean {near[0]}?)" if near else ""
    listed = ", ".join(f"{' '.join(methods)} {endpoint}" for endpoint, methods in served.items())
    return f"there is no {method[:20]} {path[:MAX_QUOTED_PATH]}{hint}; all are in /openapi.json: {listed}"


def openapi_schema(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        components = document["components"]
        components["schemas"] |= component_schemas(BODIES, [ErrorBody, AnthropicErrorBody])
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}, {}]
        app.openapi_schema = document
    return app.openapi_schema


# --- routes -----------------------------------------------------------------------------------------------


def add_model_routes(app: FastAPI, serving: Serving) -> None:
    @app.get("/v1/models", name="models", responses=error_responses(401, 503))
    async def list_models(request: Request) -> ModelList:
        """List the models that this key may use."""
        caller = serving.authenticate(request)
        visible = serving.visible(caller)
        return {"object": "list", "data": [model_object(serving, name, *entry) for name, entry in visible.items()]}

    @app.get("/v1/models/{model:path}", name="model", responses=error_responses(401, 404, 503))
    async def retrieve_model(request: Request, model: str) -> ModelObject:
        """Describe one model."""
        caller = serving.authenticate(request)
        return model_object(serving, model, *serving.find(caller, model))


def model_object(serving: Serving, name: str, model: Model, adapter: str | None) -> ModelObject:
    card = model.backend.card if isinstance(model, LocalModel) else model.card(name)
    found: ModelObject = {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "max_model_len": card.context or None,
        "parent": card.id if adapter is not None else None,
    }
    if isinstance(model, LocalModel) and (defaults := serving.sampling_defaults(model)):
        found["sampling_defaults"] = defaults
    return found


def add_generation_routes(app: FastAPI, serving: Serving) -> None:
    @app.post(
        "/v1/completions",
        name="completions",
        openapi_extra=request_body(CompletionRequest),
        response_model=Completion,
        responses={200: {"content": STREAM}, **error_responses()},
    )
    async def create_completion(request: Request) -> Response:
        """Create completions of prompts."""
        return await handle_request(serving, request, CompletionRequest, completions.make_handler)

    @app.post(
        "/v1/chat/completions",
        name="chat_completions",
        openapi_extra=request_body(ChatRequest),
        response_model=ChatCompletion,
        responses={200: {"content": STREAM}, **error_responses()},
    )
    async def create_chat_completion(request: Request) -> Response:
        """Create a chat completion."""
        return await handle_request(serving, request, ChatRequest, chat.make_handler)


class RequestHandler(Protocol):
    """How an endpoint formats its response: whole, or as a stream of events."""

    @property
    def generation(self) -> GenerationRequest: ...

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
    check_beams(body)
    handler = await make_handler(serving, caller, model, adapter, body)
    if body.stream:
        return await start_stream(request, handler.stream())
    found = collect_beams(handler.generation, body) if body.use_beam_search else collect_output(handler.generation)
    output = await while_connected(request.receive, found)
    content = await in_thread_with_logprobs(handler.generation, lambda: to_json(handler.full_response(output)))
    return Response(content, media_type="application/json")


def add_pooling_routes(app: FastAPI, serving: Serving) -> None:
    @app.post(
        "/v1/embeddings",
        name="embeddings",
        openapi_extra=request_body(EmbeddingRequest),
        response_model=EmbeddingList,
        responses=error_responses(),
    )
    async def create_embeddings(request: Request) -> Response:
        """Vectors of texts."""
        return await embeddings.create_embeddings(serving, request)

    async def score(request: Request) -> ScoreResponse:
        """How well texts go together."""
        return await rerank.score(serving, request)

    async def rank(request: Request) -> RerankResponse:
        """Documents by how well they go with a query."""
        return await rerank.rerank(serving, request)

    async def classify(request: Request) -> ClassifyResponse:
        """Values of the model's scalar head."""
        return await rerank.classify(serving, request)

    for path in ("/classify", "/v1/classify"):
        body = request_body(ClassifyRequest)
        app.post(path, name="classify", openapi_extra=body, responses=error_responses())(classify)
    for path in ("/score", "/v1/score"):
        app.post(path, name="score", openapi_extra=request_body(ScoreRequest), responses=error_responses())(score)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        app.post(path, name="rerank", openapi_extra=request_body(RerankRequest), responses=error_responses())(rank)


def add_tokenizer_routes(app: FastAPI, serving: Serving) -> None:
    @app.post(
        "/tokenize",
        name="encode",
        openapi_extra=request_body(TokenizeRequest),
        response_model=Tokenized,
        responses=error_responses(),
    )
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or a conversation."""
        return await prompts.tokenize(serving, request)

    @app.post(
        "/detokenize",
        name="decode",
        openapi_extra=request_body(DetokenizeRequest),
        response_model=Detokenized,
        responses=error_responses(),
    )
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await prompts.detokenize(serving, request)

    @app.get("/tokenizer_info", name="info", responses=error_responses(400, 401, 404))
    async def tokenizer_info(request: Request, model: str | None = None) -> TokenizerInfo:
        """Vocabulary size, special tokens and chat template of a model."""
        return prompts.tokenizer_info(serving, request, model)


def add_status_routes(app: FastAPI, serving: Serving) -> None:
    @app.get("/health", name="healthy", responses={503: {"model": Health, "description": "an engine is down or hung"}})
    async def health(request: Request) -> Health:
        """Liveness: whether all engines run and advance."""
        state = health_of(serving, serving.has_valid_key(request))
        return health_response(state, state["status"] in ("ok", "draining"))

    not_ready: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "send requests elsewhere"}}

    @app.get("/ready", responses={**error_responses(404), **not_ready})
    async def ready(request: Request, model: str | None = None) -> Health:
        """Readiness: whether requests may be sent here, for all models or for one."""
        state, is_ready = health_of(serving, serving.has_valid_key(request)), serving.ready(model)
        if is_ready:
            state["status"] = "ok"
        elif state["status"] != "draining":
            state["status"] = "unhealthy"
        return health_response(state, is_ready)

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        """The playground: a page to try the models in a browser."""
        return Response(page().html, headers=dict(page().headers))

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus."""
        text, kind = render_metrics(serving, request.headers.get("accept"))
        return Response(text, headers={"content-type": kind})


MAX_PROFILE_STEPS, MAX_PROFILE_S = 1000, 60.0
MAX_PROFILE_BYTES = 4 * 2**30  # of all traces in --profile-dir


class ProfileLimits(BaseModel):
    """Query parameters of /start_profile: what ends the recording if /stop_profile does not."""

    steps: int = Field(MAX_PROFILE_STEPS, ge=1, le=MAX_PROFILE_STEPS)
    seconds: float = Field(MAX_PROFILE_S, gt=0, le=MAX_PROFILE_S)


class ProfileStarted(TypedDict):
    trace: str  # on the server's disk, when /stop_profile or a limit has ended it
    steps: int
    seconds: float


class ProfileTrace(TypedDict):
    trace: str  # all of it is written


def add_profile_routes(app: FastAPI, serving: Serving, folder: Path) -> None:
    """As vLLM names them. With `--profile-dir` alone: a profiled engine is slower for everybody."""

    def engine(request: Request, name: str | None) -> Backend:
        model, _ = serving.find(serving.authenticate(request), name)
        if isinstance(model, Upstream):
            raise APIError(400, "not_local", "only engines of this server can be profiled", "model")
        return model.backend

    @app.post("/start_profile", responses=error_responses(400, 401, 404, 429, 503))
    async def start_profile(request: Request, model: str | None = None) -> ProfileStarted:
        """Record the steps of an engine from now on, at most `steps` (1,000) of them and `seconds` (60)."""
        backend = engine(request, model)
        asked = {key: value for key, value in request.query_params.items() if key in ProfileLimits.model_fields}
        limits = ProfileLimits.model_validate(asked)
        check_profile_room(folder)
        trace = await backend.profile(ProfileRequest(folder, limits.steps, limits.seconds))
        return {"trace": str(trace), "steps": limits.steps, "seconds": limits.seconds}

    @app.post("/stop_profile", responses=error_responses(400, 401, 404, 429, 503))
    async def stop_profile(request: Request, model: str | None = None) -> ProfileTrace:
        """End it and write the trace, or say where the one is that ended at its limit."""
        return {"trace": str(await engine(request, model).profile(None))}


def check_profile_room(folder: Path) -> None:
    used = sum(file.stat().st_size for file in folder.glob("*.json.gz"))
    if used >= MAX_PROFILE_BYTES:
        raise APIError(
            503,
            "profile_dir_full",
            f"--profile-dir {folder}: its traces have {used / 2**30:.1f} GiB; below {MAX_PROFILE_BYTES / 2**30:g} GiB "
            "there is room for another",
        )


def health_response(state: Health, ok: bool) -> Any:
    return JSONResponse(state, 200 if ok else 503)


# --- state of the engines, for /health and /ready ---------------------------------------------------------


class EngineHealth(TypedDict):
    """One model. The numbers are those of the engine's last report, at most a second old while it works."""

    healthy: bool
    alive: bool
    ready: bool
    stalled_seconds: float
    restarts: int
    requests: int  # under way
    running: int  # sequences
    waiting: int
    kv_cache_usage: float
    prefix_cache_hit_rate: float
    generated_tokens: int


class Health(TypedDict):
    status: Literal["ok", "unhealthy", "draining"]
    models: dict[str, EngineHealth]


def health_of(serving: Serving, trusted: bool) -> Health:
    """Addresses of upstreams are shown only to requests with a valid key."""
    states = {model.backend.name: model.backend.state for model in serving.local_models}
    for number, upstream in enumerate(serving.upstreams, start=1):
        states[upstream.url if trusted else f"upstream-{number}"] = upstream.state
    healthy = all(state.healthy for state in states.values())
    status: Literal["ok", "unhealthy", "draining"] = (
        "draining" if serving.draining else "ok" if healthy else "unhealthy"
    )
    return {"status": status, "models": {name: engine_health(state) for name, state in states.items()}}


def engine_health(state: State) -> EngineHealth:
    metrics = state.metrics
    queries = metrics.get("prefix_cache_queries", 0)
    return {
        "healthy": state.healthy,
        "alive": state.alive,
        "ready": state.ready,
        "stalled_seconds": round(state.stalled, 3),
        "restarts": state.restarts,
        "requests": state.open,
        "running": metrics.get("num_requests_running", 0),
        "waiting": metrics.get("num_requests_waiting", 0),
        "kv_cache_usage": metrics.get("kv_cache_usage_perc", 0.0),
        "prefix_cache_hit_rate": metrics.get("prefix_cache_hits", 0) / queries if queries else 0.0,
        "generated_tokens": metrics.get("generation_tokens", 0),
    }


# --- the page at /: a playground for the models, and the state of their engines ---------------------------

SCRIPTS = ("page_engine.js", "page_markdown.js", "page.js")
# One response holds all of it. Its content security policy allows this script and style alone, by digest, and requests
# to this server alone.


@dataclass(frozen=True)
class Page:
    html: bytes
    headers: Mapping[str, str]


@cache
def page() -> Page:
    style, script = read_asset("page.css"), "".join(map(read_asset, SCRIPTS))
    html = read_asset("page.html").replace("/*style*/", style).replace("/*script*/", script)
    policy = {
        "default-src": "'none'",
        "script-src": csp_hash(script),
        "style-src": csp_hash(style),
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


def read_asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
