"""The simulator: against the scheduler of the engine, against formulas of queueing, and against itself step by step."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from lmworks.engine.core.request import Request, SequenceStatus
from lmworks.engine.core.request import Sequence as EngineSequence
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.core.scheduler import Scheduler
from lmworks.fleet.autoscale import Static
from lmworks.fleet.routing import make_router
from lmworks.fleet.server import Server
from lmworks.fleet.server_model import ServerModel, StepTime
from lmworks.fleet.simulate import Run, simulate
from lmworks.fleet.trace import Arrival, Trace
from lmworks.spec import EngineSpec, SpecError

STEPS = StepTime(((0, 0.010), (4, 0.018), (16, 0.030)), key=1e-6, prompt_token=1e-4, prompt_key=1e-8)
SMALL = ServerModel(STEPS, blocks=40, block=4, max_seqs=6, max_batch_tokens=24, prefix_cache=False)


def trace(*arrivals: tuple[float, int, int], block: int = 16) -> Trace:
    return Trace(tuple(Arrival(*one) for one in arrivals), block)


def chance(seed: int, requests: int, rate: float, prompt: int, answer: int) -> Trace:
    rng = random.Random(seed)
    now, found = 0.0, []
    for _ in range(requests):
        found.append((now, rng.randint(1, prompt), rng.randint(1, answer)))
        now += rng.expovariate(rate)
    return trace(*found)


def run(what: Trace, model: ServerModel, replicas: int = 1, router: str = "round_robin") -> Run:
    return simulate(what, model, make_router(router), Static(replicas))


def test_one_request_by_hand() -> None:
    """10 tokens in, 3 out: a step with the prompt, then two of decoding, with 11 and 12 tokens in the cache."""
    model = SMALL.replace(request_s=0.5)
    (one,) = run(trace((0.0, 10, 3)), model).served
    prompt = 0.010 + 10 * 1e-4 + 10 * 5 * 1e-8
    assert one.ttft == pytest.approx(0.5 + prompt)
    assert one.e2e == pytest.approx(0.5 + prompt + 2 * 0.012 + (11 + 12) * 1e-6)


def engine_times(what: Trace, model: ServerModel) -> list[tuple[float, float, int]]:
    """(first token, last token, preemptions) of each request under the engine's own scheduler, each step as long as
    the model says."""
    spec = EngineSpec(
        block=model.block, blocks=model.blocks, context=1000, max_seqs=model.max_seqs,
        max_batch_tokens=model.max_batch_tokens, prefix_cache=False,
    )  # fmt: skip
    scheduler, token = Scheduler(spec, model.blocks), count(1)
    sequences: list[EngineSequence] = []
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    now, coming = 0.0, list(what.arrivals)
    while coming or scheduler.running or scheduler.waiting:
        if not scheduler.running and not scheduler.waiting:
            now = max(now, coming[0].at)
        while coming and coming[0].at <= now:
            one = coming.pop(0)
            tokens = [next(token) for _ in range(one.prompt)]
            request = Request(tokens, SamplingParams(max_tokens=one.answer))
            sequence = EngineSequence(request, 0, 0, list(tokens), one.prompt, one.prompt + one.answer)
            request.sequences = [sequence]
            sequences.append(sequence)
            scheduler.add([sequence])
        step = scheduler.schedule()
        # Prompts are what is computed before the first token, and again after a preemption.
        tokens = [c for c in step.chunks if c.count == 1 and c.num_logits]
        decoding = [c for c in tokens if c.start >= c.sequence.num_prompt_tokens]
        chunks = [c for c in step.chunks if c not in decoding]
        now += model.steps.mixed(
            len(decoding), sum(c.start + 1 for c in decoding), sum(c.count for c in chunks),
            sum(c.count * (c.start + c.count / 2) for c in chunks),
        )  # fmt: skip
        for chunk in step.chunks:
            if chunk.num_logits:
                sequence = chunk.sequence
                sequence.tokens[chunk.output_index :] = [next(token)]
                sequence.num_known_tokens = len(sequence.tokens)
                first.setdefault(id(sequence), now)
                if sequence.num_known_tokens == sequence.limit:
                    last[id(sequence)] = now
                    scheduler.finish(sequence)
    assert all(one.state is SequenceStatus.FINISHED for one in sequences)
    return [(first[id(one)], last[id(one)], one.preempted) for one in sequences]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("blocks", [40, 300])
def test_the_schedule_is_the_engines(seed: int, blocks: int) -> None:
    """Chunks, slots, budget, preemption: the same first and last token of every request. 40 blocks preempt."""
    model = SMALL.replace(blocks=blocks)
    what = chance(seed, 60, rate=12.0, prompt=60, answer=60)
    ours = run(what, model)
    theirs = engine_times(what, model)
    assert [one.preemptions for one in ours.served] == [preempted for _, _, preempted in theirs]
    assert (sum(one.preemptions for one in ours.served) > 0) == (blocks == 40)
    np.testing.assert_allclose([(one.first, one.last) for one in ours.served], [t[:2] for t in theirs], rtol=1e-9)


@pytest.mark.parametrize("router", ["least_loaded", "round_robin"])
def test_leaps_change_nothing(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With shared prefixes, eviction and preemption: the same as one step at a time."""
    rng = random.Random(1)
    arrivals = []
    for number, one in enumerate(chance(3, 80, rate=20.0, prompt=50, answer=50).arrivals):
        shared = tuple(range(1000 * (number % 5), 1000 * (number % 5) + rng.randint(0, 8)))
        own = tuple(range(10**6 + 100 * number, 10**6 + 100 * number + 8))
        arrivals.append(replace(one, prompt=one.prompt + 32, prefix=shared + own))
    what = Trace(tuple(arrivals), block=4)
    model = SMALL.replace(blocks=60, prefix_cache=True)
    leaping = run(what, model, 2, router)
    monkeypatch.setattr(Server, "alike", lambda self, decoding: 1)
    stepping = run(what, model, 2, router)
    assert sum(one.cached for one in leaping.served) > 100
    for ours, theirs in zip(leaping.served, stepping.served, strict=True):
        assert (ours.first, ours.last) == pytest.approx((theirs.first, theirs.last), rel=1e-9)
        assert (ours.cached, ours.preemptions) == (theirs.cached, theirs.preemptions)


