"""The FastAPI application: routes, and their OpenAPI schema (`/openapi.json`)."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from .. import __version__
from ..spec import LMWorksError
from . import prometheus, tokenize
from .chat import chat
from .completions import complete
from .errors import ErrorBody, error_response
from .health import Health, health
from .middleware import RequestMiddleware
from .openai_answers import ChatCompletion, Completion, Detokenized, ModelList, ModelObject, Tokenized, TokenizerInfo
from .openai_types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .page import page
from .serving import LocalModel, Model, Serving
from .tracing import Tracing

BODIES: tuple[type[BaseModel], ...] = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
REFUSED = {400: "cannot be served as it is", 401: "no key, or a wrong one", 404: "no such model"}
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
    async def completions(request: Request) -> Response:
        """Continue texts."""
        return await complete(serving, request)

    @app.post(
        "/v1/chat/completions",
        openapi_extra=request_body(ChatRequest),
        response_model=ChatCompletion,
        responses={200: {"content": streamed}, **error_responses(REFUSED, BUSY)},
    )
    async def chat_completions(request: Request) -> Response:
        """Answer in a conversation."""
        return await chat(serving, request)


def add_tokenizer_routes(app: FastAPI, serving: Serving) -> None:
    @app.post(
        "/tokenize",
        openapi_extra=request_body(TokenizeRequest),
        response_model=Tokenized,
        responses=error_responses(REFUSED, BUSY),
    )
    async def encode(request: Request) -> Response:
        """Token ids of a text or a conversation."""
        return await tokenize.tokenize(serving, request)

    @app.post(
        "/detokenize",
        openapi_extra=request_body(DetokenizeRequest),
        response_model=Detokenized,
        responses=error_responses(REFUSED, BUSY),
    )
    async def decode(request: Request) -> Response:
        """The text of token ids."""
        return await tokenize.detokenize(serving, request)

    @app.get("/tokenizer_info", responses=error_responses(REFUSED))
    async def info(request: Request, model: str | None = None) -> TokenizerInfo:
        """What a client must know to make prompts itself."""
        return tokenize.tokenizer_info(serving, request, model)


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
        return Response(prometheus.render_metrics(serving), media_type=prometheus.CONTENT_TYPE)


def not_ready(state: Health) -> Literal["draining", "unhealthy"]:
    return "draining" if state["status"] == "draining" else "unhealthy"


def health_response(state: Health, well: bool) -> Any:
    return JSONResponse(state, 200 if well else 503)
