"""A thousand streams at once through the engine's process: none lost, none left over, all told when it dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_engine

from lmworks.engine.core.request import Request
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.serve.backend import BackendError, EngineRequest, Event
from lmworks.serve.engine_process import EngineProcess, StallTimeouts

STREAMS = 1000
OPTIONS = {"max_seqs": 256, "blocks": 4096, "max_batch_tokens": 512}
Run = Callable[[Any], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def backend(run: Run) -> Iterator[EngineProcess]:
    serving = EngineProcess("tiny", partial(tiny_engine.tiny, **OPTIONS), StallTimeouts(stuck=1.0, kill=0.0))
    run(serving.start())
    yield serving
    run(serving.close())


def prompt(number: int) -> list[int]:
    return [1 + number % 250, number % 256, number // 256]


def params(number: int, tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, seed=number)


def stream(backend: EngineProcess, number: int, tokens: int) -> AsyncGenerator[Event, None]:
    return backend.stream(EngineRequest(prompt(number), params(number, tokens), stream=number % 10 > 0))


async def answer(backend: EngineProcess, number: int, tokens: int) -> list[int]:
    found: list[int] = []
    async with aclosing(stream(backend, number, tokens)) as events:
        async for event in events:
            found += event.tokens
    return found


async def all_answers(backend: EngineProcess, tokens: int) -> list[list[int]]:
    return await asyncio.gather(*(answer(backend, number, tokens) for number in range(STREAMS)))


async def until(true: Callable[[], bool], seconds: float) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, "it did not come about"
        await asyncio.sleep(0.01)


def pid(backend: EngineProcess) -> int:
    assert backend.handle is not None
    return backend.handle.process.pid


def left_over(backend: EngineProcess) -> list[Any]:
    """What a request could leave behind, on either side."""
    found = backend.state.metrics
    gauges = [found[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
    return [each for each in (backend.queues, backend.unfinished, *gauges) if each]


def test_every_stream_gets_its_own_answer(backend: EngineProcess, run: Run) -> None:
    """Each as the engine gives it to the same request by itself: nothing lost, doubled, or given to a neighbour."""
    answers = run(all_answers(backend, 16))
    engine = tiny_engine.tiny(**OPTIONS).engine
    requests = [Request(prompt(number), params(number, 16)) for number in range(STREAMS)]
    for request in requests:
        engine.add(request)
    results = {piece.request.id: piece.result for piece in engine.run()}
    expected = [result.token_ids for request in requests if (result := results[request.id]) is not None]
    assert answers == expected
    assert len({tuple(each) for each in answers}) > STREAMS * 0.99


async def in_use(backend: EngineProcess, told: Path) -> list[int]:
    """Blocks of Python's allocator and bytes of the C library's: here, then in the engine's process."""
    told.unlink(missing_ok=True)
    os.kill(pid(backend), signal.SIGUSR1)
    await until(told.exists, 60)
    return [*tiny_engine.in_use(), *map(int, told.read_text().split())]


@pytest.mark.slow
def test_memory_is_constant(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in use, not what the system lent: from five objects or 250 bytes a request on, a leak is seen."""
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")  # on aarch64 it grows with every new shape, to 1,024
    told = tmp_path / "in_use"

    async def main() -> None:
        backend = EngineProcess(
            "tiny", partial(tiny_engine.telling, told, **OPTIONS), StallTimeouts(stuck=1.0, kill=0.0)
        )
        await backend.start()
        for _ in range(2):  # pools fill
            await all_answers(backend, 2)
        before = await in_use(backend, told)
        for _ in range(4):
            await all_answers(backend, 2)
        await until(lambda: not left_over(backend), 60)
        after = await in_use(backend, told)
        await backend.close()
        growth = [(late - early) / (4 * STREAMS) for late, early in zip(after, before, strict=True)]
        assert max(growth[::2]) < 5, growth
        assert max(growth[1::2]) < 250, growth

    run(main())


def test_hundred_disconnects_are_cancelled(backend: EngineProcess, run: Run) -> None:
    """In every state: not sent yet, waiting, in the middle, about to end. Those who stay notice nothing."""
    draw = random.Random(0)

    async def leaver(number: int) -> None:
        task = asyncio.create_task(answer(backend, number, 100))
        await asyncio.sleep(draw.uniform(0, 0.7))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def main() -> None:
        tasks = len(asyncio.all_tasks())
        for _ in range(10):  # on a busy machine an engine may be quicker than those who leave
            stayers = [asyncio.create_task(answer(backend, number, 40)) for number in range(100)]
            await asyncio.gather(*(leaver(number) for number in range(100, 200)))
            assert all(len(each) == 40 for each in await asyncio.gather(*stayers))
            await until(lambda: not left_over(backend), 60)
            assert len(asyncio.all_tasks()) == tasks
            if (cancelled := backend.state.metrics["finished"].get("cancelled", 0)) > 20:
                break
        assert cancelled > 20

    run(main())


@pytest.mark.slow  # tests/serve/test_engine_process.py kills one under a few streams
def test_killed_engine_fails_streams_and_recovers(backend: EngineProcess, run: Run) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(answer(backend, number, 200)) for number in range(STREAMS)]
        await until(lambda: sum(queue.started for queue in backend.queues.values()) >= 256, 60)
        os.kill(pid(backend), signal.SIGKILL)
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert all(isinstance(each, BackendError) and each.kind == "dead" for each in outcomes)
        await until(lambda: backend.ready, 60)  # one or two seconds, where nothing else runs
        assert len(await answer(backend, 1, 5)) == 5
        assert not backend.queues and backend.restarts == 1
        assert backend.state.last_error == "the engine's process ended: killed by SIGKILL"

    run(main())


@pytest.mark.slow
def test_stopped_engine_is_detected_under_load(backend: EngineProcess, run: Run) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(answer(backend, number, 20)) for number in range(STREAMS)]
        await asyncio.sleep(0)  # each has sent its request
        assert len(backend.unfinished) == STREAMS
        os.kill(pid(backend), signal.SIGSTOP)
        await until(lambda: backend.state.stuck, 60)
        assert backend.state.alive and not backend.state.healthy
        os.kill(pid(backend), signal.SIGCONT)
        assert all(len(each) == 20 for each in await asyncio.gather(*tasks))
        await until(lambda: backend.state.healthy, 20)

    run(main())
