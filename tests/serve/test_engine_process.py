"""An engine behind a process: the same answers, nothing left behind, and whatever ends it is told and mended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiny_engine

from lmworks.engine.core.request import Request, Result
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.record import oom
from lmworks.serve import engine_loop, engine_process
from lmworks.serve.backend import BackendError, EngineRequest, Event, EventQueue, merge_events
from lmworks.serve.channel import Profile, ProfileReport, SocketChannel
from lmworks.serve.engine_loop import EngineLoop
from lmworks.serve.engine_process import EngineProcess, ProcessHandle, StallTimeouts
from lmworks.spec import LMWorksError, SpecError

LONG = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
HELD = replace(LONG, seed=tiny_engine.HELD)  # begins, and does not end before SIGCONT
Run = Callable[[Coroutine[Any, Any, Any]], Any]
pytestmark = pytest.mark.usefixtures("forked_python")  # save the first engine, which is there before


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """One event loop for all: processes are started once."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def engine(run: Run) -> Iterator[EngineProcess]:
    backend = EngineProcess("tiny", tiny_engine.fragile, StallTimeouts(stuck=0.6, kill=0.0))
    run(backend.start())
    yield backend
    run(backend.close())


async def collect_events(backend: EngineProcess, ask: EngineRequest) -> list[Event]:
    async with aclosing(backend.stream(ask)) as events:
        return [event async for event in events]


async def outcome(backend: EngineProcess, ask: EngineRequest) -> list[Event] | BackendError:
    try:
        return await collect_events(backend, ask)
    except BackendError as error:
        return error


async def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.01)


async def beginning(backend: EngineProcess, ask: EngineRequest) -> tuple[Any, Event]:
    """A stream that has begun, and its first event."""
    stream = backend.stream(ask)
    return stream, await anext(stream)


def idle(backend: EngineProcess) -> bool:
    found = backend.state.metrics
    return not backend.queues and found["num_requests_running"] == found["num_requests_waiting"] == 0


def pid(backend: EngineProcess) -> int:
    assert backend.handle is not None
    return backend.handle.process.pid


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


# --- the same answers -------------------------------------------------------------------------------------


def direct(prompt: list[int], params: SamplingParams) -> Result:
    """What the engine itself says, here."""
    engine = tiny_engine.tiny().engine
    engine.add(Request(prompt, params))
    (last,) = engine.run()
    assert last.result is not None
    return last.result


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=30, temperature=0),
        SamplingParams(max_tokens=30, seed=3, n=3, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=20, seed=3, n=2, best_of=4, logprobs=0),
        SamplingParams(max_tokens=60, seed=4, stop=["a", "e", "\x01"]),
        SamplingParams(max_tokens=20, seed=5, choice=["yes", "certainly"]),
    ],
    ids=["greedy", "n and logprobs", "best of", "stop", "choice"],
)
def test_answers_equal_engine(engine: EngineProcess, run: Run, params: SamplingParams, stream: bool) -> None:
    prompt = list(b"What is the answer?")
    result = direct(prompt, params)
    events = run(collect_events(engine, EngineRequest(prompt, params, stream=stream)))
    whole: dict[int, Event] = {}
    for event in events:
        whole[event.index] = merge_events(whole[event.index], event) if event.index in whole else event
    assert len(whole) == params.n
    for index, answer in enumerate(result.answers):
        said = whole[index]
        assert (said.tokens, said.text, said.finish_reason) == (answer.token_ids, answer.text, answer.finish_reason)
        assert (said.stop_reason, said.logprobs) == (answer.stop_reason, answer.logprobs)
    final = events[-1].final
    assert [event.final for event in events[:-1]] == [None] * (len(events) - 1)
    assert final is not None and events[-1].prompt_logprobs == result.prompt_logprobs
    assert (final.prompt_tokens, final.completion_tokens >= len(result.token_ids)) == (len(prompt), True)
    assert 0 <= final.queue <= final.first_token <= final.total
    assert stream or len(events) == params.n


