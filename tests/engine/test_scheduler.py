"""Who computes what in a step: order, budget, room, priorities, and that nobody starves."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from lmworks.engine.core.request import PLACEHOLDER_TOKEN, Request, Sequence, SequenceStatus
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.core.scheduler import AGEING, Scheduler, Step, StepBudget
from lmworks.spec import EngineSpec


def make(blocks: int = 100, block: int = 4, seqs: int = 8, tokens: int = 32, cache: bool = True) -> Scheduler:
    spec = EngineSpec(block=block, blocks=blocks, context=1000, max_seqs=seqs, max_batch_tokens=tokens)
    return Scheduler(spec.replace(prefix_cache=cache), blocks)


fresh = count(1000)


def add(
    scheduler: Scheduler, prompt: int | list[int], answer: int = 4, priority: int = 0, n: int = 1, tenant: str = ""
) -> Request:
    """A request; a number stands for a prompt of that length which shares nothing with any other."""
    tokens = [next(fresh) for _ in range(prompt)] if isinstance(prompt, int) else prompt
    request = Request(tokens, SamplingParams(max_tokens=answer, n=n), priority, tenant)
    request.sequences = [Sequence(request, i, i, list(tokens), len(tokens), len(tokens) + answer) for i in range(n)]
    scheduler.add(request.sequences)
    return request


def read(scheduler: Scheduler, step: Step) -> None:
    """The tokens of a step become known; sequences that are complete end."""
    for chunk in step.chunks:
        sequence = chunk.sequence
        if chunk.num_logits and sequence.state is not SequenceStatus.FINISHED:
            picked = [*sequence.draft_tokens[: chunk.num_logits - 1], next(fresh)]
            sequence.tokens[chunk.output_index :] = picked
            sequence.num_known_tokens = len(sequence.tokens)
            if sequence.num_known_tokens == sequence.limit:
                scheduler.finish(sequence)


def run(scheduler: Scheduler) -> Step:
    step = scheduler.schedule()
    scheduler.block_manager.check(scheduler.running)
    assert step.tokens <= scheduler.spec.max_batch_tokens
    read(scheduler, step)
    return step


def shape(step: Step, *requests: Request) -> list[tuple[int, int, int, int]]:
    """Which request's chunk computes what: (request, start, count, wanted)."""
    return [(requests.index(c.sequence.request), c.start, c.count, c.num_logits) for c in step.chunks]


def until(scheduler: Scheduler, ready: Callable[[], bool], most: int = 2000) -> int:
    for steps in range(most):
        if ready():
            return steps
        run(scheduler)
    raise AssertionError("it never happened")


def done(request: Request) -> bool:
    return all(each.state is SequenceStatus.FINISHED for each in request.sequences)


def test_decode_precedes_chunked_prefill() -> None:
    scheduler = make(tokens=10)
    short = add(scheduler, 4, answer=10)
    assert shape(run(scheduler), short) == [(0, 0, 4, 1)]
    long, later = add(scheduler, 21), add(scheduler, 3)
    both = (short, long, later)
    assert shape(run(scheduler), *both) == [(0, 4, 1, 1), (1, 0, 9, 0)]
    assert shape(run(scheduler), *both) == [(0, 5, 1, 1), (1, 9, 9, 0)]
    # What the end of the long prompt leaves of the budget goes to the next.
    assert shape(run(scheduler), *both) == [(0, 6, 1, 1), (1, 18, 3, 1), (2, 0, 3, 1)]
    assert shape(run(scheduler), *both) == [(0, 7, 1, 1), (1, 21, 1, 1), (2, 3, 1, 1)]


def test_single_token_chunks_come_first() -> None:
    scheduler = make(tokens=10)
    add(scheduler, 9)
    add(scheduler, 4)
    assert [chunk.count for chunk in run(scheduler).chunks] == [1, 9]


