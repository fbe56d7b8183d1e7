"""The API: its routes, and the document that describes them (`/openapi.json`)."""

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
from .errors import ErrorBody, response_of
from .health import Health, health
from .middleware import Door
from .openai_answers import ChatCompletion, Completion, Detokenized, ModelList, ModelObject, Tokenized, TokenizerInfo
from .openai_types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .page import page
from .serving import Local, Model, Serving
from .tracing import Tracing

BODIES: tuple[type[BaseModel], ...] = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
REFUSED = {400: "cannot be served as it is", 401: "no key, or a wrong one", 404: "no such model"}
LONGEST_PATH = 80  # letters of a path that is compared with others, and repeated
BUSY = {429: "too much at once: see retry-after", 503: "not now: see retry-after"}


def make_app(
    serving: Serving, origins: Sequence[str] = (), tracing: Tracing | None = None, local: bool = False
) -> FastAPI:
    """For models that have been started. `origins`: pages of other sites that may call it (CORS).

    `local`: it listens on this machine alone; without keys it then refuses what a foreign page could send.
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
    app.add_middleware(Door, serving=serving, tracing=tracing, local=local, origins=tuple(origins))
    for kind in (HTTPException, LMWorksError, ValidationError):
        app.add_exception_handler(kind, told)
    add_models(app, serving)
    add_answers(app, serving)
    add_tokens(app, serving)
    add_state(app, serving)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    return app


async def told(request: Request, error: Exception) -> Response:
    """What is wrong with a request. What is wrong with us, the door tells."""
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        error.detail = not_there(request)
    return response_of(error)


def not_there(request: Request) -> str:
    """Which endpoints there are, and which of them was probably meant."""
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


def errors(*tables: dict[int, str]) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorBody, "description": what} for table in tables for status, what in table.items()}


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """The body is read by us, within limits; the document names it."""
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def document(app: FastAPI) -> dict[str, Any]:
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


def add_models(app: FastAPI, serving: Serving) -> None:
    @app.get("/v1/models", responses=errors({401: REFUSED[401], 503: BUSY[503]}))
    async def models(request: Request) -> ModelList:
        """Models that this key may use."""
        caller = serving.admit(request)
        return {"object": "list", "data": [described(name, *one) for name, one in serving.visible(caller).items()]}

    @app.get("/v1/models/{model:path}", responses=errors({401: REFUSED[401], 404: REFUSED[404], 503: BUSY[503]}))
    async def model(request: Request, model: str) -> ModelObject:
        """One of them."""
        caller = serving.admit(request)
        return described(model, *serving.find(caller, model))


def described(name: str, model: Model, adapter: str | None) -> ModelObject:
    card = model.backend.card if isinstance(model, Local) else model.card(name)
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "max_model_len": card.context or None,
        "parent": card.id if adapter is not None else None,
    }


def add_answers(app: FastAPI, serving: Serving) -> None:
    streamed: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}

    @app.post(
        "/v1/completions",
        openapi_extra=takes(CompletionRequest),
        response_model=Completion,
        responses={200: {"content": streamed}, **errors(REFUSED, BUSY)},
    )
    async def completions(request: Request) -> Response:
        """Continue texts."""
        return await complete(serving, request)

    @app.post(
        "/v1/chat/completions",
        openapi_extra=takes(ChatRequest),
        response_model=ChatCompletion,
        responses={200: {"content": streamed}, **errors(REFUSED, BUSY)},
    )
    async def chat_completions(request: Request) -> Response:
        """Answer in a conversation."""
        return await chat(serving, request)


def add_tokens(app: FastAPI, serving: Serving) -> None:
    @app.post(
        "/tokenize", openapi_extra=takes(TokenizeRequest), response_model=Tokenized, responses=errors(REFUSED, BUSY)
    )
    async def encode(request: Request) -> Response:
        """Token ids of a text or a conversation."""
        return await tokenize.tokenize(serving, request)

    @app.post(
        "/detokenize",
        openapi_extra=takes(DetokenizeRequest),
        response_model=Detokenized,
        responses=errors(REFUSED, BUSY),
    )
    async def decode(request: Request) -> Response:
        """The text of token ids."""
        return await tokenize.detokenize(serving, request)

    @app.get("/tokenizer_info", responses=errors(REFUSED))
    async def info(request: Request, model: str | None = None) -> TokenizerInfo:
        """What a client must know to make prompts itself."""
        return tokenize.tokenizer_info(serving, request, model)


def add_state(app: FastAPI, serving: Serving) -> None:
    @app.get("/health", responses={503: {"model": Health, "description": "an engine is down, or hangs"}})
    async def healthy(request: Request) -> Health:
        """Whether all engines run and advance."""
        state = health(serving, serving.trusts(request))
        return answered(state, state["status"] in ("ok", "draining"))

    elsewhere: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "send requests elsewhere"}}

    @app.get("/ready", responses={**errors({404: "no such model"}), **elsewhere})
    async def ready(request: Request, model: str | None = None) -> Health:
        """Whether requests may be sent here: for each model, or for one of them."""
        state, well = health(serving, serving.trusts(request)), serving.ready(model)
        return answered({**state, "status": "ok" if well else not_ready(state)}, well)

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        """To try the models, in a browser."""
        return Response(page().html, headers=dict(page().headers))

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(prometheus.written(serving), media_type=prometheus.CONTENT_TYPE)


def not_ready(state: Health) -> Literal["draining", "unhealthy"]:
    return "draining" if state["status"] == "draining" else "unhealthy"


def answered(state: Health, well: bool) -> Any:
    return JSONResponse(state, 200 if well else 503)
