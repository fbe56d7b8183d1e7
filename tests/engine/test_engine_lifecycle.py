"""How a request lives: launched ahead, stopped in every way, cancelled at any time, counted, streamed."""

from __future__ import annotations

import asyncio
import copy
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from fake_device import FakeDevice, StepOutput, TokenOutput, Work, alone

from lmworks.data.tokenizer import ByteTokenizer
from lmworks.engine.async_engine import AsyncEngine, Consumer, send
from lmworks.engine.core.block_manager import IntegrityError
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import OutputDelta, Request, Result, SequenceStatus
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.core.scheduler import Step
from lmworks.engine.grammars.grammar import grammar
from lmworks.engine.offline import OfflineEngine
from lmworks.model import GPT
from lmworks.spec import EngineSpec, LMWorksError, ModelSpec, SpecError

VOCAB = 50
SPEC = EngineSpec(block=4, blocks=64, context=64, max_seqs=8, max_batch_tokens=32)


@dataclass
class Diary(FakeDevice):
    """Writes down when steps are launched and read."""

    entries: list[str] = field(default_factory=list)

    def launch(self, step: Step) -> StepOutput:
        self.entries.append(f"launch {len(self.steps)}")
        return super().launch(step)

    def run_until(self, launched: StepOutput) -> None:
        self.entries.append(f"read {self.steps.index(self.step_of(launched))}")
        super().run_until(launched)

    def step_of(self, launched: StepOutput) -> Step:
        return self.steps[len(self.steps) - len(self.queue) + self.queue.index(launched)]


@dataclass
class Typist(Diary):
    """Answers every prompt of one token with the same text, and then with itself."""

    script: list[int] = field(default_factory=list)

    def pick(self, work: Work, tokens: list[int]) -> TokenOutput:
        token = self.script[(work.start + len(tokens) - 1) % len(self.script)]
        self.recent[work.slot] = token
        return TokenOutput([token])


def result_of(engine: Engine, request: Request) -> Result:
    engine.add(request)
    return next(piece.result for piece in engine.run() if piece.request is request and piece.result)


def typed(text: str, params: SamplingParams, **spec: int) -> Result:
    script = [*text.encode(), ByteTokenizer.eot]
    engine = Engine(Typist(SPEC.replace(**spec), ByteTokenizer.vocab_size, script=script), ByteTokenizer())
    return result_of(engine, Request([1], params))


def test_end_of_text_stops_and_is_left_out_of_the_text() -> None:
    result = typed("hello", SamplingParams(max_tokens=20))
    assert (result.text, result.finish_reason, result.answers[0].stop_reason) == ("hello", "stop", ByteTokenizer.eot)
    assert result.token_ids == [*b"hello", ByteTokenizer.eot]


def test_end_of_text_can_be_ignored() -> None:
    result = typed("hello", SamplingParams(max_tokens=9, ignore_eos=True))
    assert (len(result.token_ids), result.text, result.finish_reason) == (9, "hellohel", "length")


def test_max_tokens_and_the_context_end_an_answer() -> None:
    assert typed("hello", SamplingParams(max_tokens=3)).text == "hel"
    result = typed("hello world", SamplingParams(max_tokens=30), context=8)
    assert (result.text, result.finish_reason) == ("hello w", "length")


def test_stop_strings_across_tokens() -> None:
    result = typed("one. two. three", SamplingParams(max_tokens=30, stop=["two.", "zzz"]))
    assert (result.text, result.finish_reason, result.answers[0].stop_reason) == ("one. ", "stop", "two.")
    assert bytes(result.token_ids) == b"one. two."
    assert typed("one. two.", SamplingParams(max_tokens=30, stop="e.", include_stop=True)).text == "one."


def test_stop_tokens_end_like_end_of_text() -> None:
    result = typed("hello", SamplingParams(max_tokens=20, stop_token_ids=[ord("l")]))
    assert (result.text, result.token_ids, result.answers[0].stop_reason) == ("he", [*b"hel"], ord("l"))


def test_nothing_stops_before_min_tokens() -> None:
    params = SamplingParams(max_tokens=20, min_tokens=4, stop_token_ids=[ord("l")], stop=["he", "lo"])
    result = typed("hello", params)
    # The second l is the fourth token: it may end the answer, and does so before "lo" is complete.
    assert (result.text, result.token_ids) == ("hel", [*b"hell"])