def test_in_flight_tokens_respect_limit() -> None:
    scheduler = make()
    request = add(scheduler, 4, answer=2)
    [sequence] = request.sequences
    first = scheduler.schedule()
    assert sequence.tokens[4:] == [PLACEHOLDER_TOKEN] and sequence.num_computed_tokens == 4
    second = scheduler.schedule()
    assert shape(second, request) == [(0, 4, 1, 1)]
    assert sequence.tokens[4:] == [PLACEHOLDER_TOKEN] * 2
    assert scheduler.schedule().chunks == []
    sequence.tokens[4], sequence.num_known_tokens = 77, 5
    assert scheduler.schedule().chunks == []
    assert [step.chunks[0].output_index for step in (first, second)] == [4, 5]


def test_admission_by_priority_then_arrival() -> None:
    scheduler = make(seqs=1)
    requests = [add(scheduler, 4, answer=1, priority=p) for p in (1, 0, -1, 0)]
    order = [requests.index(run(scheduler).chunks[0].sequence.request) for _ in requests]
    assert order == [2, 1, 3, 0]


def test_latest_sequence_is_preempted_and_resumed() -> None:
    scheduler = make(blocks=6, cache=False)
    first, second = add(scheduler, 8, answer=12), add(scheduler, 8, answer=12)
    until(scheduler, lambda: scheduler.preemptions > 0)
    assert (first.sequences[0].preempted, second.sequences[0].preempted) == (0, 1)
    waiting = second.sequences[0]
    assert waiting.state is SequenceStatus.WAITING and not waiting.blocks and waiting.slot == -1
    until(scheduler, lambda: done(first))
    step = run(scheduler)
    # Computed again from the beginning, its answer so far included.
    [chunk] = step.chunks
    assert chunk.sequence is waiting and (chunk.start, chunk.num_logits) == (0, 1) and chunk.count > 8
    until(scheduler, lambda: done(second))
    assert scheduler.block_manager.num_used_blocks == 0


def test_lower_priority_is_preempted() -> None:
    scheduler = make(blocks=6, cache=False)
    relaxed, urgent = add(scheduler, 8, answer=12, priority=1), add(scheduler, 8, answer=12)
    until(scheduler, lambda: scheduler.preemptions > 0)
    assert (relaxed.sequences[0].preempted, urgent.sequences[0].preempted) == (1, 0)


def test_high_priority_request_preempts() -> None:
    scheduler = make(seqs=2)
    relaxed = [add(scheduler, 4, answer=100, priority=1) for _ in range(2)]
    run(scheduler)
    equal, urgent = add(scheduler, 4, priority=1), add(scheduler, 4, priority=0)
    step = run(scheduler)
    assert urgent.sequences[0].state is SequenceStatus.RUNNING and equal.sequences[0].state is SequenceStatus.WAITING
    assert [request.sequences[0].preempted for request in relaxed] == [0, 1]
    assert {chunk.sequence.request.priority for chunk in step.chunks} == {0, 1}


def test_no_preemption_where_it_would_not_free_enough_blocks() -> None:
    scheduler = make(blocks=10, block=1)
    add(scheduler, 5, answer=2, priority=0)
    add(scheduler, 2, answer=2, priority=2)
    run(scheduler)
    add(scheduler, 6, answer=2, priority=1)
    run(scheduler)
    assert scheduler.preemptions == 0


def test_no_admission_past_a_sequence_that_does_not_fit_yet() -> None:
    scheduler = make(blocks=10, block=1)
    add(scheduler, 6, answer=3)
    run(scheduler)
    large, small = add(scheduler, 8, answer=2), add(scheduler, 1, answer=1)
    run(scheduler)
    assert small.sequences[0].state is SequenceStatus.WAITING
    until(scheduler, lambda: done(large))


def test_no_starvation_under_a_stream_of_high_priority_requests() -> None:
    """One level of priority is worth AGEING steps: who came that long before goes first."""
    scheduler = make(seqs=1)
    patient = add(scheduler, 4, answer=1, priority=1)

    def served() -> bool:
        add(scheduler, 4, answer=1, priority=0)  # one in every step, and one is served in every step
        return done(patient)

    waited = until(scheduler, served)
    assert AGEING - 2 <= waited <= AGEING + 2


def test_a_preempted_request_is_not_overtaken_by_later_ones() -> None:
    scheduler = make(blocks=12, block=2, seqs=4, tokens=8)
    old = [add(scheduler, 6, answer=10) for _ in range(2)]
    run(scheduler)

    def served() -> bool:
        add(scheduler, 6, answer=10)
        return all(map(done, old))

    assert until(scheduler, served) < 50
    assert scheduler.preemptions > 0