def test_engine_process_info(engine: EngineProcess) -> None:
    card = engine.card
    assert (card.id, card.context, card.vocab, card.max_seqs) == ("tiny", 512, 257, 64)
    assert engine.prompt_tokenizer.encode("é") == [*"é".encode()]
    assert engine.prompt_tokenizer.decode([104, 105]) == "hi"
    state = engine.state
    assert (state.alive, state.ready, state.healthy, state.stuck) == (True, True, True, False)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HOPELESS = [
    (EngineRequest([], SamplingParams()), "prompt is empty"),
    (EngineRequest([257], SamplingParams()), "token 257"),
    (EngineRequest([1] * 512, SamplingParams()), "does not fit"),
    (EngineRequest([1], SamplingParams(regex="(")), "the grammar is invalid"),
    (EngineRequest([1], SamplingParams(json_schema={"type": "nonsense"})), "nonsense"),
    (EngineRequest([1], SamplingParams(json_schema=nested(100))), "nested more than"),
    (EngineRequest([1], SamplingParams(json_schema=nested(100_000))), "nested too deep"),
    (EngineRequest([1], SamplingParams(adapter="poet")), "adapter"),
    (EngineRequest([1], SamplingParams(logit_bias={300: 1.0})), "300"),
    (EngineRequest(["a"], SamplingParams()), "the prompt holds token 'a'"),  # type: ignore[list-item]
]


def test_invalid_request_does_not_affect_others(engine: EngineProcess, run: Run) -> None:
    async def main() -> None:
        other, first = await beginning(engine, EngineRequest([1], LONG))
        for ask, says in HOPELESS:
            with pytest.raises(BackendError, match=says) as refused:
                await collect_events(engine, ask)
            assert (refused.value.kind, refused.value.retry_after) == ("refused", None)
        assert len(first.tokens) + sum([len(event.tokens) async for event in other]) == 400

    run(main())
    assert engine.restarts == 0


def test_tenants_do_not_share_prefixes(engine: EngineProcess, run: Run) -> None:
    prompt = list(range(1, 65))

    async def cached(tenant: str) -> int:
        request = EngineRequest(prompt, SamplingParams(max_tokens=1), tenant=tenant)
        final = (await collect_events(engine, request))[-1].final
        assert final is not None
        return final.cached_tokens

    async def main() -> list[int]:
        return [await cached(tenant) for tenant in ("a", "b", "a", "b", "")]

    assert run(main()) == [0, 0, 48, 48, 0]


# --- leaving ----------------------------------------------------------------------------------------------


def test_disconnect_cancels_request(engine: EngineProcess, run: Run) -> None:
    async def main() -> None:
        before = engine.state.metrics.get("finished", {}).get("cancelled", 0)
        stream, _ = await beginning(engine, EngineRequest([1], HELD))
        await stream.aclose()
        task = asyncio.create_task(collect_events(engine, EngineRequest([2], HELD)))
        await until(lambda: any(queue.started for queue in engine.queues.values()))
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        forgotten, _ = await beginning(engine, EngineRequest([3], HELD))
        del forgotten
        await until(lambda: idle(engine) and engine.state.metrics["finished"].get("cancelled", 0) == before + 3)
        assert engine.state.metrics["kv_cache_usage_perc"] == 0

    run(main())


def test_disconnect_during_compile_cancels(engine: EngineProcess, run: Run) -> None:
    async def main() -> None:
        taken_in = engine.state.metrics["prompt_tokens"]
        for number in range(20):
            shape = {"type": "object", "properties": {f"p{number}-{i}": {"type": "string"} for i in range(200)}}
            stream = engine.stream(EngineRequest([1], replace(LONG, json_schema=shape)))
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        assert not engine.queues
        await collect_events(engine, EngineRequest([1], replace(LONG, max_tokens=2, choice=["a", "b"])))
        await until(lambda: idle(engine))
        assert engine.state.metrics["prompt_tokens"] <= taken_in + 3  # one of two compilers may have been that far

    run(main())


