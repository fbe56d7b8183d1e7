"""Collectives by arithmetic: against simulated ranks of large layouts, PyTorch's own lists, and by hand.

Small layouts are held against real ranks where parity runs them anyway: tests/prove/test_parity.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import UNSHARD, _Action, _add_unshard_reshard

from lmworks.parallel.comm_counter import Row
from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.memory_ledger import GRADIENTS, OPTIMIZER, PARAMETERS
from lmworks.plan import software
from lmworks.plan.exact.collectives import collectives, stage_gathers
from lmworks.plan.exact.exchanges import RankContext
from lmworks.plan.memory.rank_weights import resident
from lmworks.plan.pipelines.schedule import actions
from lmworks.prove.planner_agreement import call_table, different_calls, planned_calls
from lmworks.prove.simulate import Report, simulate
from lmworks.spec import Grid, RunSpec
from lmworks.spec.layouts import layouts

LLAMA = {
    "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256, "context": 8192, "tie_embeddings": False,
}  # fmt: skip
MIXTRAL = {**LLAMA, "hidden": 4096, "heads": 32, "experts": 8, "top_k": 2, "expert_ffn": 14336, "balance_loss": 0.01}


def large(model: dict[str, Any], layers: int, batch: int, **parallel: Any) -> RunSpec:
    return RunSpec.from_dict(
        {
            "model": {**model, "layers": layers},
            "data": {"seq": 8192, "micro_batch": 1, "global_batch": batch},
            "precision": {"dtype": "bf16"},
            "parallel": parallel,
            "cluster": {"gpu": "H100-SXM-80GB"},
        }
    )


LARGE = {  # a spec and one of its ranks
    "256 ranks": (large(LLAMA, 4, 32, pp=4, dp=8, tp=8, sp=True, strategy="fsdp2"), 77),
    "hsdp, cp": (large(LLAMA, 2, 32, dp_replicate=2, dp_shard=16, tp=4, cp=2, strategy="fsdp2", recompute="full"), 200),
    "experts": (large(MIXTRAL, 2, 32, dp=32, tp=2, ep=8, sp=True, strategy="fsdp2"), 33),
}


def simulate_exactly(_rank: int, spec: RunSpec, rank: int) -> Report:
    torch.set_num_threads(1)
    return simulate(spec, rank, exact=True)


@pytest.mark.parametrize(
    "name",
    [pytest.param("256 ranks", marks=pytest.mark.slow), "experts", pytest.param("hsdp, cp", marks=pytest.mark.slow)],
)
def test_a_rank_of_hundreds_sends_and_holds_what_is_simulated(name: str) -> None:
    """In a process of its own, which belongs to no group."""
    spec, rank = LARGE[name]
    found = on_ranks(1, simulate_exactly, spec, rank, launched=False, timeout=120)[0].simulation
    assert not different_calls(planned_calls(spec, rank), call_table(found.collectives, spec, rank))
    held = resident(spec, rank)
    assert held.parameters + held.parameter_padding == found.resident[PARAMETERS]
    assert held.gradients + held.gradient_padding == found.resident[GRADIENTS]
    assert held.optimizer == found.resident[OPTIMIZER]


def small(**parallel: Any) -> RunSpec:
    model = {"layers": 8, "hidden": 16, "heads": 4, "kv_heads": 4, "ffn": 32, "vocab": 64, "context": 16}
    return RunSpec.from_dict({"model": model, "data": {"seq": 16, "micro_batch": 1}, "parallel": parallel})


def test_by_hand() -> None:
    def rows(**parallel: Any) -> list[tuple[Any, ...]]:
        found = collectives(small(**parallel))
        return [(c.kind, c.what, c.group, c.ranks, c.stride, c.count, c.bytes, c.when) for c in found]

    psi, hidden = 8 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16) + 2 * 64 * 16 + 16, 4 * 16 * 16
    figures = ("all-reduce", "figures of the step", "world")
    assert rows(dp=4) == [
        ("all-reduce", "gradients", "dp_cp", 4, 1, 1, 4 * psi, "last backward"),
        (*figures, 4, 1, 1, 8 * 14, "step"),
    ]
    assert rows(tp=2, dp=2)[:8] == [
        ("all-reduce", "gradient into attention", "tp", 2, 1, 8, 8 * hidden, "backward"),
        ("all-reduce", "out of attention", "tp", 2, 1, 8, 8 * hidden, "forward"),
        ("all-reduce", "gradient into mlp", "tp", 2, 1, 8, 8 * hidden, "backward"),
        ("all-reduce", "out of mlp", "tp", 2, 1, 8, 8 * hidden, "forward"),
        ("all-reduce", "out of embedding", "tp", 2, 1, 1, hidden, "forward"),
        ("all-reduce", "gradient into head", "tp", 2, 1, 1, hidden, "backward"),
        ("all-gather", "loss", "tp", 2, 1, 1, 2 * 2 * 4 * 16, "forward"),
        ("all-reduce", "gradients", "dp_cp", 2, 2, 1, 4 * (psi - 17 * 16) // 2 + 4 * 17 * 16, "last backward"),
    ]
    assert rows(pp=2, tp=2)[5] == ("send", "hidden states", "pp", 2, 2, 2, 2 * hidden, "forward")


def test_groups_are_those_of_the_grid() -> None:
    for layout in layouts().values():
        spec = layout.run()
        grid = Grid.of(spec.parallel)
        for rank in range(grid.world):
            for row in collectives(spec, rank):
                line = grid.group("pp" if row.group == "ends" else row.group, rank)
                members = [line[0], line[-1]] if row.group == "ends" else line
                assert row.ranks == len(members)
                assert members == list(range(members[0], members[-1] + 1, row.stride))


@pytest.mark.parametrize("schedule", ["interleaved", "looped-bfs", "interleaved-zero-bubble"])
def test_stages_are_gathered_as_often_as_pytorch_does(schedule: str) -> None:
    """With more stages a rank than it keeps whole at once."""
    spec = small(pp=2, dp=2, strategy="fsdp2", schedule=schedule, virtual_stages=4)
    here = RankContext.of(spec, 2)
    order = actions(schedule, 2, 4, spec.accumulation)[1]
    listed = _add_unshard_reshard([_Action.from_str(f"{a.stage}{a.kind}{a.micro_batch}") for a in order])
    counts = [
        sum(a.stage_index == stage.index and a.computation_type == UNSHARD for a in listed) for stage in here.stages
    ]
    assert [stage_gathers(here, stage) for stage in here.stages] == counts
    assert max(counts) > 1


def both_losses(_rank: int) -> tuple[list[str], list[int]]:
    """Calls of a loss in place that were not planned, and the peaks of a loss in torch and of one in place."""
    torch.set_num_threads(1)
    spec = large({**LLAMA, "hidden": 256, "ffn": 512}, 1, 1, tp=2)
    software.IN_PLACE = False
    plain = simulate(spec, 0, exact=True).simulation
    software.IN_PLACE = True
    found = simulate(spec, 0, exact=True).simulation
    return different_calls(planned_calls(spec, 0), call_table(found.collectives, spec, 0)), [
        plain.peak_bytes,
        found.peak_bytes,
    ]


def test_a_loss_in_place_is_planned_as_it_is_simulated() -> None:
    """Two ranks with half of 128k tokens, 8,192 positions: half of the logits at once at 2 bytes, or 2²⁷ at 6."""
    ((unplanned, (in_torch, in_place)),) = on_ranks(1, both_losses, launched=False, timeout=120)
    assert not unplanned
    assert in_place - in_torch == pytest.approx(2 * 4096 * 64_128 - 6 * 2**27, rel=0.05)


def test_axes_with_the_same_ranks_are_one_group() -> None:
    """PyTorch 2.11 has one process group for all of them, 2.13 one for each."""
    spec = large(LLAMA, 4, 8, pp=2, dp=4)
    tables = [call_table([Row("all-reduce", axis, 4, 1, 8)], spec, 0) for axis in ("dp_replicate", "dp", "dp_cp")]
    assert tables == [{("all-reduce", "dp_replicate"): (1, 8)}] * 3
    assert call_table([Row("all-reduce", "pp", 2, 1, 8)], spec, 0) == {("all-reduce", "pp"): (1, 8)}