def test_a_server_with_one_slot_is_an_m_d_1_queue() -> None:
    """Pollaczek-Khinchine: the mean wait is ρ·s / (2·(1 − ρ)) for a service time that never varies."""
    service, load = 0.1, 0.7
    model = ServerModel(StepTime(((0, service), (1, service))), blocks=1000, max_seqs=1)
    rng, now, arrivals = random.Random(5), 0.0, []
    for _ in range(15_000):
        arrivals.append((now, 1, 1))
        now += rng.expovariate(load / service)
    waits = [one.ttft - service for one in run(trace(*arrivals), model).served]
    assert np.mean(waits) == pytest.approx(load * service / (2 * (1 - load)), rel=0.07)


def test_the_same_seed_gives_the_same_run() -> None:
    what = chance(7, 200, rate=30.0, prompt=40, answer=40)
    first, again = (simulate(what, SMALL, make_router("power_of_two", 1), Static(3)) for _ in range(2))
    assert first == again
    assert simulate(what, SMALL, make_router("power_of_two", 2), Static(3)) != first


def test_requests_that_no_server_has_room_for_are_rejected() -> None:
    found = run(trace((0.0, 100, 10), (1.0, 200, 10)), SMALL)
    assert (len(found.served), found.rejected) == (1, 1)


def test_a_prefix_is_found_until_it_is_evicted() -> None:
    """Ids of 8 tokens. The second request finds all of the first's blocks but the one that holds its last token."""
    model = SMALL.replace(blocks=12, prefix_cache=True)
    ids = tuple(range(4))
    same = [Arrival(0.0, 32, 2, ids), Arrival(10.0, 32, 2, ids), Arrival(30.0, 32, 2, ids)]
    other = Arrival(20.0, 40, 2, tuple(range(10, 15)))  # takes 11 of 12 blocks: all of the first prefix goes
    found = run(Trace((same[0], same[1], other, same[2]), block=8), model).served
    assert [one.cached for one in found] == [0, 24, 0, 0]
    assert found[1].ttft < found[0].ttft


def test_ids_must_be_whole_blocks() -> None:
    with pytest.raises(SpecError, match="do not divide"):
        run(trace((0.0, 4, 4), block=6), SMALL)