def test_lost_rank_ends_idle_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Health is told by its process, which is started again when it ends."""
    monkeypatch.setattr(engine_loop, "IDLE_CHECK_S", 0.01)
    answers = iter(["", "", "rank 1: it ended"])
    loop = EngineLoop(cast(SocketChannel, None))
    loop.engine = cast(Any, SimpleNamespace(runner=SimpleNamespace(failed_worker=lambda: next(answers)), busy=False))
    with pytest.raises(LMWorksError, match="rank 1: it ended"):
        loop.run()


def test_profiler_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **options: object) -> None:
        raise RuntimeError("CUPTI is in use")

    monkeypatch.setattr(engine_loop, "recorder", fails)
    sent: list[ProfileReport] = []
    loop = EngineLoop(cast(SocketChannel, SimpleNamespace(send=sent.append)))
    loop.set_profile(Profile(Path("trace.json.gz"), 10, 1.0))
    assert sent == [ProfileReport(True, False), ProfileReport(False, False, "CUPTI is in use")]


def test_a_request_to_end_a_profile_that_a_limit_has_ended_is_not_answered_twice() -> None:
    """The report of the limit is the answer: a second one would be taken for that of the next request."""
    sent: list[ProfileReport] = []
    EngineLoop(cast(SocketChannel, SimpleNamespace(send=sent.append))).set_profile(Profile(None))
    assert not sent


def test_writing_a_profile_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "TICK_S", 0.001)
    killed: list[bool] = []

    async def main() -> None:
        backend = EngineProcess("tiny", tiny_engine.tiny, StallTimeouts(stuck=0.002, kill=0.004))
        backend.unfinished.add(1)
        handle = ProcessHandle(cast(Any, SimpleNamespace(kill=lambda: killed.append(True))), *[cast(Any, None)] * 2)
        backend.on_profile_report(ProfileReport(True, True), handle)
        watching = asyncio.create_task(backend.watchdog(handle))
        await asyncio.sleep(0.1)
        assert not killed and backend.stalled == 0
        backend.on_profile_report(ProfileReport(False, False), handle)
        await watching
        assert killed == [True]

    asyncio.run(main())


def test_events_after_end_are_dropped() -> None:
    """One who reads slowly gets no more than what was there when its time was over."""

    async def main() -> None:
        queue = EventQueue(EngineRequest([1], LONG))
        queue.put(Event(0, [1]))
        queue.fail("timeout", "too long")
        queue.put(Event(0, [2]))
        assert [event.tokens for event in await queue.get()] == [[1]]
        queue.put(Event(0, [3]))
        with pytest.raises(BackendError, match="too long"):
            await queue.get()

    asyncio.run(main())


def test_slow_consumer_gets_merged_events(engine: EngineProcess, run: Run) -> None:
    async def main() -> None:
        stream, first = await beginning(engine, EngineRequest([1], HELD))
        os.kill(pid(engine), signal.SIGCONT)
        await until(lambda: not engine.unfinished)  # the engine is done with it
        await asyncio.sleep(0.9)
        assert engine.state.open == 1
        assert not engine.state.stuck
        rest = [event async for event in stream]
        assert len(rest) <= 2
        assert len(first.tokens) + sum(len(event.tokens) for event in rest) == 400
        assert rest[-1].final is not None

    run(main())


def test_queue_and_request_timeouts(run: Run) -> None:
    async def main() -> None:
        backend = EngineProcess("one", partial(tiny_engine.fragile, max_seqs=1))
        await backend.start()
        first, _ = await beginning(backend, EngineRequest([1], HELD))
        waiting = await outcome(backend, EngineRequest([2], LONG, queue_seconds=0.02))
        assert isinstance(waiting, BackendError)
        assert (waiting.kind, waiting.started, waiting.retry_after) == ("timeout", False, 1)
        await first.aclose()
        patient = await outcome(
            backend, EngineRequest([2], replace(LONG, max_tokens=4), queue_seconds=60, request_seconds=60)
        )
        assert isinstance(patient, list)
        for _ in range(100):  # a busy machine may take that long before it begins
            long = await outcome(backend, EngineRequest([3], HELD, stream=False, queue_seconds=60, request_seconds=0.3))
            assert isinstance(long, BackendError) and long.kind == "timeout"
            if long.started:
                break
        assert (long.started, long.retry_after) == (True, None)
        await until(lambda: idle(backend))
        await backend.close()

    run(main())


# --- dying ------------------------------------------------------------------------------------------------


async def recovers(backend: EngineProcess, end: Callable[[], Awaitable[Any]], says: str) -> None:
    """Whatever `end` does to the process: those who wait are told, those to come are served again."""
    restarts = backend.restarts
    tasks = [asyncio.create_task(outcome(backend, EngineRequest([20 + i], HELD, stream=i % 2 == 0))) for i in range(8)]
    await until(lambda: len(backend.queues) == 8 and all(queue.started for queue in backend.queues.values()))
    await end()
    found = await asyncio.wait_for(asyncio.gather(*tasks), 60.0)
    assert all(isinstance(error, BackendError) and error.kind == "dead" and error.started for error in found)
    if not backend.ready:
        early = await outcome(backend, EngineRequest([1], LONG))
        assert isinstance(early, BackendError) and early.kind == "dead" and early.retry_after
        assert not backend.state.healthy
    await until(lambda: backend.ready)
    assert isinstance(await outcome(backend, EngineRequest([1], replace(LONG, max_tokens=2))), list)
    assert backend.restarts == restarts + 1
    assert says in (backend.state.last_error or "")
    assert backend.state.healthy


def test_failed_engine_loop_is_restarted(engine: EngineProcess, run: Run) -> None:
    """One that is killed is in test_load_1000."""
    end = partial(outcome, engine, EngineRequest([13], LONG))
    run(recovers(engine, end, "RuntimeError: the device is on fire"))


def test_hung_process_is_detected(engine: EngineProcess, run: Run) -> None:
    """Stopped and let go again: it is unwell for as long as it does not advance, and then well."""

    async def main() -> None:
        stream, _ = await beginning(engine, EngineRequest([1], HELD))
        os.kill(pid(engine), signal.SIGSTOP)
        await until(lambda: engine.state.stuck, 20)
        assert engine.state.alive and not engine.state.healthy
        assert engine.state.stalled >= 0.6
        os.kill(pid(engine), signal.SIGCONT)
        assert [event async for event in stream][-1].final is not None
        assert engine.state.healthy

    restarts = engine.restarts
    run(main())
    assert engine.restarts == restarts


def test_a_hang_is_detected_though_clients_give_up(engine: EngineProcess, run: Run) -> None:
    """A gateway leaves after seconds, long before an engine counts as hung: the count must not begin anew each time."""

    async def main() -> None:
        stream, _ = await beginning(engine, EngineRequest([1], HELD))
        os.kill(pid(engine), signal.SIGSTOP)
        await stream.aclose()
        await until(lambda: engine.state.stuck, 20)
        os.kill(pid(engine), signal.SIGCONT)
        await until(lambda: idle(engine) and engine.state.healthy)

    run(main())


def test_writes_to_hung_process_are_bounded(engine: EngineProcess, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "MAX_UNSENT_BYTES", 2**20)

    async def main() -> None:
        os.kill(pid(engine), signal.SIGSTOP)
        try:
            with pytest.raises(BackendError) as caught:
                for _ in range(20):
                    engine.close_request(engine.submit(EngineRequest([1] * 200_000, LONG))[0])
            assert caught.value.kind == "busy" and not engine.queues
        finally:
            os.kill(pid(engine), signal.SIGCONT)
        await until(lambda: engine.handle is not None and not engine.handle.writer.transport.get_write_buffer_size())
        assert isinstance(await outcome(engine, EngineRequest([1], replace(LONG, max_tokens=2))), list)

    run(main())


def test_unnamed_signal(engine: EngineProcess, run: Run) -> None:
    async def end() -> None:
        os.kill(pid(engine), signal.SIGRTMIN + 1)

    run(recovers(engine, end, f"killed by signal {signal.SIGRTMIN + 1}"))


def test_hung_process_is_killed_and_replaced(engine: EngineProcess, run: Run) -> None:
    async def hang() -> None:
        os.kill(pid(engine), signal.SIGSTOP)
        engine.stall_timeouts = StallTimeouts(stuck=0.3, kill=0.5)  # not before: it may have been slow to begin
        await until(lambda: not engine.queues)
        engine.stall_timeouts = StallTimeouts(
            stuck=0.6, kill=0.0
        )  # before the next begins: it may be slow on a busy machine

    run(recovers(engine, hang, "took no step"))


def test_engine_ignores_server_signals(engine: EngineProcess, run: Run) -> None:
    async def main() -> None:
        stream, _ = await beginning(engine, EngineRequest([1], HELD))
        os.kill(pid(engine), signal.SIGTERM)
        os.kill(pid(engine), signal.SIGINT)
        os.kill(pid(engine), signal.SIGCONT)
        assert [event async for event in stream][-1].final is not None

    run(main())


# --- beginning and end ------------------------------------------------------------------------------------


def test_load_failure_is_reported(run: Run) -> None:
    backend = EngineProcess("missing", tiny_engine.missing)
    with pytest.raises(SpecError, match="no model is there"):
        run(backend.start())
    assert (backend.state.alive, backend.restarts) == (False, 0)


def test_drain_finishes_or_cancels_requests(run: Run) -> None:
    async def main() -> None:
        backend = EngineProcess("tiny", tiny_engine.fragile)
        await backend.start()
        process = pid(backend)
        short = asyncio.create_task(outcome(backend, EngineRequest([1], replace(LONG, max_tokens=3))))
        slow, _ = await beginning(backend, EngineRequest([2], HELD))
        draining = asyncio.create_task(backend.drain(3.0))
        await until(lambda: backend.draining)
        late = await outcome(backend, EngineRequest([3], LONG))
        assert isinstance(late, BackendError) and late.kind == "dead" and "shutting down" in str(late)
        assert isinstance(await short, list)
        assert await draining == 1
        with pytest.raises(BackendError, match="shutting down"):
            while (await anext(slow)).final is None:
                pass
        await backend.close()
        assert gone(process)

    run(main())


def test_close_during_start(run: Run) -> None:
    async def main() -> None:
        backend = EngineProcess("tiny", tiny_engine.tiny)
        starting = asyncio.create_task(backend.start())
        await until(lambda: backend.handle is not None)
        process = pid(backend)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert gone(process)

    run(main())


ORPHANS = """
import asyncio, sys
sys.path.insert(0, {folder!r})
import tiny_engine
from lmworks.serve.engine_process import EngineProcess

