"""The orders that the planner knows against those that PyTorch runs, what is drawn, and what a real step records."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.pipeline import MULTI_STAGE, SINGLE_STAGE
from lmworks.plan.pipelines.schedule import Action, Span, actions, durations, idle_shares, simulate, stage_times
from lmworks.report.plots import draw_timeline, draw_timeline_text


def even(schedule: str, ranks: int, virtual: int, micro_batches: int) -> list[Span]:
    times = stage_times(durations(), [1.0] * ranks * virtual)
    return simulate(actions(schedule, ranks, virtual, micro_batches), times)


def runs(schedule: str, ranks: int, virtual: int, micro_batches: int) -> list[list[Action]]:
    """What PyTorch's own schedule does, rank by rank; one that refuses the numbers raises ValueError."""
    count = ranks * virtual
    stage = SimpleNamespace(group_size=ranks, group_rank=0, num_stages=count, submod=nn.Identity(), has_backward=True)
    kind: Any = {**SINGLE_STAGE, **MULTI_STAGE}[schedule]
    if schedule in SINGLE_STAGE:
        order = kind(stage, micro_batches)._get_pipeline_order()
    else:
        order = kind([stage] * virtual, micro_batches).pipeline_order
    return [[action for entry in order[rank] if entry for action in parts(entry)] for rank in range(ranks)]


def parts(entry: Any) -> list[Action]:
    """DualPipeV pairs a forward with a backward pass that could overlap; PyTorch runs one after the other."""
    if entry.sub_actions:
        return [action for part in entry.sub_actions for action in parts(part)]
    kind = entry.computation_type.value
    return [Action(entry.stage_index, kind, entry.microbatch_index)] if kind in ("F", "B", "I", "W") else []


@pytest.mark.parametrize("schedule", ["gpipe", *MULTI_STAGE])  # PyTorch lists 1f1b with other numbers than it runs
def test_the_planner_knows_the_order_that_pytorch_runs(schedule: str) -> None:
    stages = (1,) if schedule in SINGLE_STAGE else (2,) if schedule in ("zbv", "dualpipev") else (1, 2, 3)
    same = 0
    for ranks in (2, 3, 4, 5, 8):
        for virtual in stages:
            for micro_batches in (1, 2, 3, 4, 6, 8, 9, 10, 16, 17, 24):
                try:
                    expected = runs(schedule, ranks, virtual, micro_batches)
                except ValueError:
                    continue
                found = actions(schedule, ranks, virtual, micro_batches)
                assert found == expected, f"{ranks} ranks × {virtual}, {micro_batches} micro-batches"
                same += 1
    assert same > 20


def test_a_timeline_as_text() -> None:
    assert draw_timeline_text(even("1f1b", 2, 1, 3), unit=0.5).splitlines() == [
        "rank 0  F0F1····B0──F2B1──··B2──",
        "rank 1  ··F0B0──F1B1──F2B2──····",
    ]


def test_small_letters_are_the_second_stage_of_a_rank() -> None:
    top = draw_timeline_text(even("zbv", 2, 2, 2), unit=0.5).splitlines()[0]
    assert "F0" in top and "f0" in top and "w0" in top


def test_a_timeline_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = draw_timeline(even("zbv", 2, 2, 4), tmp_path / "a" / "zbv.png", "forward passes")
    assert path.read_bytes().startswith(b"\x89PNG")


MEASURED = ("gpipe", "1f1b", "interleaved", "zbv")


def recorded(rank: int) -> list[list[Span]]:
    import torch

    from lmworks.parallel.mesh import Mesh
    from lmworks.parallel.pipeline_timing import measure_step
    from lmworks.spec import Grid, RunSpec

    specs = [
        RunSpec.from_dict(
            {
                "model": {"layers": 4, "hidden": 32, "heads": 2, "vocab": 64, "context": 16},
                "data": {"seq": 16, "micro_batch": 1, "global_batch": 4},
                "parallel": {"pp": 2, "schedule": schedule},
            }
        )
        for schedule in MEASURED
    ]
    mesh = Mesh(Grid.of(specs[0].parallel), "cpu")
    return [measure_step(spec, mesh, torch.device("cpu")) for spec in specs]


def test_a_real_step_is_recorded_in_the_order_of_the_schedule() -> None:
    first, second = on_ranks(2, recorded)
    for schedule, one, other in zip(MEASURED, first, second, strict=True):
        assert one == other
        assert min(span.begin for span in one) == 0
        for rank, order in enumerate(actions(schedule, 2, 1 if schedule in SINGLE_STAGE else 2, 4)):
            done = [Action(s.stage, s.kind, s.micro_batch) for s in one if s.rank == rank]
            assert done == order
        assert all(0 <= share < 1 for share in idle_shares(one))