def test_next_step_launches_before_last_is_read() -> None:
    device = Diary(SPEC, VOCAB)
    result_of(Engine(device), Request([1, 2], SamplingParams(max_tokens=3, seed=1)))
    assert device.entries == ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "read 2"]


def test_synchronous_runner_is_read_at_once() -> None:
    device = Diary(SPEC, VOCAB, synchronous=True)
    engine = Engine(device)
    engine.add(Request([1, 2], SamplingParams(max_tokens=3, seed=1), stream=True))
    assert [len(engine.step()) for _ in range(3)] == [1, 1, 1] and not engine.busy
    assert device.entries == ["launch 0", "read 0", "launch 1", "read 1", "launch 2", "read 2"]


def test_token_after_end_is_dropped() -> None:
    right = alone([1, 2], 1, 20, VOCAB)
    end = next(i for i in range(2, 20) if right[i] not in right[:i])
    device = FakeDevice(SPEC, VOCAB)
    result = result_of(Engine(device, eos=[right[end]]), Request([1, 2], SamplingParams(max_tokens=20, seed=1)))
    assert result.token_ids == right[: end + 1]
    assert len(device.steps) == end + 2  # one too many was under way


def test_first_of_n_answers_equals_single_answer() -> None:
    several = result_of(Engine(FakeDevice(SPEC, VOCAB)), Request([1, 2, 3], SamplingParams(max_tokens=6, seed=9, n=3)))
    one = result_of(Engine(FakeDevice(SPEC, VOCAB)), Request([1, 2, 3], SamplingParams(max_tokens=6, seed=9)))
    assert several.token_ids == one.token_ids
    assert len({tuple(answer.token_ids) for answer in several.answers}) == 3


def test_engine_seed_repeats_unseeded_requests() -> None:
    def answers(seed: int) -> list[list[int]]:
        engine = Engine(FakeDevice(SPEC, VOCAB), seed=seed)
        return [result_of(engine, Request([1, 2], SamplingParams(max_tokens=6))).token_ids for _ in range(3)]

    assert answers(0) == answers(0) != answers(1)
    assert len(set(map(tuple, answers(0)))) == 3


def test_best_of_returns_most_likely() -> None:
    params = SamplingParams(max_tokens=5, seed=3, n=2, best_of=6)
    request = Request([1, 2], params)
    result = result_of(Engine(FakeDevice(SPEC, VOCAB)), request)
    scores = sorted((-sum(each.output_token_ids) / 10 for each in request.sequences), reverse=True)
    given = [answer.cumulative_logprob for answer in result.answers]
    assert given == pytest.approx(scores[:2]) and len(request.sequences) == 6


def test_cancel_frees_all_blocks() -> None:
    for steps in range(8):
        device = FakeDevice(SPEC.replace(max_batch_tokens=4), VOCAB)
        engine = Engine(device)
        long, other = Request([1] * 10, SamplingParams(max_tokens=9, seed=1, n=3)), Request([2], SamplingParams(seed=2))
        engine.add(long)
        engine.add(other)
        pieces = [piece for _ in range(steps) for piece in engine.step()]
        assert engine.cancel(long.id) and not engine.cancel(long.id)
        assert all(each.state is SequenceStatus.FINISHED and not each.blocks for each in long.sequences)
        engine.scheduler.block_manager.check(engine.scheduler.running)
        pieces += engine.run()
        results = {piece.request.id: piece.result for piece in pieces if piece.result}
        assert [answer.finish_reason for answer in results[long.id].answers] == ["cancelled"] * 3
        assert results[other.id].token_ids == alone([2], 2, 16, VOCAB)
        assert engine.scheduler.block_manager.num_used_blocks == 0
    assert not engine.cancel(12345)


def test_nonfinite_logits_end_only_that_answer() -> None:
    device = FakeDevice(SPEC, VOCAB, bad_seeds={5})
    engine = Engine(device)
    prompt = list(range(10))
    bad, good = Request(prompt, SamplingParams(max_tokens=6, seed=5)), Request(prompt, SamplingParams(seed=6))
    engine.add(bad)
    engine.add(good)
    results = {piece.request.id: piece.result for piece in engine.run()}
    assert results[bad.id].finish_reason == "error" and "not finite" in (results[bad.id].error or "")
    assert results[good.id].token_ids == alone(prompt, 6, 16, VOCAB)


