"""The loop of an engine process: adds requests that the API sends, steps the engine, reports the results.

One thread steps the engine and writes, a second one reads, and others compile grammars (`compile_queue`), so that
compilation delays no step. When the API closes the socket, or dies, the process ends at once.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import profile, record_function

from ..engine.core.engine import Engine
from ..engine.core.request import Answer, OutputDelta, Request, Result
from ..parallel.profiler import recorder, write_trace
from ..spec import LMWorksError, SpecError
from .backend import EngineRequest, TransferSettings, Usage
from .cache_events import CacheJournal
from .channel import (
    Cancel,
    Control,
    ControlReply,
    EngineFailed,
    EngineReady,
    LoadedEngine,
    LoadEngine,
    Profile,
    ProfileReport,
    SocketChannel,
    StepReport,
    Submit,
    pack_tokenizer,
)
from .compile_queue import CompileJob, CompileQueue

METRICS_INTERVAL_S = 0.25  # between two reports of metrics, while there is work
IDLE_CHECK_S = 1.0  # how often an idle engine is checked for lost ranks

MAX_LOGPROBS_A_REPORT = 16_384  # log-probabilities in one report

Fields = tuple[Any, ...]  # of an Event


def serve(channel: SocketChannel) -> int:
    """Loads the engine and steps it until the socket is closed; returns the exit code."""
    messages = channel.messages()
    try:
        assignment: LoadEngine = next(messages)
        sys.path[:] = assignment.path
        loop = EngineLoop(channel)
        threading.Thread(target=read_messages, args=(loop, messages), name="listen", daemon=True).start()
        served: LoadedEngine = pickle.loads(assignment.factory)()
        loop.engine = served.engine
        served.engine.scheduler.block_manager.listeners.append(loop.cache_journal)
        channel.send(ready_message(served))
        loop.report([])  # all metrics, as zeros
        loop.run()
    except StopIteration:
        return 0  # the API is gone
    except BrokenPipeError:
        return 0  # the API is gone
    except BaseException as error:
        known = isinstance(error, LMWorksError)
        if not known:
            traceback.print_exc()
        with suppress(OSError):
            message = str(error) if known else f"{type(error).__name__}: {error}"
            channel.send(EngineFailed(message, isinstance(error, SpecError)))
    return 1


def read_messages(loop: EngineLoop, messages: Any) -> None:
    try:
        for message in messages:
            loop.handle_message(message)
    except ConnectionError:
        pass  # a reset, which ends it too
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # even within a step: no client is left


def ready_message(served: LoadedEngine) -> EngineReady:
    engine = served.engine
    return EngineReady(
        engine.spec.context,
        engine.runner.valid_vocab,
        engine.spec.max_seqs,
        tuple(sorted(engine.adapter_names)),
        pack_tokenizer(engine.tokenizer),
        served.folder,
        served.begin_of_text,
        served.chat_template,
        served.sentinels,
        served.parsers,
        engine.runner.hidden,
        engine.runner.scalar_head,
        engine.spec.block if engine.spec.prefix_cache else 0,
        engine.eos,
        transfer_settings(engine),
    )


def transfer_settings(engine: Engine) -> TransferSettings | None:
    spec, tiers = engine.spec, engine.tiers
    if tiers is None:
        return None
    key = tiers.fingerprint.hex()
    return TransferSettings(
        key, spec.block, spec.dtype, spec.kv_dtype, spec.context, tiers.address, tuple(spec.kv_peers), spec.tp
    )


@dataclass(frozen=True)
class Recording:
    """Between /start_profile and /stop_profile, or a limit."""

    profiler: profile
    trace: Path
    last_step: int
    deadline: float  # of time.monotonic

    def over(self, steps: int) -> bool:
        return steps >= self.last_step or time.monotonic() >= self.deadline


class EngineLoop:
    """Only `run` touches the engine; messages wait as pending callbacks between steps."""

    engine: Engine  # set before the first request: the API waits for EngineReady

    def __init__(self, channel: SocketChannel) -> None:
        self.channel = channel
        self.cache_journal = CacheJournal()
        self.active: set[int] = set()  # requests that were not cancelled
        self.pending: list[Callable[[], None]] = []
        self.changed = threading.Condition()  # guards both
        self.compilers: CompileQueue | None = None
        self.compiling: set[int] = set()  # requests whose grammar is being compiled; touched by `run` alone
        self.compiled: list[int] = []  # to be reported
        self.refused: list[tuple[int, str]] = []
        self.steps = 0
        self.metrics_sent_at = 0.0  # when metrics were last reported
        self.recording: Recording | None = None

    # --- messages -----------------------------------------------------------------------------------------

    def handle_message(self, message: Submit | Cancel | Profile | Control) -> None:
        if isinstance(message, Control):
            self.post(lambda: self.control(message))
            return
        if isinstance(message, Profile):
            self.post(lambda: self.set_profile(message))
            return
        if isinstance(message, Cancel):
            with self.changed:
                self.active.discard(message.number)
            self.post(lambda: self.cancel(message.number))
            return
        with self.changed:
            self.active.add(message.number)
        grammars = self.engine.runner.grammars
        if not message.request.params.structured or grammars is None:
            self.post(lambda: self.add_request(message))
            return
        self.compilers = self.compilers or CompileQueue(grammars)
        self.post(lambda: self.compiling.add(message.number))
        number, request = message
        self.compilers.put(
            CompileJob(
                request.share,
                request.params,
                lambda: number in self.active,
                lambda found: self.on_compiled(message, found),
            )
        )

    def post(self, what: Callable[[], None]) -> None:
        with self.changed:
            self.pending.append(what)
            self.changed.notify()

    def on_compiled(self, message: Submit, found: Any) -> None:
        """A grammar that does not compile fails its request, not the engine."""
        if isinstance(found, BaseException):
            reason = str(found)
            self.post(lambda: self.refuse(message.number, reason))
        else:
            self.post(lambda: self.add_request(message, found))

    # --- the engine's thread ------------------------------------------------------------------------------

    def run(self) -> None:
        while True:
            self.run_pending()
            if self.recording is not None and self.recording.over(self.steps):
                self.end_profile()
            pieces: list[OutputDelta] = []
            if self.engine.busy:
                with self.step_span():
                    pieces = self.engine.step()
                self.steps += 1
            self.report(pieces)

    def control(self, message: Control) -> None:
        """What fails here fails this operation alone."""
        engine, error = self.engine, ""
        actions: dict[str, Callable[..., Any]] = {
            "sleep": engine.sleep,
            "wake_up": engine.wake,
            "reset_prefix_cache": engine.reset_prefix_cache,
            "load_adapter": engine.add_adapter,
            "unload_adapter": engine.remove_adapter,
        }
        try:
            actions[message.action](*message.arguments)
        except LMWorksError as raised:
            error = str(raised)
        self.channel.send(ControlReply(message.number, error, tuple(sorted(engine.adapter_names)), engine.asleep))

    def step_span(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.recording is None else record_function(f"ProfilerStep#{self.steps + 1}")

    def set_profile(self, message: Profile) -> None:
        if message.trace is None:
            self.end_profile()
        else:
            self.start_profile(message.trace, message.steps, message.seconds)

    def start_profile(self, trace: Path, steps: int, seconds: float) -> None:
        self.channel.send(ProfileReport(busy=True, recording=False))
        error = ""
        try:
            profiler = recorder(torch.device("cuda" if torch.cuda.is_available() else "cpu"), record_shapes=True)
            profiler.start()
            self.recording = Recording(profiler, trace, self.steps + steps, time.monotonic() + seconds)
        except (OSError, RuntimeError) as raised:
            error = str(raised)
        self.channel.send(ProfileReport(busy=False, recording=self.recording is not None, error=error))

    def end_profile(self) -> None:
        """Write what was recorded. A trace that cannot be written stops no answer."""
        recording, self.recording = self.recording, None
        if recording is None:
            return  # a limit ended it while the request to end it was on its way
        self.channel.send(ProfileReport(busy=True, recording=True))
        error = ""
        try:
            recording.profiler.stop()
            write_trace(recording.profiler, recording.trace)
        except (OSError, RuntimeError) as raised:
            error = str(raised)
        self.channel.send(ProfileReport(busy=False, recording=False, error=error))

    def run_pending(self) -> None:
        timeout = METRICS_INTERVAL_S if self.compiling else IDLE_CHECK_S
        with self.changed:
            while not self.changed.wait_for(lambda: self.pending or self.engine.busy, timeout):
                if why := self.engine.runner.failed_worker():  # idle: no step would notice it
                    raise LMWorksError(why)
                if self.compiling or (self.recording is not None and self.recording.over(self.steps)):
                    break  # report, as a heartbeat
            pending, self.pending = self.pending, []
        for post in pending:
            post()

    def add_request(self, message: Submit, grammar: Any = None) -> None:
        """An error here fails this request alone."""
        self.compiling.discard(message.number)
        if message.number not in self.active:
            return  # cancelled while its grammar was compiled
        if message.request.params.structured:
            self.compiled.append(message.number)
        try:
            request = make_request(message.number, message.request)
            request.grammar = grammar
            self.engine.add(request)
        except BaseException as error:
            self.refuse(message.number, f"{type(error).__name__}: {error}")

    def refuse(self, number: int, reason: str) -> None:
        self.compiling.discard(number)
        self.refused.append((number, reason))

    def cancel(self, number: int) -> None:
        self.compiling.discard(number)
        self.engine.cancel(number)

    def report(self, pieces: list[OutputDelta]) -> None:
        started = list({each.request.id for each in self.engine.scheduler.admitted}) if self.engine.busy else []
        events = []
        for piece in pieces:
            number = piece.request.id
            if number not in self.active:
                continue
            if piece.result is not None and not piece.request.sequences:
                self.refuse(number, piece.result.error or "the request was refused")
            else:
                events += [(number, fields) for fields in to_events(piece)]
        refused, self.refused = self.refused, []
        compiled, self.compiled = self.compiled, []
        over = [piece.request.id for piece in pieces if piece.result is not None]
        with self.changed:
            self.active.difference_update(over, (number for number, _ in refused))
        idle, now = not self.engine.busy, time.monotonic()
        with_metrics = idle or now - self.metrics_sent_at >= METRICS_INTERVAL_S
        cache = self.cache_journal.take()
        if with_metrics or started or compiled or refused or events or cache:
            self.metrics_sent_at = now if with_metrics else self.metrics_sent_at
            metrics = asdict(self.engine.metrics) if with_metrics else None
            first, *rest = batches(events)
            self.channel.send(StepReport(self.steps, compiled, started, refused, first, metrics, cache))
            for batch in rest:
                self.channel.send(StepReport(self.steps, [], [], [], batch, None))


# --- engine outputs as events -----------------------------------------------------------------------------


def make_request(number: int, request: EngineRequest) -> Request:
    """With best_of nothing is streamed: the best are chosen when all have ended."""
    params = request.params
    stream = request.stream and params.answers == params.n
    return Request(
        list(request.prompt),
        params,
        request.priority,
        request.tenant,
        stream=stream,
        generated=request.generated,
        id=number,
        pooling=request.pooling,
        kv_remote=request.kv_remote,
    )


def to_events(piece: OutputDelta) -> list[Fields]:
    """Fields of its events. A request that is not streamed has one event for each answer, at its end."""
    request, result = piece.request, piece.result
    final = None if result is None else usage(request, result)
    prompt_logprobs = None if result is None else result.prompt_logprobs
    pooled = None if result is None or result.embedding is None else np.array(result.embedding, np.float32).tobytes()
    if request.stream:
        done = request.sequences[piece.index].final_answer if piece.finish_reason is not None else None
        stop_reason, error = (done.stop_reason, done.error) if done is not None else (None, None)
        logprobs = piece.logprobs if request.params.logprobs is not None else None
        shown = (piece.index, piece.token_ids, piece.text, logprobs)
        return [(*shown, piece.finish_reason, stop_reason, error, final, prompt_logprobs, pooled)]
    if result is None:
        return []
    whole = [event_fields(index, answer, request) for index, answer in enumerate(result.answers)]
    return [(*fields, None, None) for fields in whole[:-1]] + [(*whole[-1], final, prompt_logprobs, pooled)]


def batches(events: list[tuple[int, Fields]]) -> list[list[tuple[int, Fields]]]:
    """At least one. Many log-probabilities are split into several messages: the API reads one at a time."""
    found: list[list[tuple[int, Fields]]] = [[]]
    weight = 0
    for event in events:
        scored = event[1][3]
        weight += len(scored) * (len(scored[0].top) + 1) if scored else 0
        if weight > MAX_LOGPROBS_A_REPORT and found[-1]:
            found.append([])
            weight = 0
        found[-1].append(event)
    return found


def event_fields(index: int, answer: Answer, request: Request) -> Fields:
    logprobs = answer.logprobs if request.params.logprobs is not None else None
    return (index, answer.token_ids, answer.text, logprobs, answer.finish_reason, answer.stop_reason, answer.error)


def usage(request: Request, result: Result) -> Usage:
    made = sum(len(each.output_token_ids) for each in request.sequences)
    return Usage(len(request.prompt), made, result.cached_tokens, **result.times)
