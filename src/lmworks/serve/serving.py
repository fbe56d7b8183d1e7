"""State shared by all routes: models (local ones, and those of upstream servers), authentication, limits, draining."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import httpx
from prometheus_client import Metric
from starlette.requests import Request

from ..data.chat_template import Chat
from ..engine.core.request import MAX_PRIORITY
from ..engine.core.sampling_params import SamplingParams
from ..spec import SpecError
from ..spec.errors import did_you_mean
from .backend import Backend, ModelCard, State
from .cache_events import PROMPT_BLOCKS
from .keys import Config, Settings, sent_key
from .limits import Admission, APIError, KeyLimits, Limits, RateLimiter, RequestMeter, Size, check_model
from .metrics import HTTPMetrics
from .parsers.names import ParserNames
from .parsers.registry import choose
from .protocols.responses.store import ResponseStore
from .registration import Registration
from .response_bodies import TokenTexts
from .telemetry import LogFields, log, log_fields_of
from .tls import Certificates
from .workers import PromptProcessor, WorkerPool

if TYPE_CHECKING:
    from .batches.service import BatchService

POLL_S = 5.0  # between two polls of its models
CONNECT_S = 5.0


class Upstream:
    """Another OpenAI-compatible server behind this one. Its models are polled: it may start later or go down."""

    def __init__(self, url: str, api_key: str | None = None, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`url` ends in /v1, as clients know it. `api_key` is sent to it: keys of our clients are not forwarded."""
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")) or not urlsplit(self.url).hostname:
            raise SpecError(f"--upstream {url!r} is not an address, e.g. http://host:8000/v1")
        if "@" in self.url or "?" in self.url:
            raise SpecError(
                "--upstream: the address is shown in /health and in logs: set a key as LMWORKS_UPSTREAM_KEY"
            )
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # No proxy and no .netrc from the environment.
        self.client = httpx.AsyncClient(headers=headers, limits=limits, trust_env=False, transport=transport)
        self.cards: list[ModelCard] = []
        self.up = False
        self.open = 0  # requests under way
        self.last_error: str | None = None
        self.poller: asyncio.Task[None] | None = None

    @property
    def state(self) -> State:
        return State(alive=self.up, ready=self.up and bool(self.cards), open=self.open, last_error=self.last_error)

    def card(self, name: str) -> ModelCard:
        """The card of a model that is gone has only its name."""
        return next((card for card in self.cards if card.id == name), ModelCard(name, 0, 0, 0))

    async def start(self) -> None:
        await self.refresh_models()
        self.poller = asyncio.create_task(self.poll(), name=f"poll {self.url}")

    async def poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self.refresh_models()

    async def refresh_models(self) -> None:
        """Lists its models; the last list stays while it does not answer."""
        try:
            answer = await self.client.get(f"{self.url}/models", timeout=CONNECT_S)
            answer.raise_for_status()
            self.cards = [card_of(one) for one in answer.json()["data"]]
            self.up, self.last_error = True, None
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            self.mark_down(error)

    def mark_down(self, error: Exception) -> None:
        """It is tried last, until it answers again."""
        reason = f"{type(error).__name__}: {error}"
        if self.last_error is None:
            log.warning("upstream does not answer", extra={"upstream": self.url, "reason": reason})
        self.up, self.last_error = False, reason

    async def close(self) -> None:
        if self.poller is not None:
            self.poller.cancel()
            with suppress(asyncio.CancelledError):
                await self.poller
        await self.client.aclose()


def card_of(model: dict[str, Any]) -> ModelCard:
    """vLLM reports the context length; others do not (0)."""
    context = model.get("max_model_len")
    return ModelCard(
        str(model["id"]),
        int(model.get("created") or time.time()),
        context if isinstance(context, int) else 0,
        0,
        str(model.get("owned_by") or "upstream"),
    )


# --- the state of the API -------------------------------------------------------------------------------


STORED_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
ANSWER_HEADERS = "lmworks.answer_headers"  # in a request's scope
METER = "lmworks.meter"  # in a request's scope: released when its response has been sent
BATCH_KEY = "lmworks.batch_key"  # in the scope of a batch's line: the name of the key that it is charged to


@dataclass(frozen=True)
class Caller:
    """The key of a request and its limits, as they were when the request arrived."""

    key: KeyLimits
    config: Config
    log_fields: LogFields  # what is logged of this request
    meter: RequestMeter  # what it is charged by
    share: str = ""  # key, or without keys the address: fairness is between these
    answer_headers: dict[str, str] = field(default_factory=dict)  # that its answer gets
    wants_prompt_blocks: bool = False  # see `cache_events`

    @property
    def limits(self) -> Limits:
        return self.config.limits

    def check_gateway(self, what: str) -> None:
        """Raises APIError for a key that is not a gateway's."""
        if self.config.keys and not self.key.gateway:
            raise APIError(403, "gateway_only", f"{what} for keys with gateway = true in the config")

    @property
    def tenant(self) -> str:
        """Whose responses, files and batches it sees. Without keys everybody is one tenant."""
        return self.key.tenant or self.key.name


