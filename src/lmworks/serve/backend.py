"""The interface between the API and an engine: requests in, events out, wherever the engine runs.

    async with aclosing(backend.stream(request)) as events:
        async for event in events:
            ...

Leaving that block early cancels the request. What ends a request as a whole (rejected, busy, engine lost) is raised as
BackendError, at any time; an error of one answer alone is that answer's last event, with finish_reason "error".

The queue of events between an engine and the consumer of one request.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from ..data.chat_template import (
    Chat,
    EncodeSpecial,
    find_template,
    read_config,
    template_folder,
    with_special_tokens,
)
from ..data.fim import Sentinels
from ..data.tokenizer import FileTokenizer, Tokenizer
from ..engine.core.request import Logprob
from ..engine.core.sampling_params import SamplingParams
from ..spec import LMWorksError, SpecError
from .cache_events import CacheChange
from .parsers.names import ParserNames

Kind = Literal["busy", "dead", "timeout", "refused"]


class BackendError(LMWorksError):
    """Why a request failed.

    refused: invalid (400). busy: no capacity now (429). timeout: queued or ran too long (503, or 504 once `started`).
    dead: the engine is down or was lost (503; 500 once `started`).
    """

    def __init__(self, kind: Kind, message: str, retry_after: float | None = None, started: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after  # seconds; None: a retry would fail too
        self.started = started  # the engine had begun to compute it


@dataclass(frozen=True)
class ProfileRequest:
    """A trace into `folder`, which ends by itself after so many steps or seconds."""

    folder: Path
    steps: int
    seconds: float


@dataclass(frozen=True)
class EngineRequest:
    """One prompt with its sampling parameters. Smaller priorities first; prefixes are shared within a tenant."""

    prompt: Sequence[int]
    params: SamplingParams
    priority: int = 0
    tenant: str = ""
    generated: tuple[list[int], ...] = ()  # of each answer that another server began: its tokens so far
    stream: bool = True  # events as tokens come; False: one event for each answer, at its end
    share: str = ""  # key or address: grammar compilation is fair between them
    compile_seconds: float = 0.0  # timeout of its grammar's compilation, waiting included (0: none)
    queue_seconds: float = 0.0  # timeout in the queue, once its grammar is compiled (0: none)
    request_seconds: float = 0.0  # timeout of the whole request (0: none)
    pooling: str | None = None  # last, mean: the prompt as a vector, beside the answer; score: by the scalar head
    kv_remote: str | None = None  # a server that has computed the prompt: one of engine.kv_peers
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class Usage:
    """Token counts and times of a request, in seconds since it reached the engine."""

    prompt_tokens: int
    completion_tokens: int  # of all answers that were made
    cached_tokens: int  # of the prompt, found in the prefix cache
    queue: float = 0.0  # until it was scheduled
    first_token: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class Event:
    """New output of one sequence since its last event: tokens, text, end."""

    index: int  # which of the answers, below params.n
    tokens: list[int]
    text: str = ""  # may lag behind the tokens: half a character, the beginning of a stop string
    logprobs: list[Logprob] | None = None  # one a token, where asked for
    finish_reason: str | None = None  # stop, length, cancelled or error: the answer's last event
    stop_reason: str | int | None = None  # the string or token that ended it
    error: str | None = None  # with finish_reason "error": what it was
    final: Usage | None = None  # the request's last event
    prompt_logprobs: list[Logprob | None] | None = None  # with `final`, where asked for; the first is None
    embedding: bytes | None = None  # with `final` and pooling: of float32, not normalised
    replayed: bool = False  # these tokens came with the request: the client has them


@dataclass(frozen=True)
class TransferSettings:
    """What two servers must have in common for one to take the other's blocks, and where they find each other."""

    fingerprint: str  # of the weights and of the layout of blocks, as hex
    block: int  # engine.block, and so on
    dtype: str
    kv_dtype: str
    context: int
    listen: str  # where it hands out blocks; empty: nowhere
    peers: tuple[str, ...]  # whose blocks it takes
    tp: int = 1  # servers that do not say so had no tiers with more ranks


@dataclass(frozen=True)
class ModelCard:
    """What /v1/models reports of a model, and what the limits need."""

    id: str
    created: int  # seconds since 1970
    context: int  # longest sequence, prompt and answer together
    vocab: int  # token ids are below it
    owned_by: str = "lmworks"
    adapters: tuple[str, ...] = ()  # names that SamplingParams.adapter may have
    max_seqs: int = 0  # answers that are computed at once
    hidden: int = 0  # numbers of a vector of /v1/embeddings
    scalar_head: bool = False  # a reward model or reranker: it scores, and generates nothing
    block_size: int = 0  # tokens of a block of the prefix cache; 0: there is none
    eos: tuple[int, ...] = ()  # tokens that end an answer
    transfer: TransferSettings | None = None  # None: its blocks do not leave the engine


@dataclass(frozen=True)
class State:
    """Health of a backend at one moment."""

    alive: bool  # its process runs
    ready: bool  # it takes requests
    open: int = 0  # requests under way
    stalled: float = 0.0  # seconds since it last advanced, while it has work; 0: it advances, or has none
    stuck: bool = False  # stalled for longer than the limit: it hangs
    restarts: int = 0
    ooms: int = 0  # of these: the process had run out of memory
    last_error: str | None = None
    draining: bool = False
    asleep: bool = False  # without a KV cache: requests are refused until it wakes
    adapters: tuple[str, ...] | None = None  # names, where they are known
    # Engine.metrics, at most a second old while there is work: numbers by their names; `finished` by reason;
    # histograms as {"counts": [...], "count": n, "total": x} with the upper edges of `observability.catalog`.
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        return self.alive and self.ready and not self.stuck