def test_the_first_in_rank_is_never_preempted() -> None:
    scheduler = make(blocks=9, block=2, seqs=6, tokens=8)
    requests = [add(scheduler, 5, answer=12) for _ in range(12)]
    for _ in range(5000):
        left = [request for request in requests if not done(request)]
        if not left:
            break
        before = left[0].sequences[0].preempted
        run(scheduler)
        assert left[0].sequences[0].preempted == before
    assert all(map(done, requests)) and scheduler.preemptions > 5


def test_shared_prefix_is_computed_once() -> None:
    scheduler = make()
    prompt = list(range(10))
    first = add(scheduler, prompt)
    run(scheduler)
    second, stranger = add(scheduler, [*prompt, 50]), add(scheduler, prompt, tenant="other")
    step = run(scheduler)
    assert (1, 8, 3, 1) in shape(step, first, second, stranger)
    assert (2, 0, 10, 1) in shape(step, first, second, stranger)
    assert second.cached_tokens == 8 and stranger.cached_tokens == 0
    assert second.sequences[0].blocks[:2] == first.sequences[0].blocks[:2]
    assert (scheduler.prefix_hits, scheduler.prefix_queries) == (8, 31)


def test_a_prefix_that_arrives_with_many_is_computed_once() -> None:
    """Also where it takes several steps; what follows it is computed beside it."""
    scheduler, prefix = make(tokens=32), list(range(40))
    requests = [add(scheduler, [*prefix, 100 + i, 200 + i]) for i in range(4)]
    assert shape(run(scheduler), *requests) == [(0, 0, 32, 0)]
    assert shape(run(scheduler), *requests) == [(0, 32, 10, 1), (1, 40, 2, 1), (2, 40, 2, 1), (3, 40, 2, 1)]
    assert [request.cached_tokens for request in requests] == [0, 40, 40, 40]
    first, *others = (request.sequences[0] for request in requests)
    assert all(other.blocks[:10] == first.blocks[:10] and other.blocks[10] != first.blocks[10] for other in others)


