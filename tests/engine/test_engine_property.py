"""Random lives of requests in tiny pools: no block lost or shared wrongly, everyone ends, results as if alone."""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fake_device import FakeDevice, alone

from lmworks.engine.core.block_manager import BlockManager, IntegrityError
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import OutputDelta, Request, Result, Sequence
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.core.scheduler import Scheduler, Step
from lmworks.model import GPT
from lmworks.spec import EngineSpec, ModelSpec
from variations import with_slow

VOCAB = 50
EOS = 7


@dataclass(frozen=True)
class World:
    """One scenario; everything in it follows from the seed."""

    seed: int
    steps: int = 700  # while requests still arrive
    synchronous: bool = False
    guesses: bool = False

    def spec(self) -> EngineSpec:
        draw = random.Random(self.seed)
        block = draw.choice([1, 2, 4, 5])
        return EngineSpec(
            block=block,
            blocks=-(-24 // block) + draw.randrange(7),  # hardly more than one sequence needs
            context=24,
            max_seqs=draw.choice([2, 5, 8]),
            max_batch_tokens=draw.choice([1, 3, 8, 32]),
            prefix_cache=draw.random() < 0.8,
        )

    def request(self, draw: random.Random) -> Request:
        # Few beginnings, so that prompts share prefixes, within a tenant and across.
        beginning = [draw.randrange(2)] * draw.randrange(1, 12)
        prompt = beginning + [draw.randrange(VOCAB) for _ in range(draw.randrange(4))]
        n = draw.choice([1, 1, 1, 2, 4])
        params = SamplingParams(
            max_tokens=draw.randrange(1, 14),
            seed=draw.randrange(1000),
            n=n,
            best_of=n + 1 if draw.random() < 0.1 else None,
            ignore_eos=draw.random() < 0.5,
            logprobs=0,
        )
        return Request(
            prompt, params, draw.randrange(-1, 2), tenant=draw.choice(["", "a", "b"]), stream=draw.random() < 0.3
        )


class Guesser:
    """Guesses that are often right: the seeds of answers are public here."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def active(self, running: list[Sequence]) -> bool:
        return self.draw.random() < 0.7

    def propose(self, sequences: list[Sequence]) -> None:
        for each in sequences:
            if each.num_computed_tokens == len(each.tokens) - 1 and each.num_known_tokens == len(each.tokens):
                truth = alone(each.tokens, each.seed, self.draw.randrange(4), VOCAB)
                each.draft_tokens = [t if self.draw.random() < 0.7 else self.draw.randrange(VOCAB) for t in truth]


@dataclass
class Outcome:
    requests: list[Request]
    results: dict[int, Result]
    pieces: list[OutputDelta]
    cancelled: set[int]
    engine: Engine


def live(world: World) -> Outcome:
    draw = random.Random(world.seed + 1)
    device = FakeDevice(world.spec(), VOCAB, world.synchronous)
    engine = Engine(device, eos=[EOS], speculator=Guesser(draw) if world.guesses else None)
    requests: list[Request] = []
    pieces: list[OutputDelta] = []
    cancelled: set[int] = set()
    busy_share = draw.choice([0.1, 0.3])
    while engine.busy or len(device.steps) < world.steps:
        if (len(device.steps) < world.steps and draw.random() < busy_share) or not engine.busy:
            requests.append(world.request(draw))
            engine.add(requests[-1])
        if engine.requests and draw.random() < 0.02:
            victim = draw.choice(list(engine.requests))
            engine.cancel(victim)
            cancelled.add(victim)
        pieces += engine.step()
        if draw.random() < 0.1:
            engine.scheduler.block_manager.check(engine.scheduler.running)
        assert len(device.steps) < 20 * world.steps, "someone starves"
    results = {piece.request.id: piece.result for piece in pieces if piece.result is not None}
    return Outcome(requests, results, pieces, cancelled, engine)


def expected(request: Request, sequence: Sequence) -> list[int]:
    count = min(request.params.max_tokens, 24 - len(request.prompt))
    ends = () if request.params.ignore_eos else (EOS,)
    return alone(request.prompt, sequence.seed, count, VOCAB, ends)


def verify(outcome: Outcome) -> None:
    engine, device = outcome.engine, outcome.engine.runner
    engine.scheduler.block_manager.check([])
    assert engine.scheduler.block_manager.num_used_blocks == 0 and len(engine.scheduler.slots) == device.spec.max_seqs
    assert outcome.results.keys() == {request.id for request in outcome.requests}
    for request in outcome.requests:
        result = outcome.results[request.id]
        for sequence in request.sequences:
            answer, right = sequence.final_answer, expected(request, sequence)
            assert answer is not None
            if answer.finish_reason == "cancelled":
                assert request.id in outcome.cancelled
                assert answer.token_ids == right[: len(answer.token_ids)]
            else:
                assert answer.token_ids == right, f"request {request.id}, answer {sequence.index}"
            assert [each.token for each in answer.logprobs or []] == answer.token_ids
        assert len(result.answers) == request.params.n
        if request.stream:
            streamed = Counter[int]()
            for piece in (piece for piece in outcome.pieces if piece.request is request):
                streamed[piece.index] += len(piece.token_ids)
            assert all(streamed[each.index] == len(each.output_token_ids) for each in request.sequences)


@pytest.mark.parametrize("seed", with_slow(range(6), (4, 5)))
@pytest.mark.parametrize("kind", ["ahead", "at once", "guesses"])
def test_results_equal_single_requests(seed: int, kind: str) -> None:
    verify(live(World(seed, synchronous=kind == "at once", guesses=kind == "guesses")))


def test_random_schedules_cover_all_events() -> None:
    """Otherwise the test above shows nothing: all that can go wrong must happen often."""
    outcomes = [live(World(seed)) for seed in range(6)]
    metrics = [outcome.engine.metrics for outcome in outcomes]
    assert sum(each.num_preemptions for each in metrics) > 100
    assert sum(each.prefix_cache_hits for each in metrics) > 500
    assert sum(len(step.copies) for outcome in outcomes for step in outcome.engine.runner.steps) > 50
    assert sum(len(outcome.cancelled) for outcome in outcomes) > 20


def no_copy(pool: BlockManager, parent: Sequence, tokens: int) -> tuple[list[int], list[tuple[int, int]]]:
    """A branch in the middle of a block writes to its parent's."""
    blocks = parent.blocks[: pool.blocks_for(tokens)]
    pool.add_reference(blocks)
    return blocks, []


def free_shared(pool: BlockManager, sequence: Sequence) -> None:
    """Blocks that another sequence still holds go back to the pool."""
    for block in sequence.blocks:
        pool.ref_counts[block] = 0
        pool.free_blocks[block] = None
    sequence.blocks.clear()
    sequence.num_cached_blocks = 0


def cache_partial_blocks(pool: BlockManager, sequence: Sequence, _computed: int) -> None:
    """A block can be found before it is full."""
    for i, block in enumerate(sequence.blocks[: pool.blocks_for(sequence.num_computed_tokens)]):
        if block not in pool.block_hashes and (digest := pool.hashes(sequence, i + 1)[i]) not in pool.cached_blocks:
            pool.block_hashes[block], pool.cached_blocks[digest] = digest, block


def no_preempting(scheduler: Scheduler, sequence: Sequence, tokens: int) -> bool:
    """A sequence is given a block that is not free."""
    missing = scheduler.block_manager.blocks_for(tokens) - len(sequence.blocks)
    sequence.blocks += scheduler.running[0].blocks[:missing]
    return True


@pytest.mark.parametrize("checked", [True, False], ids=["by the check", "by the tokens"])
@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        (BlockManager, "fork", no_copy),
        (BlockManager, "free", free_shared),
        (BlockManager, "cache_full_blocks", cache_partial_blocks),
        (Scheduler, "allocate_slots", no_preempting),
    ],
)
def test_injected_bugs_are_found(
    where: type, name: str, bug: object, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong blocks are found by the check, and with the check switched off they give wrong answers."""
    monkeypatch.setattr(where, name, bug)
    if not checked:
        monkeypatch.setattr(BlockManager, "check", lambda pool, sequences: None)
    with pytest.raises(IntegrityError if checked else AssertionError):
        for seed in range(6):
            verify(live(World(seed)))


class Later(FakeDevice):
    """A runner on a CPU that is read only after the next step was launched, as on a GPU."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner.spec, runner.valid_vocab)
        self.runner = runner

    def admit(self, sequence: Sequence) -> None:
        self.runner.admit(sequence)

    def launch(self, step: Step) -> Any:
        return self.runner.launch(step)


@pytest.mark.parametrize("kind", ["ahead", pytest.param("at once", marks=pytest.mark.slow)])
def test_real_model_results_equal_single_requests(kind: str) -> None:
    """The same with a tiny network on a CPU, where the same request gives bitwise the same result in any batch."""
    torch.manual_seed(0)
    shape = {"vocab": VOCAB, "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}
    model = GPT(ModelSpec.from_preset("tiny", context=24, **shape)).eval()
    tight = EngineSpec(block=4, blocks=9, context=24, max_seqs=5, max_batch_tokens=12, batch_invariant=True)
    roomy = tight.replace(blocks=100, max_batch_tokens=100, prefix_cache=False)
    runner, other = (ModelRunner(copy.deepcopy(model), spec, "cpu", VOCAB) for spec in (tight, roomy))
    engine, lonely = Engine(Later(runner) if kind == "ahead" else runner, eos=[EOS]), Engine(other, eos=[EOS])
    draw, world = random.Random(3), World(3)
    requests = [world.request(draw) for _ in range(25)]
    pieces: list[OutputDelta] = []
    for request in requests:
        engine.add(request)
        pieces += [piece for _ in range(draw.randrange(4)) for piece in engine.step()]
    pieces += engine.run()
    results = {piece.request.id: piece.result for piece in pieces if piece.result is not None}
    assert engine.metrics.num_preemptions > 3 and engine.metrics.prefix_cache_hits > 30
    for request in requests:
        lonely.add(again := Request(request.prompt, request.params))
        [piece] = [piece for piece in lonely.run() if piece.request is again]
        result = results[request.id]
        assert piece.result is not None and piece.result.answers == result.answers
