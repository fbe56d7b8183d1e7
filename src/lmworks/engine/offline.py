"""Offline inference: the caller's thread steps the engine, for a batch of prompts or one stream."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ..spec import LMWorksError
from .core.engine import DRIVEN, Engine
from .core.model_runner import ModelRunner
from .core.request import OutputDelta, Request, Result, ResultCallback, ignore_result
from .core.sampling_params import SamplingParams
from .quantization.drift import DriftMonitor

Advance = Callable[[Sequence[Result]], None]

CLOSED = "this LLM was closed: make another one"


class OfflineEngine:
    """Steps the engine while a caller waits for output. Several streams and threads may wait at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.closed = False
        self.queue_lock, self.lock = threading.Lock(), threading.Lock()
        self.thread_state = threading.local()  # `inside`: whether this thread holds or awaits the lock
        self.queues: dict[int, list[OutputDelta]] = {}  # unread deltas by request
        self.to_cancel: list[int] = []  # requests to cancel before the next step

    @property
    def context(self) -> int:
        return self.engine.spec.context

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        progress: bool,
        on_result: ResultCallback = ignore_result,
    ) -> list[Result]:
        """Results in order. An interrupt (Ctrl-C) cancels all requests that have not finished."""
        requests = [Request(prompt, sampling_params) for prompt, sampling_params in zip(prompts, params, strict=True)]
        places = {request.id: place for place, request in enumerate(requests)}
        results: dict[int, Result] = {}
        queue: list[OutputDelta] = []

        def take() -> list[Result]:
            """One by one: where `on_result` is interrupted, the others are still in the queue."""
            done = []
            while queue:
                delta = queue.pop(0)
                if delta.result is not None:
                    results[delta.request.id] = delta.result
                    on_result(places[delta.request.id], delta.result)
                    done.append(delta.result)
            return done

        try:
            for request in requests:
                self.add(request, queue)
            with progress_bar(len(requests), progress) as advance:
                while len(results) < len(requests):
                    self.step(queue)
                    advance(take())
        finally:
            with defer_interrupts():  # also a second Ctrl-C
                try:
                    take()  # output of the interrupted step
                finally:
                    for request in requests:
                        self.remove(request, request.id in results)
        return [results[request.id] for request in requests]

    def stream(self, prompt: list[int], params: SamplingParams) -> Generator[OutputDelta, None, None]:
        """Deltas as they come; the last one carries the result. Closing the generator cancels the request."""
        request = Request(prompt, params, stream=True)
        queue: list[OutputDelta] = []
        finished = False
        try:
            self.add(request, queue)
            while not finished:
                self.step(queue)
                for _ in range(len(queue)):
                    delta = queue.pop(0)
                    finished = delta.result is not None
                    yield delta
        finally:
            self.remove(request, finished)

    def add(self, request: Request, queue: list[OutputDelta]) -> None:
        with self.exclusive():
            self.queues[request.id] = queue
            self.engine.add(request)

    def step(self, queue: list[OutputDelta]) -> None:
        """One step, unless another thread's step has produced output already."""
        with self.exclusive():
            if not queue:
                while self.to_cancel:
                    self.engine.cancel(self.to_cancel.pop())
                for delta in self.engine.step():
                    if delta.request.id in self.queues:
                        self.queues[delta.request.id].append(delta)

    def remove(self, request: Request, finished: bool) -> None:
        """Remove a request, which may not have been added yet or whose engine may be closed.

        A garbage-collected stream is closed at any point of this thread, even inside a step.
        """
        if getattr(self.thread_state, "inside", False):
            self.queues.pop(request.id, None)
            self.to_cancel += [] if finished else [request.id]
            return
        with suppress(LMWorksError), self.exclusive():  # closed: nothing to cancel
            self.queues.pop(request.id, None)
            if not finished:
                self.engine.cancel(request.id)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclusive use of the engine: no other thread and no Ctrl-C interferes.

        Threads queue on `queue_lock`, so that the thread that has just released the lock does not get it again first.
        """
        with defer_interrupts():
            self.thread_state.inside = True
            try:
                with self.queue_lock:
                    self.lock.acquire()
                try:
                    if self.closed:
                        raise LMWorksError(CLOSED)
                    if self.engine.driver is not None:
                        raise LMWorksError(f"the engine cannot be used here: {DRIVEN}")
                    yield
                finally:
                    self.lock.release()
            finally:
                self.thread_state.inside = False

    def add_adapter(self, name: str, folder: Path) -> None:
        with self.exclusive():
            self.engine.add_adapter(name, folder)

    def watch_drift(self, folder: Path) -> DriftMonitor:
        with self.exclusive():
            assert isinstance(self.engine.runner, ModelRunner)
            return self.engine.runner.watch_drift(folder)

    def close(self) -> None:
        """Close the engine and free its device memory. Open streams end."""
        with self.exclusive():
            self.closed = True
            self.engine.close()
            del self.engine
        gc.collect()  # CUDA graphs are in reference cycles
        torch.cuda.empty_cache()


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block, so that it cannot leave the engine in an inconsistent state."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught:
        raise KeyboardInterrupt


@contextmanager
def progress_bar(requests: int, wanted: bool) -> Iterator[Advance]:
    """Finished requests and tokens a second, on a terminal."""
    if not wanted or not sys.stderr.isatty():
        yield lambda results: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[pace]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=requests, pace="")
        tokens = 0

        def advance(results: Sequence[Result]) -> None:
            nonlocal tokens
            tokens += sum(len(answer.token_ids) for result in results for answer in result.answers)
            seconds = bar.tasks[0].elapsed or 0.0
            if results and seconds:
                bar.update(task, advance=len(results), pace=f"{tokens / seconds:,.0f} tokens/s")

        yield advance