@dataclass(frozen=True)
class PromptTokenizer:
    """Tokenizer and chat template of a model, on the API's side."""

    tokenizer: Tokenizer | None
    begin_of_text: bool = False  # prompts begin with the special tokens that `transformers` adds (Hugging Face folders)
    folder: Path | None = None  # of the model: may hold a chat template
    chat_template: str | None = None  # to use instead of the folder's
    sentinels: Sentinels | None = None  # of infilling, where the model knows any
    parsers: ParserNames = ParserNames()  # of its answers, where they were named

    def encode(self, text: str, add_special_tokens: bool | None = None, parse_special: bool = False) -> list[int]:
        """Token ids of a prompt. Names of special tokens are text, unless `parse_special`."""
        tokenizer = self.require_tokenizer()
        add = self.begin_of_text if add_special_tokens is None else add_special_tokens
        if parse_special:
            return self.encode_special(text, add)
        if isinstance(tokenizer, FileTokenizer):
            ids: list[int] = tokenizer.inner.encode(text, add_special_tokens=add).ids
            return ids
        return tokenizer.encode(text)

    def encode_pair(self, first: str, second: str, add_special_tokens: bool | None = None) -> list[int]:
        """Two texts as one prompt, as `transformers` has a `text_pair`."""
        tokenizer = self.require_tokenizer()
        if not isinstance(tokenizer, FileTokenizer):
            return [*self.encode(first, add_special_tokens), *self.encode(second, False)]
        add = self.begin_of_text if add_special_tokens is None else add_special_tokens
        ids: list[int] = tokenizer.inner.encode(first, second, add_special_tokens=add).ids
        return ids

    @cached_property
    def encode_special(self) -> EncodeSpecial:
        return with_special_tokens(self.require_tokenizer())

    def decode(self, ids: list[int]) -> str:
        return self.require_tokenizer().decode(ids)

    def chat(self) -> Chat:
        """The chat template, compiled: keep it."""
        return Chat.of(self.folder, self.require_tokenizer(), self.encode, self.chat_template)

    def template_source(self) -> str | None:
        folder = template_folder(self.folder) if self.folder else None
        return self.chat_template or (find_template(folder, read_config(folder)) if folder else None)

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise SpecError("this model has no tokenizer: give prompts as lists of token ids")
        return self.tokenizer


class Backend(Protocol):
    """`card` and `prompt_tokenizer` are available once `start` has returned."""

    @property
    def name(self) -> str: ...
    @property
    def card(self) -> ModelCard: ...
    @property
    def prompt_tokenizer(self) -> PromptTokenizer: ...
    @property
    def state(self) -> State: ...

    async def start(self) -> None:
        """Returns when the engine is ready; raises LMWorksError where it cannot be."""
        ...

    def stream(self, request: EngineRequest) -> AsyncGenerator[Event, None]:
        """Nothing is sent before the first event is awaited. An async generator: close it (`aclosing`)."""
        ...

    async def profile(self, wanted: ProfileRequest | None) -> Path:
        """Record a profiler trace of the engine's steps, or (None) end it; returns the trace's path."""
        ...

    async def control(self, action: str, *arguments: Any) -> None:
        """An operation of `serve.admin` between two steps; raises APIError where it is refused."""
        ...

    def follow_cache(self) -> AsyncGenerator[CacheChange, None]:
        """Of the prefix cache: a snapshot, then every change."""
        ...

    async def drain(self, seconds: float) -> int:
        """Takes no more requests; waits for open ones, at most so many seconds; returns how many were cut off."""
        ...

    async def close(self) -> None: ...


# --- event queue -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class EventQueue:
    """Events of one request that its consumer has not read yet, or the error that ended it."""

    request: EngineRequest
    events: list[Event] = field(default_factory=list)
    error: BackendError | None = None
    started: bool = False
    not_empty: asyncio.Event = field(default_factory=asyncio.Event)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    begun: defaultdict[int, bool] = field(default_factory=lambda: defaultdict(bool))  # by answer

    def put(self, event: Event) -> None:
        """Consecutive events of one answer are merged: a slow consumer gets fewer, larger ones."""
        if self.error is not None:
            return  # the request has failed
        if not self.begun[event.index]:
            self.begun[event.index] = True
            event = replace(event, replayed=any(self.request.generated[event.index : event.index + 1]))
        last = self.events[-1] if self.events else None
        same = last is not None and last.index == event.index and not last.replayed
        if last is not None and same and last.finish_reason is None:
            self.events[-1] = merge_events(last, event)
        else:
            self.events.append(event)
        self.started = True
        self.not_empty.set()

    def fail(self, kind: Kind, message: str, retry_after: float | None = None) -> None:
        self.error = BackendError(kind, message, retry_after, self.started)
        self.not_empty.set()

    async def get(self) -> list[Event]:
        await self.not_empty.wait()
        self.not_empty.clear()
        events, self.events = self.events, []
        if not events and self.error is not None:
            raise self.error
        if self.error is not None:
            self.not_empty.set()  # raised when these are read
        return events


def merge_events(first: Event, then: Event) -> Event:
    logprobs = None if then.logprobs is None else [*(first.logprobs or ()), *then.logprobs]
    return replace(then, tokens=first.tokens + then.tokens, text=first.text + then.text, logprobs=logprobs)