@dataclass
class LocalModel:
    """A model with an engine of our own, and what is computed from its tokenizer once."""

    backend: Backend

    @cached_property
    def processor(self) -> PromptProcessor:
        return PromptProcessor(self.backend.name, self.backend.prompt_tokenizer)

    @cached_property
    def stored_pooling(self) -> str:
        """As sentence-transformers describes it in the model's folder; else the last token's state, as in vLLM."""
        folder = self.backend.prompt_tokenizer.folder
        found = folder / "1_Pooling" / "config.json" if folder is not None else None
        if found is None or not found.is_file():
            return "last"
        described = json.loads(found.read_text(encoding="utf-8"))
        for name, pooling in (("pooling_mode_lasttoken", "last"), ("pooling_mode_mean_tokens", "mean")):
            if described.get(name) is True:
                return pooling
        raise APIError(400, "not_supported", f"{found.parent.name}: neither the last token nor the mean: set --pooling")

    @cached_property
    def stored_sampling(self) -> dict[str, float]:
        """Sampling parameters of the folder's generation_config.json, as vLLM reads them."""
        folder = self.backend.prompt_tokenizer.folder
        found = folder / "generation_config.json" if folder is not None else None
        if found is None or not found.is_file():
            return {}
        try:
            described = json.loads(found.read_text(encoding="utf-8"))
            stored = {name: described[name] for name in STORED_SAMPLING if described.get(name) is not None}
            SamplingParams(**stored)
        except (ValueError, AttributeError, SpecError) as error:
            raise SpecError(f"{found.name} of the model: {error}; --generation-config none leaves it aside") from None
        return stored

    @property
    def chat(self) -> Chat:
        return self.processor.chat

    @cached_property
    def parsers(self) -> ParserNames:
        """Of its answers."""
        prompt_tokenizer = self.processor.prompt_tokenizer
        return choose(prompt_tokenizer.template_source(), prompt_tokenizer.parsers)

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.backend.prompt_tokenizer.tokenizer)


Model = LocalModel | Upstream


class EngineHostLink(Protocol):
    """Limits that are counted by the engine host, in another process."""

    other_metrics: list[Metric]  # what other API processes counted

    def meter(self, key: KeyLimits) -> RequestMeter: ...

    async def admit(
        self, meter: RequestMeter, limits: Limits, card: ModelCard, params: SamplingParams, size: Size
    ) -> Admission: ...

    async def stored_responses(self, method: str, *arguments: Any) -> Any: ...


