"""Grammars are compiled beside the engine, in a fair order, on a clock of their own; no engine is killed for them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiny_engine

from lmworks.data.tokenizer import ByteTokenizer
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.grammars.grammar import Grammars
from lmworks.serve import engine_process
from lmworks.serve.backend import BackendError, EngineRequest, EventQueue
from lmworks.serve.channel import StepReport
from lmworks.serve.compile_queue import CompileJob, CompileQueue, Lane
from lmworks.serve.engine_process import EngineProcess, ProcessHandle, StallTimeouts
from lmworks.spec import SpecError

Run = Callable[[Coroutine[Any, Any, Any]], Any]
CHOICE = SamplingParams(max_tokens=20, seed=1, choice=["yes", "no"])
SCHEMA = SamplingParams(
    max_tokens=20, seed=1, json_schema={"type": "object", "properties": {}, "additionalProperties": False}
)


def hostile(number: int) -> SamplingParams:
    """Another one each time; to compile it takes more than all that is allowed."""
    return SamplingParams(max_tokens=20, json_schema={"type": "integer", "multipleOf": 9_999_991 + 2 * number})


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def engine(run: Run) -> Iterator[EngineProcess]:
    backend = EngineProcess("tiny", tiny_engine.fragile, StallTimeouts(stuck=3.0, kill=3.5))
    run(backend.start())
    yield backend
    run(backend.close())


async def outcome(backend: EngineProcess, ask: EngineRequest) -> str | BackendError:
    """Its text, or why there is none."""
    try:
        async with aclosing(backend.stream(ask)) as events:
            return "".join([event.text async for event in events])
    except BackendError as error:
        return error


async def left(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_queue_is_round_robin_over_keys() -> None:
    lane, done = Lane(), []
    for key in "aaaabbc":
        lane.put(CompileJob(key, CHOICE, lambda: True, done.append))
    turns = []
    while (job := lane.take()) is not None:
        turns.append(job.key)
    assert "".join(turns) == "abcabaa"
    lane.put(CompileJob("a", CHOICE, lambda: True, done.append))
    assert lane.take(busy={"a"}) is None and lane.take() is not None and lane.take() is None


def test_compiling_is_not_a_stall(engine: EngineProcess, run: Run) -> None:
    """They take longer than an engine with work may go without a step."""

    async def main() -> list[str | BackendError]:
        sick = []

        async def look() -> None:
            while True:
                sick.append(engine.state.stuck)
                await asyncio.sleep(0.02)

        looking = asyncio.create_task(look())
        found = await asyncio.gather(*(outcome(engine, EngineRequest([1], hostile(i), share="a")) for i in range(2)))
        await left([looking])
        assert not any(sick) and engine.restarts == 0
        return found

    began = time.monotonic()
    for refused in run(main()):
        assert isinstance(refused, BackendError) and refused.kind == "refused" and "too complex" in str(refused)
    assert time.monotonic() - began > engine.stall_timeouts.kill, "or nothing was tried"


@pytest.mark.parametrize("share", ["other", "hostile"], ids=["of another key", "of the same key"])
def test_small_grammar_does_not_wait_for_hostile_ones(engine: EngineProcess, run: Run, share: str) -> None:
    async def main() -> tuple[int, int]:
        several = range(100, 108) if share == "other" else range(200, 208)
        crowd = [asyncio.create_task(outcome(engine, EngineRequest([1], hostile(i), share="hostile"))) for i in several]
        while len(engine.compiling) < len(crowd):
            await asyncio.sleep(0.01)
        assert await outcome(engine, EngineRequest([1], CHOICE, share=share)) in ("yes", "no")
        choice = sum(not task.done() for task in crowd)
        text = await outcome(engine, EngineRequest([1], SCHEMA, share=share))
        assert isinstance(text, str) and text.replace(" ", "").replace("\n", "") == "{}"
        schema = sum(not task.done() for task in crowd)
        await left(crowd)
        assert engine.restarts == 0
        return choice, schema

    choice, schema = run(main())
    assert choice >= 7, "hostile ones that were not even refused when the choice was answered"
    assert schema >= 6


def test_compile_timeout_is_separate(engine: EngineProcess, run: Run) -> None:
    """The time in the queue begins when the grammar is there."""
    late = run(outcome(engine, EngineRequest([1], hostile(300), compile_seconds=0.2, queue_seconds=60)))
    assert isinstance(late, BackendError) and (late.kind, late.started, late.retry_after) == ("timeout", False, 1)
    assert "not compiled within 0.2 s" in str(late)
    again = run(outcome(engine, EngineRequest([1], hostile(0), compile_seconds=60, queue_seconds=0.01)))
    assert isinstance(again, BackendError) and again.kind == "refused" and "too complex" in str(again)
    assert not engine.compiling and not engine.queues

    async def main() -> BackendError | None:
        backend, queue = (
            EngineProcess("none", tiny_engine.tiny),
            EventQueue(EngineRequest([1], CHOICE, queue_seconds=0.01)),
        )
        backend.queues[1], backend.compiling[1] = queue, queue.request
        backend.on_report(StepReport(0, [1], [], [], [], None), cast(ProcessHandle, SimpleNamespace(steps=0)))
        assert not backend.compiling and queue.error is None
        await asyncio.wait_for(queue.not_empty.wait(), 60)
        return queue.error

    waited = run(main())
    assert waited is not None and waited.kind == "timeout" and "could not be started" in str(waited)


def test_hang_during_compile_is_detected(engine: EngineProcess, run: Run) -> None:
    async def main() -> None:
        assert engine.handle is not None
        engine.stall_timeouts = StallTimeouts(stuck=0.6, kill=0.0)
        os.kill(engine.handle.process.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(outcome(engine, EngineRequest([1], CHOICE)))
        try:
            while not engine.state.stuck:
                await asyncio.sleep(0.01)
            assert len(engine.compiling) == 1
        finally:
            os.kill(engine.handle.process.pid, signal.SIGCONT)
        assert await waiting in ("yes", "no")
        assert not engine.state.stuck

    run(asyncio.wait_for(main(), 60))
    assert engine.restarts == 0


def test_queue_limit_per_key(engine: EngineProcess, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "MAX_COMPILING", 3)
    one, two, three = (replace(CHOICE, choice=["yes", f"no {number}"]) for number in range(3))

    async def main() -> None:
        assert engine.handle is not None
        os.kill(engine.handle.process.pid, signal.SIGSTOP)  # so that all of them wait
        try:
            asks = [
                *(EngineRequest([i], one, share="a") for i in range(1, 9)),
                EngineRequest([1], two, share="a"),
                EngineRequest([1], three, share="a"),
            ]
            tasks = [asyncio.create_task(outcome(engine, ask)) for ask in asks]
            await asyncio.sleep(0)
            assert len(engine.compiling) == 10, "the prompts of one request have one grammar"
            over = await outcome(engine, EngineRequest([1], CHOICE, share="a"))
            other = asyncio.create_task(outcome(engine, EngineRequest([1], CHOICE, share="b")))
            await asyncio.sleep(0)
        finally:
            os.kill(engine.handle.process.pid, signal.SIGCONT)
        assert isinstance(over, BackendError) and (over.kind, over.retry_after) == ("busy", 1.0)
        assert all(isinstance(text, str) for text in await asyncio.gather(*tasks, other))

    run(asyncio.wait_for(main(), 60))


def test_cancelled_requests_are_not_compiled() -> None:
    """Those who ask for large shapes and leave would else keep all others from theirs."""
    grammars = Grammars(ByteTokenizer(), 257)
    queue, done, over = CompileQueue(grammars), list[Any](), threading.Event()
    for number in range(3):
        gone = SamplingParams(regex=f"a{{{number}}}b")
        queue.put(CompileJob("a", gone, lambda: False, done.append))
    queue.put(CompileJob("a", SamplingParams(regex="c"), lambda: True, lambda found: (done.append(found), over.set())))
    assert over.wait(60) and len(done) == len(grammars.compiled) == 1


def test_same_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, tried = Grammars(ByteTokenizer(), 257), list[Any]()
    check = grammars.check_in_sandbox
    monkeypatch.setattr(
        grammars, "check_in_sandbox", lambda text, budget: (tried.append(budget.seconds), check(text, budget))[1]
    )
    slow = SamplingParams(json_schema={"type": "integer", "multipleOf": 99_991})
    queue, done, over = CompileQueue(grammars), list[Any](), threading.Semaphore(0)
    for _ in range(12):
        queue.put(CompileJob("a", slow, lambda: True, lambda found: (done.append(found), over.release())))
    assert all(over.acquire(timeout=60) for _ in range(12))
    assert len(set(map(id, done))) == 1 and not isinstance(done[0], BaseException)
    assert tried.count(2.0) == 1 and tried.count(0.1) <= 3, "three threads may begin with it at once"


def test_job_results_and_errors_are_delivered() -> None:
    queue, done, over = CompileQueue(Grammars(ByteTokenizer(), 257)), list[Any](), threading.Semaphore(0)
    for params in (SamplingParams(regex="("), CHOICE, SamplingParams(choice=["x" * 70_000])):
        queue.put(CompileJob("a", params, lambda: True, lambda found: (done.append(found), over.release())))
        assert over.acquire(timeout=60)
    refused, compiled, long = done
    assert isinstance(refused, SpecError) and "grammar is invalid" in str(refused)
    assert not isinstance(compiled, BaseException)
    assert isinstance(long, SpecError) and "characters" in str(long)
