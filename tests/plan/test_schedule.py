"""Pipeline schedules: what is simulated against hand-drawn timelines, and closed forms against what is simulated."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from lmworks.plan.pipelines.bubble import Costs, bubble, ideal_idle, in_flight
from lmworks.plan.pipelines.schedule import (
    Action,
    Span,
    actions,
    durations,
    idle_shares,
    simulate,
    stage_times,
    stages_of,
    total,
)
from lmworks.plan.pipelines.stages import split_layers
from lmworks.spec import PRESETS, ModelSpec, SpecError
from lmworks.spec.layout import IN_ROUNDS, V_SHAPED
from lmworks.spec.run import SCHEDULES

TIMES = [(1, 1, 1), (1, 1.2, 0.8), (1, 1.5, 0.7), (1, 0.8, 1.2), (1, 2, 0), (1, 3, 0), (1, 1.3, 1)]  # F, I, W
Shape = tuple[str, int, int, int]


def stages_each(schedule: str) -> tuple[int, ...]:
    return (1,) if schedule in ("gpipe", "1f1b") else (2,) if schedule in V_SHAPED else (2, 3)


def shapes(schedule: str, ranks: Sequence[int], rounds: Sequence[float]) -> Iterator[Shape]:
    """Legal ones, of so many micro-batches a rank."""
    for p in ranks:
        for m in sorted({max(1, round(p * share)) for share in rounds}):
            unfit = m % max(1, m // p) if schedule in IN_ROUNDS else schedule == "dualpipev" and m < 2 * p
            if not unfit:
                yield from ((schedule, p, v, m) for v in stages_each(schedule))


def followed(
    shape: Shape, times: tuple[float, float, float], first: float = 1, last: float = 1, send: float = 0
) -> float:
    """Seconds of a step, simulated."""
    forward, inputs, weights = times
    costs = [1.0] * shape[1] * shape[2]
    costs[0], costs[-1] = first, last
    kinds = {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}
    return total(simulate(actions(*shape), stage_times(kinds, costs), send))


# --- orders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_micro_batch_passes_every_stage_once(schedule: str) -> None:
    stages = 4 * stages_each(schedule)[0]
    orders = actions(schedule, 4, stages // 4, 8)
    work = [action for order in orders for action in order]
    assert len(work) == len(set(work))
    forward, whole, inputs, weights = ({(a.stage, a.micro_batch) for a in work if a.kind == kind} for kind in "FBIW")
    assert forward == {(stage, i) for stage in range(stages) for i in range(8)}
    assert inputs == weights
    assert whole | inputs == forward and not whole & inputs
    for rank, order in enumerate(orders):
        assert sorted({action.stage for action in order}) == stages_of(schedule, 4, stages // 4, rank)


def test_one_forward_one_backward_as_it_is_drawn_in_the_paper() -> None:
    words = [[f"{a.kind}{a.micro_batch}" for a in order] for order in actions("1f1b", 3, 1, 4)]
    assert words == [
        ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"],
        ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"],
        ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"],
    ]


def test_nonsense_is_named() -> None:
    with pytest.raises(SpecError, match=r"schedule = '1f2b'.*did you mean '1f1b'"):
        actions("1f2b", 2, 1, 4)
    with pytest.raises(SpecError, match="0 micro-batches: each must be 1 or more"):
        actions("1f1b", 2, 1, 0)


# --- simulated ----------------------------------------------------------------------------------------------


def test_a_step_by_hand() -> None:
    """Two ranks, two micro-batches; a message takes half a forward pass, and the second stage is twice as slow."""
    times = stage_times({"F": 1, "B": 2, "I": 1, "W": 1}, [1, 2])
    spans = simulate(actions("1f1b", 2, 1, 2), times, send=0.5)
    when = {(s.rank, s.kind, s.micro_batch): (s.begin, s.end) for s in spans}
    assert when[0, "F", 0] == (0, 1) and when[0, "F", 1] == (1, 2)
    assert when[1, "F", 0] == (1.5, 3.5) and when[1, "B", 0] == (3.5, 7.5)
    assert when[1, "F", 1] == (7.5, 9.5) and when[1, "B", 1] == (9.5, 13.5)
    assert when[0, "B", 0] == (8, 10) and when[0, "B", 1] == (14, 16)
    assert total(spans) == 16
    assert idle_shares(spans) == pytest.approx([1 - 6 / 16, 1 - 12 / 16])


def test_the_turn_of_a_v_needs_no_message() -> None:
    times = stage_times({"F": 1, "B": 2, "I": 1, "W": 1}, [1] * 4)
    spans = {(s.stage, s.kind, s.micro_batch): s for s in simulate(actions("zbv", 2, 2, 4), times, send=0.25)}
    assert spans[1, "F", 0].begin == 1.25
    assert spans[2, "F", 0].begin >= spans[1, "F", 0].end and spans[2, "F", 0].rank == spans[1, "F", 0].rank == 1
    turn = simulate(actions("zbv", 1, 2, 1), stage_times({"F": 1, "B": 2, "I": 1, "W": 1}, [1] * 2), send=9.0)
    assert total(turn) == 6


def test_the_first_stage_runs_its_whole_backward_pass_for_weights() -> None:
    assert stage_times(durations(), [1, 3])[0] == {"F": 1, "B": 2, "I": 0, "W": 2}
    assert stage_times(durations(), [1, 3])[1] == {"F": 3, "B": 6, "I": 3, "W": 3}
    assert stage_times(durations("full"), [2, 1])[0] == {"F": 2, "B": 6, "I": 6, "W": 0}


def test_a_slow_stage_makes_the_others_wait() -> None:
    orders = actions("1f1b", 2, 1, 4)
    level, tilted = (idle_shares(simulate(orders, stage_times(durations(), c))) for c in ([1, 1], [0.5, 1.5]))
    assert tilted[0] > level[0] and tilted[1] < level[1]


def test_actions_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(ValueError, match=r"wait for each other.*micro_batch=0"):
        simulate([[Action(0, "B", 0), Action(0, "F", 0)]], [durations()])


def test_idle_of_given_spans() -> None:
    spans = [Span(0, 0, "F", 0, 0.0, 1.0), Span(1, 1, "F", 0, 1.0, 4.0)]
    assert idle_shares(spans) == pytest.approx([0.75, 0.25])


def test_a_large_pipeline_is_followed_at_once() -> None:
    orders, times = actions("interleaved", 64, 2, 128), stage_times(durations(), [1.0] * 128)
    begin = time.process_time()
    spans = simulate(orders, times, send=0.01)
    assert len(spans) == 64 * 128 * 2 * 2
    assert time.process_time() - begin < 5  # a third of a second; minutes if each action looked at all others


# --- closed forms -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_stages_within_one_percent(schedule: str) -> None:
    for shape in shapes(schedule, (1, 2, 3, 4, 8), (1, 1.5, 2, 4)):
        for times in TIMES:
            step = bubble(*shape, *times)
            assert step.work == pytest.approx(shape[2] * shape[3] * sum(times))
            assert step.total == pytest.approx(followed(shape, times), rel=0.01), (shape, times)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
def test_a_whole_backward_pass_is_exact_even_with_few_micro_batches_and_slow_messages(schedule: str) -> None:
    least = 1 if schedule == "1f1b" else 0.5
    for shape in shapes(schedule, (2, 4, 6), (least, 1, 2, 3)):
        for send in (0, 0.05, 0.3):
            found = bubble(*shape, 1, 1, 1, send=send).total
            assert found == pytest.approx(followed(shape, (1, 1, 1), send=send), rel=1e-9), (shape, send)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_within_one_percent(schedule: str) -> None:
    for shape in shapes(schedule, (2, 4, 8), (2, 4)):
        for times in ((1, 1.2, 0.8), (1, 3, 0)):
            found = bubble(*shape, *times, send=0.05).total
            assert found == pytest.approx(followed(shape, times, send=0.05), rel=0.01), (shape, times)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_slow_and_quick_ends_within_two_percent(schedule: str) -> None:
    """Pipelines with four micro-batches a rank; the ends of a real split (below) differ less."""
    errors = []
    for shape in shapes(schedule, (2, 4, 8), (4,)):
        for times in ((1, 1, 1), (1, 1.3, 0.8), (1, 3, 0)):
            for first in (0.9, 1, 1.1):
                for last in (0.85, 1, 1.15, 1.6):
                    if shape[1] * shape[2] > 2 or max(first, last) >= 1:  # two stages have no ordinary one
                        found = bubble(*shape, *times, Costs(first, last)).total
                        errors.append(found / followed(shape, times, first, last) - 1)
    assert max(map(abs, errors)) < 0.0205
    assert np.mean(np.abs(errors)) < 0.005


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("preset", ["llama3-8b", "llama3-70b"])
def test_real_splits_within_two_percent(preset: str, schedule: str) -> None:
    """`bubble` knows the ends and the busiest rank between them; the simulation knows every stage."""
    model = ModelSpec.from_dict(PRESETS[preset])
    for p in (2, 4, 8):
        v = stages_each(schedule)[0]
        stages = [stage.cost(model, 8192) for stage in split_layers(model, 8192, p * v)]
        usual = np.mean(stages[1:-1] or stages)
        costs = [float(stage / usual) for stage in stages]
        ranks = [sum(costs[i] for i in stages_of(schedule, p, v, rank)) / v for rank in range(p)]
        between = ranks[1:] if schedule in V_SHAPED else ranks[1:-1]
        shape = (schedule, p, v, 4 * p)
        found = bubble(*shape, 1, 1, 1, Costs(costs[0], costs[-1], max(between, default=1.0))).total
        spans = simulate(actions(*shape), stage_times(durations(), costs))
        assert found == pytest.approx(total(spans), rel=0.0205), (shape, costs)


def test_many_pipelines_at_once() -> None:
    p, m, forward = np.array([1, 2, 4, 8]), np.array([4, 8, 16, 64]), np.array([1.0, 0.5, 2.0, 1.0])
    for schedule in SCHEDULES:
        v = stages_each(schedule)[0]
        many = bubble(schedule, p, v, m, forward, forward, forward, Costs(last=1.2), send=0.01)
        held = in_flight(schedule, p, v, m, 0)
        for index in range(4):
            numbers = (int(p[index]), v, int(m[index]))
            time_each = float(forward[index])
            one = bubble(schedule, *numbers, time_each, time_each, time_each, Costs(last=1.2), send=0.01)
            assert many.total[index] == pytest.approx(one.total)  # type: ignore[index]
            assert np.broadcast_to(held, 4)[index] == in_flight(schedule, *numbers, 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_rank_holds_is_what_its_actions_leave(schedule: str) -> None:
    for shape in shapes(schedule, (1, 2, 3, 5, 8), (0.4, 1, 1.3, 2, 3.2)):
        for rank, order in enumerate(actions(*shape)):
            for whole in (False, True):
                kinds = {"F": 1, "B": -1, "I": -whole, "W": whole - 1}
                most = max(np.cumsum([kinds[action.kind] for action in order]))
                assert in_flight(*shape, rank, whole) == most, (shape, rank, whole)


# --- idle shares --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_every_schedule_idles_as_its_formula_says(schedule: str, ranks: int, micro_batches: int) -> None:
    virtual, times = stages_each(schedule)[0], durations()
    share, text = ideal_idle(schedule, ranks, virtual, micro_batches, times)
    work = virtual * micro_batches * 3
    gap = (ranks - 1) * (1 if schedule in (*V_SHAPED, "interleaved-zero-bubble") else 3)
    assert share == pytest.approx(gap / (work + gap), abs=1e-12)
    assert "p−1" in text
    spans = simulate(actions(schedule, ranks, virtual, micro_batches), stage_times(times, [1.0] * ranks * virtual))
    assert idle_shares(spans) == pytest.approx([share] * ranks, abs=1e-12)


def test_without_a_short_formula_none_is_printed() -> None:
    assert "longest chain" in ideal_idle("zbv", 4, 2, 8, durations("full"))[1]
    assert "longest chain" in ideal_idle("looped-bfs", 4, 2, 2, durations())[1]