@dataclass
class Serving:
    """The models behind the API, and the state of the API itself."""

    settings: Settings
    local_models: list[LocalModel]
    upstreams: list[Upstream] = field(default_factory=list)
    http_metrics: HTTPMetrics = field(default_factory=HTTPMetrics)
    rate_limiter: RateLimiter = field(default_factory=RateLimiter)
    workers: WorkerPool = field(default_factory=WorkerPool)
    draining: bool = False
    responses: ResponseStore = field(default_factory=ResponseStore)  # with several API processes: the engine host's
    engine_host: EngineHostLink | None = None  # with several API processes: where the limits are counted
    pooling: str | None = None  # last, mean: of /v1/embeddings; None: as each model's folder says
    generation_config: bool = True  # whether requests without sampling parameters take those of the model's folder
    adapter_root: Path | None = None  # adapters below it can be loaded; None: none can
    batches: BatchService | None = None  # files and batches of --batch-dir; None: there are none
    certificates: Certificates | None = None  # None: plain HTTP
    registration: Registration | None = None  # at gateways
    profile_dir: Path | None = None  # where /start_profile and /stop_profile write; None: there are no such routes

    def check_files(self) -> None:
        """Reads files that have changed: keys and limits, certificates."""
        self.settings.check_files()
        if self.certificates is not None:
            self.certificates.check_files()

    def sampling_defaults(self, local: LocalModel) -> dict[str, float]:
        return local.stored_sampling if self.generation_config else {}

    async def admit(
        self, meter: RequestMeter, limits: Limits, card: ModelCard, params: SamplingParams, size: Size
    ) -> Admission:
        """Checks the limits; raises APIError."""
        if self.engine_host is None:
            return self.rate_limiter.admit(meter, limits, card, params, size)
        return await self.engine_host.admit(meter, limits, card, params, size)

    async def stored_responses(self, method: str, *arguments: Any) -> Any:
        """Calls a method of ResponseStore, where the responses are."""
        if self.engine_host is None:
            return getattr(self.responses, method)(*arguments)
        return await self.engine_host.stored_responses(method, *arguments)

    def authenticate(self, request: Request) -> Caller:
        """Before the body is read; raises APIError."""
        config, batch_key = self.settings.current(), request.scope.get(BATCH_KEY)
        if batch_key is None:
            key = config.authenticate(sent_key(request.headers))
        else:
            key = config.named(batch_key).with_derived("priority", MAX_PRIORITY)
        log_fields = log_fields_of(request.scope)
        log_fields["key"] = key.name
        if self.draining:
            raise APIError(503, "shutting_down", "the server is shutting down", retry_after=1)
        meter = request.scope[METER] = (
            RequestMeter(self.rate_limiter, key, batch_key is not None)
            if self.engine_host is None
            else self.engine_host.meter(key)
        )
        address = request.client.host if request.client else ""
        share = key.name if config.keys else address
        headers = request.scope.setdefault(ANSWER_HEADERS, {})
        return Caller(key, config, log_fields, meter, share, headers, PROMPT_BLOCKS in request.headers)

    def has_valid_key(self, request: Request) -> bool:
        """Whether it has a valid key."""
        shown = sent_key(request.headers)
        config = self.settings.current()
        try:
            return bool(config.keys and shown and config.authenticate(shown))
        except APIError:
            return False

    def find(self, caller: Caller, name: str | None) -> tuple[Model, str | None]:
        """The model of this name, and the adapter where the name is one's. No name: the only model there is."""
        visible = self.visible(caller)
        if name is None:
            if len(visible) != 1:
                raise APIError(400, "model_needed", f"name a model: {names_listed(visible)}", "model")
            name = next(iter(visible))
        check_model(caller.key, name)
        if name not in visible:
            hint = did_you_mean(name, visible) or f"; available: {names_listed(visible)}"
            raise APIError(404, "model_not_found", f"the model {name[:80]!r} is not served{hint}", "model")
        caller.log_fields["model"] = name
        return visible[name]

    def visible(self, caller: Caller) -> dict[str, tuple[Model, str | None]]:
        """Models and adapters that this caller may use, by name."""
        return self.visible_to(caller.key)

    def visible_to(self, key: KeyLimits) -> dict[str, tuple[Model, str | None]]:
        return {name: one for name, one in self.models().items() if not key.models or name in key.models}

    def models(self) -> dict[str, tuple[Model, str | None]]:
        """All models and adapters, by name; of two with one name, ours."""
        found: dict[str, tuple[Model, str | None]] = {}
        for upstream in self.upstreams:
            found |= {card.id: (upstream, None) for card in upstream.cards}
        for model in self.local_models:
            card = model.backend.card
            found |= {card.id: (model, None), **{adapter: (model, adapter) for adapter in card.adapters}}
        return found

    def upstreams_of(self, name: str) -> list[Upstream]:
        """Upstreams that serve a model: first those that are up, with the fewest open requests."""
        having = [one for one in self.upstreams if any(card.id == name for card in one.cards)]
        return sorted(having, key=lambda one: (not one.up, one.open))

    def ready(self, model: str | None = None) -> bool:
        """Whether every model (or this one) has a healthy engine or upstream."""
        served: dict[str, bool] = {}
        for upstream in self.upstreams:
            for card in upstream.cards:
                served[card.id] = served.get(card.id, False) or upstream.state.healthy
        for local in self.local_models:
            card, state = local.backend.card, local.backend.state
            served |= dict.fromkeys((card.id, *card.adapters), state.healthy and not state.asleep)
        if model is not None and model not in served and not self.draining:
            raise APIError(404, "model_not_found", f"the model {model[:80]!r} is not served", "model")
        wanted = served.values() if model is None else [served.get(model, False)]
        return not self.draining and bool(served) and all(wanted)

    async def start(self) -> None:
        await asyncio.gather(
            *(model.backend.start() for model in self.local_models), *(one.start() for one in self.upstreams)
        )
        for model in self.local_models:
            found = {"tool_parser": model.parsers.tool, "reasoning_parser": model.parsers.reasoning}
            log.info("parsers of answers", extra={"model": model.backend.name, **found})
        if self.registration is not None:
            self.registration.start()

    async def drain(self, seconds: float) -> int:
        """Takes no more requests; returns how many were cut off."""
        self.draining = True
        if self.registration is not None:
            await self.registration.leave()
        return sum(await asyncio.gather(*(model.backend.drain(seconds) for model in self.local_models)))

    async def close(self) -> None:
        if self.registration is not None:
            await self.registration.leave()
        if self.batches is not None:
            await self.batches.close()
        await asyncio.gather(
            *(model.backend.close() for model in self.local_models), *(one.close() for one in self.upstreams)
        )
        self.workers.close()


def names_listed(names: dict[str, tuple[Model, str | None]]) -> str:
    return ", ".join(sorted(names)) or "none at the moment"