def test_blocks_of_a_failed_sequence_are_not_reused() -> None:
    engine = Engine(FakeDevice(SPEC, VOCAB, bad_seeds={5}))
    prompt = list(range(10))
    result_of(engine, Request(prompt, SamplingParams(seed=5)))
    assert result_of(engine, Request(prompt, SamplingParams(seed=6))).cached_tokens == 0
    assert result_of(engine, Request(prompt, SamplingParams(seed=6))).cached_tokens == 8


@dataclass
class Spoiling(FakeDevice):
    """Whose token 49 spoils all that is computed with it in one step, and all that follows from that."""

    spoilt: set[tuple[int, int]] = field(default_factory=set)  # block, place

    def places(self, work: Work, end: int) -> list[tuple[int, int]]:
        size = self.spec.block
        return [(work.table[place // size], place % size) for place in range(end)]

    def write(self, work: Work, tokens: list[int]) -> None:
        super().write(work, tokens)
        places = self.places(work, work.start + len(tokens))
        spoils = 49 in tokens or not self.spoilt.isdisjoint(places[: work.start])
        (self.spoilt.update if spoils else self.spoilt.difference_update)(places[work.start :])

    def pick(self, work: Work, tokens: list[int]) -> TokenOutput:
        bad = not self.spoilt.isdisjoint(self.places(work, work.start + len(tokens)))
        return replace(super().pick(work, tokens), bad=bad)


@pytest.mark.parametrize("answers", [1, 3])
@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_sequence_that_matched_corrupted_blocks_is_recomputed(steps: int, synchronous: bool, answers: int) -> None:
    """The prompt of the bad one is cut: its beginning can be found before it is known to be bad."""
    spec = SPEC.replace(max_batch_tokens=16)
    engine = Engine(Spoiling(spec, VOCAB, synchronous=synchronous))
    shared = list(range(20, 32))
    bad = Request([*shared, 49, *[1] * 30], SamplingParams(max_tokens=4, seed=5))
    good = Request([*shared, 2, 3], SamplingParams(max_tokens=9, seed=6, n=answers))
    engine.add(bad)
    pieces = [piece for _ in range(steps) for piece in engine.step()]
    engine.add(good)
    results = {piece.request.id: piece.result for piece in [*pieces, *engine.run()]}
    assert results[bad.id].finish_reason == "error" and bad.sequences[0].preempted == 0
    seeds = [sequence.seed for sequence in good.sequences]
    assert [answer.token_ids for answer in results[good.id].answers] == [
        alone([*shared, 2, 3], seed, 9, VOCAB) for seed in seeds
    ]
    assert good.sequences[0].skip_prefix_cache == (steps < 3 or not synchronous)  # else it came too late to find them
    engine.scheduler.block_manager.check([])


def test_block_pool_is_checked_when_idle() -> None:
    engine = Engine(FakeDevice(SPEC, VOCAB))
    engine.add(Request([1, 2], SamplingParams(max_tokens=3)))
    engine.step()
    engine.scheduler.block_manager.allocate(1)  # nobody will ever give it back
    with pytest.raises(IntegrityError, match="neither free nor held"):
        engine.run()


def test_failed_engine_rejects_later_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(SPEC, VOCAB)
    engine = Engine(device)
    engine.add(Request([1], SamplingParams()))
    monkeypatch.setattr(device, "launch", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    with pytest.raises(LMWorksError, match=r"stopped after an error: .*out of memory"):
        engine.step()


def broken(step: Step) -> StepOutput:
    raise RuntimeError("the device is out of memory")


def test_grammar_consumes_token_before_next_step() -> None:
    pytest.importorskip("llguidance")
    device = Typist(SPEC, ByteTokenizer.vocab_size, script=[*b"abab", ByteTokenizer.eot])
    engine = Engine(device, ByteTokenizer())
    result = result_of(engine, Request([1], SamplingParams(max_tokens=20, regex="(ab){1,9}")))
    assert (result.text, result.finish_reason) == ("abab", "stop")
    assert device.entries == [f"{what} {step}" for step in range(5) for what in ("launch", "read")]


def test_all_end_tokens_end_structured_answers() -> None:
    """A chat model ends its turn with a token of its own, which is not the tokenizer's end of text."""
    pytest.importorskip("llguidance")
    device = FakeDevice(SPEC, ByteTokenizer.vocab_size)
    Engine(device, ByteTokenizer(), eos=[7])
    assert device.grammars is not None
    matcher = device.grammars.matcher(SamplingParams(regex="(ab){1,9}"))
    allowed = []
    for byte in b"ab":
        matcher.accept(byte)
        bits = torch.zeros(1, device.grammars.mask_words, dtype=torch.int32)
        device.grammars.fill_masks(bits, [matcher])
        allowed.append({token for token in range(device.valid_vocab) if bits[0, token // 32] >> token % 32 & 1})
    assert allowed == [{ord("b")}, {ord("a"), 7, ByteTokenizer.eot}]


def test_ordinary_end_token_does_not_end_incomplete_grammar() -> None:
    """Some models end their turn with a token that texts hold as well, a line break for one."""
    pytest.importorskip("llguidance")
    device = Typist(SPEC, ByteTokenizer.vocab_size, script=[*b'{"a":\n1}\n'])
    engine = Engine(device, ByteTokenizer(), eos=[ord("\n")])
    result = result_of(engine, Request([1], SamplingParams(max_tokens=30, json_schema={"type": "object"})))
    assert (result.text, result.finish_reason) == ('{"a":\n1}', "stop")
    open_ended = result_of(engine, Request([1], SamplingParams(max_tokens=30, regex=r'[{]"a":(\n1\\})*')))
    assert (open_ended.text, open_ended.answers[0].stop_reason) == ('{"a":', ord("\n")), "where it may end, it ends"
    asked = SamplingParams(max_tokens=30, json_schema={"type": "object"}, stop_token_ids=[ord("1")])
    result = result_of(engine, Request([1], asked))
    assert (result.text, result.answers[0].stop_reason) == ('{"a":\n', ord("1")), "who names a token means it"


def test_answer_ends_when_grammar_is_complete() -> None:
    pytest.importorskip("llguidance")
    device = Typist(SPEC, ByteTokenizer.vocab_size, script=[*b"yes, of course"])
    params = SamplingParams(max_tokens=20, choice=["yes", "no"], ignore_eos=True)
    result = result_of(Engine(device, ByteTokenizer()), Request([1], params))
    assert (result.text, result.finish_reason) == ("yes", "stop")


def test_grammar_applies_to_own_answer_only() -> None:
    """A network with random weights: only what the mask allows can come out right by chance."""
    pytest.importorskip("llguidance")
    torch.manual_seed(0)
    model = GPT(ModelSpec.from_preset("tiny", vocab=320, layers=2, context=64)).eval()
    shapes = [{"regex": "[ab]{3}-[0-9]+"}, {"choice": ["left", "right"]}, {}, {"json_schema": {"type": "boolean"}}]

    def texts(shapes: list[dict[str, Any]]) -> list[str]:
        runner = ModelRunner(copy.deepcopy(model), SPEC.replace(batch_invariant=True), "cpu", ByteTokenizer.vocab_size)
        engine = Engine(runner, ByteTokenizer())
        requests = [Request([1, 2], SamplingParams(max_tokens=12, seed=4, n=2, **shape)) for shape in shapes]
        for each in requests:
            engine.add(each)
        results = {piece.request.id: piece.result for piece in engine.run() if piece.result}
        return [answer.text for each in requests for answer in results[each.id].answers]

    *matching, plain, plain_too, yes, no = texts(shapes)
    assert all(re.fullmatch("[ab]{3}-[0-9]+", text) for text in matching[:2])
    assert all(text in ("left", "right") for text in matching[2:])
    assert all(text.strip() in ("true", "false") for text in (yes, no))
    assert [plain, plain_too] == texts([{}])


def test_too_complex_grammar_ends_only_its_answer() -> None:
    pytest.importorskip("llguidance")
    torch.manual_seed(0)
    model = GPT(ModelSpec.from_preset("tiny", vocab=320, layers=2, context=64)).eval()
    engine = Engine(ModelRunner(model, SPEC, "cpu", ByteTokenizer.vocab_size), ByteTokenizer())
    requests = [
        Request([1, 2], SamplingParams(max_tokens=40, seed=1, regex=regex))
        for regex in ("((.{0,30}){30}){30}", "[ab]{40}")
    ]
    for request in requests:
        engine.add(request)
    results = {piece.request.id: piece.result for piece in engine.run()}
    heavy, light = (results[request.id] for request in requests)
    assert heavy is not None and "cannot follow its grammar: it is too complex" in (heavy.error or "")
    assert light is not None and re.fullmatch("[ab]{40}", light.text)


def test_precompiled_grammar_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others were compiled since, so that it is not kept any more."""
    pytest.importorskip("llguidance")
    engine = Engine(Typist(SPEC, ByteTokenizer.vocab_size, script=[*b"yes, of course"]), ByteTokenizer())
    params, grammars = SamplingParams(max_tokens=20, choice=["yes", "no"], n=2), engine.runner.grammars
    assert grammars is not None
    compiled = grammars.compile(grammar(params))
    grammars.compiled.drop(grammar(params))
    monkeypatch.setattr(grammars, "compile", lambda *_: pytest.fail("the engine's thread compiles"))
    result = result_of(engine, Request([1], params, grammar=compiled))
    assert [each.text for each in result.answers] == ["yes", "yes"]


def test_invalid_grammar_does_not_affect_others() -> None:
    pytest.importorskip("llguidance")
    engine = Engine(Typist(SPEC, ByteTokenizer.vocab_size, script=[*b"hello"]), ByteTokenizer())
    engine.add(bad := Request([1], SamplingParams(regex="(")))
    assert result_of(engine, Request([1], SamplingParams(max_tokens=5))).text == "hello"
    engine.add(bad)
    [piece] = engine.run()
    assert piece.result is not None and "grammar is invalid" in (piece.result.error or "")


def test_metrics_counters() -> None:
    engine = Engine(FakeDevice(SPEC, VOCAB))
    first, second = (Request(list(range(10)), SamplingParams(max_tokens=5, seed=seed)) for seed in (1, 2))
    result_of(engine, first)
    result = result_of(engine, second)
    metrics = engine.metrics
    assert (metrics.prompt_tokens, metrics.generation_tokens, metrics.finished) == (20, 10, {"length": 2})
    assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits, result.cached_tokens) == (20, 8, 8)
    assert metrics.computed_tokens == 14 + 6 and metrics.steps == 10 and metrics.mean_batch == 1
    assert metrics.time_to_first_token_seconds.count == 2 and metrics.inter_token_latency_seconds.count == 8
    assert metrics.kv_cache_usage_peak == 4 / 64 and metrics.kv_cache_usage_perc == 0
    assert 0 <= result.times["queue"] <= result.times["first_token"] <= result.times["total"]


def test_stream_deltas_add_up_to_result() -> None:
    script = [*"naïve – ✓ END more".encode(), ByteTokenizer.eot]
    engine = Engine(Typist(SPEC, ByteTokenizer.vocab_size, script=script), ByteTokenizer())
    engine.add(Request([1], SamplingParams(max_tokens=40, stop=" END"), stream=True))
    pieces = list(stepped(engine))
    result = pieces[-1].result
    assert result is not None and result.text == "naïve – ✓"
    assert "".join(piece.text for piece in pieces) == result.text
    assert [token for piece in pieces for token in piece.token_ids] == result.token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]


def stepped(engine: Engine) -> Iterator[OutputDelta]:
    while engine.busy:
        yield from engine.step()


# --- the same for asyncio ---


def request(seed: int, tokens: int = 20) -> Request:
    return Request([1, 2, seed], SamplingParams(max_tokens=tokens, seed=seed))


def test_concurrent_streams() -> None:
    async def consume(serving: AsyncEngine, seed: int) -> list[int]:
        return [token async for piece in serving.stream(request(seed)) for token in piece.token_ids]

    async def main() -> list[list[int]]:
        async with AsyncEngine(Engine(FakeDevice(SPEC, VOCAB))) as serving:
            return await asyncio.gather(*(consume(serving, seed) for seed in range(20)))

    assert asyncio.run(main()) == [alone([1, 2, seed], seed, 20, VOCAB) for seed in range(20)]


@pytest.mark.parametrize("how", ["break", "cancel"])
def test_closed_stream_cancels_request(how: str) -> None:
    engine = Engine(Slow(SPEC.replace(context=60), VOCAB))

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            left = request(1, 50)
            seen = asyncio.Event()

            async def consume() -> None:
                stream = serving.stream(left)
                async for _ in stream:
                    seen.set()
                    if how == "break":
                        break
                await stream.aclose()

            task = asyncio.create_task(consume())
            await seen.wait()
            if how == "cancel":
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            other = [piece async for piece in serving.stream(request(2, 3))]
            assert other[-1].result is not None
            assert (
                left.sequences[0].final_answer is not None
                and left.sequences[0].final_answer.finish_reason == "cancelled"
            )
            assert len(left.sequences[0].output_token_ids) < 50

    asyncio.run(main())
    assert engine.scheduler.block_manager.num_used_blocks == 0


class Slow(FakeDevice):
    """A step takes until somebody else had a turn."""

    def launch(self, step: Step) -> StepOutput:
        threading.Event().wait(0.002)
        return super().launch(step)


def test_engine_failure_reaches_all_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(SPEC, VOCAB)
    monkeypatch.setattr(device, "launch", broken)

    async def consume(serving: AsyncEngine, seed: int) -> None:
        async for _ in serving.stream(request(seed)):
            pass

    async def main() -> None:
        async with AsyncEngine(Engine(device)) as serving:
            outcomes = await asyncio.gather(*(consume(serving, seed) for seed in range(3)), return_exceptions=True)
            outcomes += await asyncio.gather(consume(serving, 9), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [LMWorksError] * 4
        assert all("out of memory" in str(outcome) for outcome in outcomes)

    asyncio.run(main())


def test_close_ends_thread_and_fails_waiting_consumers() -> None:
    async def main() -> None:
        serving = AsyncEngine(Engine(Slow(SPEC, VOCAB)))
        stream = serving.stream(request(1, 50))
        await anext(stream)
        await asyncio.to_thread(serving.close)
        assert not serving.thread.is_alive()
        with pytest.raises(LMWorksError, match="closed"):
            async for _ in stream:
                pass
        with pytest.raises(LMWorksError, match="closed"):
            await anext(serving.stream(request(2)))

    asyncio.run(main())


def test_an_engine_has_one_driver() -> None:
    """Two would take each other's pieces, and one of them wait for ever."""
    engine = Engine(Slow(SPEC, VOCAB))
    offline, wishes = OfflineEngine(engine), SamplingParams(max_tokens=20, seed=3)

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            with pytest.raises(LMWorksError, match="an AsyncEngine runs it"):
                AsyncEngine(engine)
            with pytest.raises(LMWorksError, match="an AsyncEngine runs it"):
                await asyncio.to_thread(offline.generate, [[1, 2, 3]], [wishes], False)
            assert [token async for piece in serving.stream(request(2)) for token in piece.token_ids] == alone(
                [1, 2, 2], 2, 20, VOCAB
            )
            await anext(serving.stream(request(1, 50)))  # and is left unfinished

    asyncio.run(main())
    [result] = offline.generate([[1, 2, 3]], [wishes], False)  # once it is closed, the engine is free again
    assert result.token_ids == alone([1, 2, 3], 3, 20, VOCAB)
    stream = offline.stream([1, 2, 3], wishes)
    next(stream)
    with pytest.raises(LMWorksError, match="the engine is in use: wait"):
        AsyncEngine(engine)
    stream.close()
    AsyncEngine(engine).close()
    assert engine.scheduler.block_manager.num_used_blocks == 0


def test_rejected_request_raises_for_its_consumer_only() -> None:
    async def main() -> None:
        async with AsyncEngine(Engine(FakeDevice(SPEC, VOCAB))) as serving:
            with pytest.raises(SpecError, match="prompt is empty"):
                await anext(serving.stream(Request([], SamplingParams())))
            assert [piece async for piece in serving.stream(request(1))][-1].result is not None

    asyncio.run(main())


def test_closed_event_loop_does_not_affect_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the question whether it is closed and the call."""
    loop = asyncio.new_event_loop()
    loop.close()
    monkeypatch.setattr(loop, "is_closed", lambda: False)
    send(loop, [(Consumer(loop), LMWorksError("gone"))])
