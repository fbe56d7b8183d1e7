"""Where the events of one request wait for whoever asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from .backend import Ask, BackendError, Event, Kind


@dataclass(eq=False)
class Box:
    """Events of one request, until its consumer takes them."""

    ask: Ask
    events: list[Event] = field(default_factory=list)
    error: BackendError | None = None
    started: bool = False
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def put(self, event: Event) -> None:
        """A consumer that lags behind gets fewer, larger events."""
        if self.error is not None:
            return  # its time is over
        last = self.events[-1] if self.events else None
        if last is not None and last.index == event.index and last.finish_reason is None:
            self.events[-1] = joined(last, event)
        else:
            self.events.append(event)
        self.started = True
        self.filled.set()

    def fail(self, kind: Kind, message: str, retry_after: float | None = None) -> None:
        self.error = BackendError(kind, message, retry_after, self.started)
        self.filled.set()

    async def take(self) -> list[Event]:
        await self.filled.wait()
        self.filled.clear()
        events, self.events = self.events, []
        if not events and self.error is not None:
            raise self.error
        if self.error is not None:
            self.filled.set()  # raised when these are read
        return events


def joined(first: Event, then: Event) -> Event:
    logprobs = None if then.logprobs is None else [*(first.logprobs or ()), *then.logprobs]
    return replace(then, tokens=first.tokens + then.tokens, text=first.text + then.text, logprobs=logprobs)