async def main():
    serving, loading = EngineProcess("serving", tiny_engine.tiny), EngineProcess("loading", tiny_engine.endless)
    tasks = [asyncio.create_task(backend.start()) for backend in (serving, loading)]
    await tasks[0]
    print(serving.handle.process.pid, loading.handle.process.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_engine_ends_with_server() -> None:
    """Neither one that waits for requests nor one that is still being loaded."""
    code = ORPHANS.format(folder=str(Path(tiny_engine.__file__).parent))
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    processes = [int(word) for word in server.stdout.readline().split()]
    assert len(processes) == 2 and not any(map(gone, processes))
    server.kill()
    server.wait()
    server.stdout.close()
    deadline = time.monotonic() + 30
    while not all(map(gone, processes)):
        assert time.monotonic() < deadline, "an engine's process is still there"
        time.sleep(0.02)


def test_a_kill_by_the_kernel_for_want_of_memory_is_counted(
    engine: EngineProcess, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = engine.ooms

    async def end() -> None:
        assert engine.handle is not None
        (tmp_path / "memory.events").write_text(f"oom 1\noom_kill {engine.handle.oom_kills + 1}\noom_group_kill 0\n")
        (tmp_path / "cgroup").write_text("0::/\n")
        monkeypatch.setattr(oom, "CGROUPS", tmp_path / "cgroup")
        monkeypatch.setattr(oom, "CGROUP_ROOT", tmp_path)
        os.kill(pid(engine), signal.SIGKILL)

    run(recovers(engine, end, "killed by SIGKILL, as the kernel does when memory runs out"))
    assert engine.ooms == engine.state.ooms == before + 1
