"""Schedules in time: simulated idle shares against the formulas, what is drawn, and what a real step records."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.observe.timeline import draw_png, draw_text
from lmworks.parallel.timeline import (
    Action,
    Span,
    actions_of,
    durations,
    ideal_idle,
    idle_shares,
    simulate,
)
from lmworks.study.ranks import on_ranks

EVERY = ("gpipe", "1f1b", "interleaved", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev")
SHAPES = [(2, 4), (4, 8), (4, 16), (8, 16)]


def virtual(schedule: str) -> int:
    return 1 if schedule in ("gpipe", "1f1b") else 2


@pytest.mark.parametrize("times", [{"F": 1, "B": 1, "I": 0.5, "W": 0.5}, {"F": 1, "B": 2, "I": 1, "W": 1}])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 5), (4, 8), (8, 9)])
def test_idle_is_the_formula(schedule: str, ranks: int, micro_batches: int, times: dict[str, float]) -> None:
    shares = idle_shares(simulate(actions_of(schedule, ranks, 1, micro_batches), times))
    expected = (ranks - 1) / (micro_batches + ranks - 1)
    assert shares == pytest.approx([expected] * ranks, abs=1e-12)
    assert ideal_idle(schedule, ranks, 1, micro_batches, times)[0] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("schedule", EVERY)
@pytest.mark.parametrize(("ranks", "micro_batches"), SHAPES)
def test_every_schedule_idles_as_its_formula_says(schedule: str, ranks: int, micro_batches: int) -> None:
    shape, times = (schedule, ranks, virtual(schedule), micro_batches), durations()
    shares = idle_shares(simulate(actions_of(*shape), times))
    assert shares == pytest.approx([ideal_idle(*shape, times)[0]] * ranks, abs=1e-12)


@pytest.mark.parametrize("schedule", EVERY[:5])  # the formula of the V-shaped ones holds where F = I = W
def test_the_formula_with_a_backward_pass_that_is_not_split(schedule: str) -> None:
    shape, times = (schedule, 4, virtual(schedule), 8), durations("full")
    shares = idle_shares(simulate(actions_of(*shape), times))
    assert shares == pytest.approx([ideal_idle(*shape, times)[0]] * 4, abs=1e-12)


@pytest.mark.parametrize("schedule", EVERY)
def test_every_micro_batch_passes_every_stage_once(schedule: str) -> None:
    orders = actions_of(schedule, 4, virtual(schedule), 8)
    work = [action for order in orders for action in order]
    assert len(work) == len(set(work))
    stages = range(4 * virtual(schedule))
    forward = {(a.stage, a.micro_batch) for a in work if a.kind == "F"}
    whole = {(a.stage, a.micro_batch) for a in work if a.kind == "B"}
    halves = [{(a.stage, a.micro_batch) for a in work if a.kind == kind} for kind in "IW"]
    assert forward == {(stage, i) for stage in stages for i in range(8)}
    assert halves[0] == halves[1]
    assert whole | halves[0] == forward and not whole & halves[0]


def test_a_slow_stage_makes_the_others_wait() -> None:
    orders = actions_of("1f1b", 2, 1, 4)
    even, uneven = (idle_shares(simulate(orders, durations(), costs)) for costs in ([1, 1], [0.5, 1.5]))
    assert uneven[0] > even[0] and uneven[1] < even[1]


def test_actions_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(ValueError, match=r"wait for each other.*micro_batch=0"):
        simulate([[Action(0, "B", 0), Action(0, "F", 0)]], durations())


def test_a_timeline_as_text() -> None:
    spans = simulate(actions_of("1f1b", 2, 1, 3), durations())
    assert draw_text(spans, unit=0.5).splitlines() == [
        "rank 0  F0F1····B0──F2B1──··B2──",
        "rank 1  ··F0B0──F1B1──F2B2──····",
    ]


def test_small_letters_are_the_second_stage_of_a_rank() -> None:
    spans = simulate(actions_of("zbv", 2, 2, 2), durations())
    top = draw_text(spans, unit=0.5).splitlines()[0]
    assert "F0" in top and "f0" in top and "w0" in top


def test_a_timeline_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = draw_png(simulate(actions_of("zbv", 2, 2, 4), durations()), tmp_path / "a" / "zbv.png", "forward passes")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_idle_of_given_spans() -> None:
    spans = [Span(0, 0, "F", 0, 0.0, 1.0), Span(1, 1, "F", 0, 1.0, 4.0)]
    assert idle_shares(spans) == pytest.approx([0.75, 0.25])


def recorded(rank: int) -> list[Span]:
    import torch

    from lmworks.parallel.measured import measure_step
    from lmworks.parallel.mesh import Mesh
    from lmworks.spec import Grid, RunSpec

    spec = RunSpec.from_dict(
        {
            "model": {"layers": 4, "hidden": 32, "heads": 2, "vocab": 64, "context": 16},
            "data": {"seq": 16, "micro_batch": 1, "global_batch": 4},
            "parallel": {"pp": 2, "schedule": "zbv"},
        }
    )
    return measure_step(spec, Mesh(Grid.of(spec.parallel), "cpu"), torch.device("cpu"))


def test_a_real_step_is_recorded_in_the_order_of_the_schedule() -> None:
    one, other = on_ranks(2, recorded)
    assert one == other
    assert min(span.begin for span in one) == 0
    for rank, order in enumerate(actions_of("zbv", 2, 2, 4)):
        done = [Action(s.stage, s.kind, s.micro_batch) for s in one if s.rank == rank]
        assert done == order
    assert all(0 <= share < 1 for share in idle_shares(one))