def test_work_of_a_step_is_bounded_while_others_decode() -> None:
    """Where 100 keys take as long as a token's products: no chunk takes longer than the first tokens of a prompt.

    But an eighth of the step may be taken always.
    """
    spec = EngineSpec(block=4, blocks=1000, context=4000, max_seqs=8, max_batch_tokens=32)
    scheduler = Scheduler(spec, 1000, context_of_token=100.0)

    def work(start: int, count: int) -> float:
        return sum(1 + (position + 0.5) / 100 for position in range(start, start + count))

    alone = add(scheduler, 64, answer=1)
    assert [chunk.count for _ in range(2) for chunk in run(scheduler).chunks] == [32, 32]
    assert done(alone)
    decoding, long = add(scheduler, 3, answer=200), add(scheduler, 900)
    run(scheduler)
    counts, computed = list[int](), 29  # with the first prompt's three, a step
    while computed < 900:
        step = run(scheduler)
        assert step.chunks[0].sequence.request is decoding
        [count] = [c.count for c in step.chunks if c.sequence.request is long]
        most = work(0, 31)
        assert work(computed, count) <= most + 1e-9 or count == 31 // 8
        assert computed + count == 900 or count == 31 // 8 or work(computed, count + 1) > most
        counts.append(count)
        computed += count
    assert counts[0] > 2 * counts[-2] > 0 and counts.count(31 // 8) > 10


def test_at_least_one_token_of_a_prompt_is_computed() -> None:
    budget = StepBudget(4, context=0.01)
    budget.limit_work()
    assert budget.most_tokens(10**6) == 1 and not budget.spent


def test_preempted_sequence_reuses_cached_blocks() -> None:
    scheduler = make(blocks=6)
    first, second = add(scheduler, 8, answer=12), add(scheduler, 8, answer=12)
    until(scheduler, lambda: second.sequences[0].preempted > 0)
    scheduler.finish(first.sequences[0])
    [chunk] = run(scheduler).chunks
    assert chunk.sequence is second.sequences[0] and chunk.start >= 8


def test_n_answers_share_prompt_blocks() -> None:
    scheduler = make(tokens=8)
    request = add(scheduler, 10, n=3)
    run(scheduler)
    assert [each.state for each in request.sequences[1:]] == [SequenceStatus.WAITING] * 2  # the prompt is on its way
    run(scheduler)
    step = run(scheduler)
    lead, *others = request.sequences
    assert [(c.sequence.index, c.start, c.count, c.num_logits) for c in step.chunks] == [
        (0, 10, 1, 1),
        (1, 9, 1, 1),
        (2, 9, 1, 1),
    ]
    assert all(other.blocks[:2] == lead.blocks[:2] for other in others)
    assert step.copies == [(lead.blocks[2], other.blocks[2]) for other in others]
    assert len({each.blocks[2] for each in request.sequences}) == 3


def test_sequences_waiting_for_a_shared_prompt_do_not_block_others() -> None:
    scheduler = make(tokens=8)
    add(scheduler, 7, n=2)
    other = add(scheduler, 1)
    run(scheduler)
    assert other.sequences[0].state is SequenceStatus.RUNNING


def test_cancelled_first_answer_leaves_prompt_to_next() -> None:
    scheduler = make(seqs=1, cache=False)
    request = add(scheduler, 6, answer=1, n=2)
    run(scheduler)
    assert shape(run(scheduler), request) == [(0, 0, 6, 1)]
    assert done(request)


def test_draft_tokens_are_trimmed_to_the_token_budget() -> None:
    scheduler = make(tokens=4, blocks=3, block=4)
    request = add(scheduler, 4, answer=8)
    run(scheduler)
    [sequence] = request.sequences
    sequence.draft_tokens = [1, 2, 3, 4, 5, 6]
    step = scheduler.schedule()
    assert shape(step, request) == [(0, 4, 4, 4)] and sequence.draft_tokens == [1, 2, 3]  # the budget
    read(scheduler, step)
    sequence.num_computed_tokens = 8
    sequence.draft_tokens = [1, 2, 3]
    step = scheduler.schedule()
    assert shape(step, request) == [(0, 8, 3, 3)]  # of 12 tokens 9 are there: two guesses and one more token


def test_draft_tokens_leave_budget_for_other_decodes() -> None:
    scheduler = make(tokens=6)
    requests = [add(scheduler, 1, answer=20) for _ in range(4)]
    run(scheduler)
    for request in requests:
        request.sequences[0].draft_tokens = [1, 2, 3, 4]
    assert shape(scheduler.schedule(), *requests) == [(1, 1, 1, 1), (2, 1, 1, 1), (3, 1, 1, 1), (0, 1, 3, 3)]


def test_no_preemption_for_draft_tokens() -> None:
    scheduler = make(blocks=4, block=2)
    first, second = add(scheduler, 3, answer=5), add(scheduler, 3, answer=5)
    run(scheduler)
    first.sequences[0].draft_tokens = [1, 2, 3]
    step = scheduler.schedule()
    assert scheduler.preemptions == 0
    assert sorted(shape(step, first, second)) == [(0, 3, 1, 1), (1, 3, 1, 1)]


def test_draft_tokens_take_no_block_that_a_sampled_token_needs() -> None:
    """One block is free: the first could guess into it, but the second's next token has to go there."""
    scheduler = make(blocks=5, block=2)
    first, second = add(scheduler, 3, answer=5), add(scheduler, 4, answer=4)
    run(scheduler)
    first.sequences[0].draft_tokens = [1, 2, 3]
    step = scheduler.schedule()
    assert scheduler.preemptions == 0
    assert sorted(shape(step, first, second)) == [(0, 3, 1, 1), (1, 4, 1, 1)]


def test_finished_sequences_free_blocks_and_slots() -> None:
    scheduler = make(seqs=2)
    requests = [add(scheduler, 5, n=2), add(scheduler, 5)]
    run(scheduler)
    for request in requests:
        for sequence in request.sequences:
            scheduler.finish(sequence)
            scheduler.finish(sequence)
    assert not scheduler.running and not scheduler.waiting and scheduler.block_manager.num_used_blocks == 0
    assert sorted(scheduler.slots) == [0, 1]
