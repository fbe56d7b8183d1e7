"""The queue of events between an engine and the consumer of one request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from .backend import BackendError, EngineRequest, Event, Kind


@dataclass(eq=False)
class EventQueue:
    """Events of one request that its consumer has not read yet, or the error that ended it."""

    request: EngineRequest
    events: list[Event] = field(default_factory=list)
    error: BackendError | None = None
    started: bool = False
    not_empty: asyncio.Event = field(default_factory=asyncio.Event)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def put(self, event: Event) -> None:
        """Consecutive events of one answer are merged: a slow consumer gets fewer, larger ones."""
        if self.error is not None:
            return  # the request has failed
        last = self.events[-1] if self.events else None
        if last is not None and last.index == event.index and last.finish_reason is None:
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
