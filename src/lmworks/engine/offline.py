"""An engine driven by its caller: many prompts at once, or one answer as it comes."""

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
    """Steps the engine whenever somebody waits for a piece. Many may wait at once: streams that are open, threads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.closed = False
        self.door, self.lock = threading.Lock(), threading.Lock()
        self.mine = threading.local()  # `inside`: whether this thread has the engine, or is about to
        self.boxes: dict[int, list[OutputDelta]] = {}  # of every request that is waited for
        self.left: list[int] = []  # requests to take back before the next step

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
        """Results in order. Whatever ends this early (Ctrl-C) takes all requests back that have not been told of."""
        requests = [Request(prompt, wishes) for prompt, wishes in zip(prompts, params, strict=True)]
        places = {request.id: place for place, request in enumerate(requests)}
        results: dict[int, Result] = {}
        box: list[OutputDelta] = []

        def take() -> list[Result]:
            """One by one: where `on_result` is interrupted, the others are still in the box."""
            done = []
            while box:
                delta = box.pop(0)
                if delta.result is not None:
                    results[delta.request.id] = delta.result
                    on_result(places[delta.request.id], delta.result)
                    done.append(delta.result)
            return done

        try:
            for request in requests:
                self.add(request, box)
            with progress_bar(len(requests), progress) as advance:
                while len(results) < len(requests):
                    self.step(box)
                    advance(take())
        finally:
            with defer_interrupts():  # a second Ctrl-C, too
                try:
                    take()  # what came of the step that was interrupted
                finally:
                    for request in requests:
                        self.leave(request, request.id in results)
        return [results[request.id] for request in requests]

    def stream(self, prompt: list[int], params: SamplingParams) -> Generator[OutputDelta, None, None]:
        """Pieces as they come; the last one carries the result. Closing it before that cancels the request."""
        request = Request(prompt, params, stream=True)
        box: list[OutputDelta] = []
        finished = False
        try:
            self.add(request, box)
            while not finished:
                self.step(box)
                for _ in range(len(box)):
                    delta = box.pop(0)
                    finished = delta.result is not None
                    yield delta
        finally:
            self.leave(request, finished)

    def add(self, request: Request, box: list[OutputDelta]) -> None:
        with self.alone():
            self.boxes[request.id] = box
            self.engine.add(request)

    def step(self, box: list[OutputDelta]) -> None:
        """Until something has come for one who waits; another thread may have taken the step that brought it."""
        with self.alone():
            if not box:
                while self.left:
                    self.engine.cancel(self.left.pop())
                for delta in self.engine.step():
                    if delta.request.id in self.boxes:
                        self.boxes[delta.request.id].append(delta)

    def leave(self, request: Request, finished: bool) -> None:
        """Of a request that may not have been added yet, or whose engine may be gone.

        A stream that nobody holds is closed wherever this thread happens to be: in the middle of a step, at worst.
        """
        if getattr(self.mine, "inside", False):
            self.boxes.pop(request.id, None)
            self.left += [] if finished else [request.id]
            return
        with suppress(LMWorksError), self.alone():  # closed: nothing is left to take back
            self.boxes.pop(request.id, None)
            if not finished:
                self.engine.cancel(request.id)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """With the engine: no other thread, and no Ctrl-C, before it is done.

        Who waits for the lock waits at the door, so that the thread that has just had it does not have it again first.
        """
        with defer_interrupts():
            self.mine.inside = True
            try:
                with self.door:
                    self.lock.acquire()
                try:
                    if self.closed:
                        raise LMWorksError(CLOSED)
                    if self.engine.driver is not None:
                        raise LMWorksError(f"the engine cannot be asked here: {DRIVEN}")
                    yield
                finally:
                    self.lock.release()
            finally:
                self.mine.inside = False

    def add_adapter(self, name: str, folder: Path) -> None:
        with self.alone():
            self.engine.add_adapter(name, folder)

    def watch_drift(self, folder: Path) -> DriftMonitor:
        with self.alone():
            assert isinstance(self.engine.runner, ModelRunner)
            return self.engine.runner.watch_drift(folder)

    def close(self) -> None:
        """Lets go of the engine, and gives weights and cache back to the device. Streams that are open end there."""
        with self.alone():
            self.closed = True
            self.engine.close()
            del self.engine
        gc.collect()  # graphs and what they record hold each other
        torch.cuda.empty_cache()


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Ctrl-C in the middle of this would leave the engine's books half written: it is raised behind it."""
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
    """Finished requests and tokens a second, for people who look at a terminal."""
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
