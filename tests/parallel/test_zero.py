"""ZeRO stages 0, 1 and 2 against one rank, and the bytes that each says it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data_parallel import (
    ACCUMULATION,
    DENSE,
    OPTIMIZERS,
    SPARSE,
    Outcome,
    batches_of,
    check,
    compare_cases,
    make_spec,
    mesh_of,
    start,
    with_rules,
)
from ranks import on_ranks
from torch import Tensor

from lmworks.model import GPT
from lmworks.parallel.mesh import Mesh
from lmworks.parallel.zero import Zero
from lmworks.spec import Grid, RunSpec

WORLD = 4
SPECS = {
    **{f"stage {n}": make_spec({"dp": WORLD, "strategy": "zero", "zero": n}) for n in range(3)},
    **{
        f"stage {n} experts": make_spec({"dp": WORLD, "strategy": "zero", "zero": n, "ep": 2}, SPARSE) for n in range(3)
    },
    "stage 1 tied": make_spec({"dp": WORLD, "strategy": "zero", "zero": 1}, {**DENSE, "tie_embeddings": True}),
    "in place of ddp": make_spec({"dp": WORLD, "ep": 2}, SPARSE),
}
CASES = with_rules(SPECS, ("tied", "experts", "ddp"))


def build(spec: RunSpec, mesh: Mesh, experts: set[str]) -> Zero:
    part = GPT(spec.model)
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.copy_(start(spec, name, parameter.shape, mesh.rank("ep"), experts))
    return Zero(part, spec, mesh, experts, spec.parallel.zero)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Outcome]]:
    return on_ranks(WORLD, compare_cases, CASES, build)


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_one_rank(outcomes: list[dict[str, Outcome]], case: str) -> None:
    for outcome in outcomes:
        check(outcome[case].differences)


@pytest.mark.parametrize("name", SPECS)
def test_gradients_meet_once_in_a_step_unless_stage_2_shards_them(outcomes: Any, name: str) -> None:
    early, late = outcomes[0][f"{name} / sgd"].trace.early, outcomes[0][f"{name} / sgd"].trace.late
    assert late
    assert len(early) == (2 * len(late) if name.startswith("stage 2") else 0)
    assert {"allreduce_"} == {*late} if "stage 0" in name or "ddp" in name else {"_reduce_scatter_base_"} == {*late}


def test_steps_without_contexts_as_in_a_pipeline() -> None:
    specs = {f"stage {n}": make_spec({"dp": 2, "strategy": "zero", "zero": n}) for n in range(3)}
    for outcome in on_ranks(2, compare_cases, with_rules(specs, ("",)), build, False):
        for case in outcome.values():
            assert case.trace.early == []
            check(case.differences)


def measure_all(rank: int) -> list[tuple[dict[str, int], dict[str, int]]]:
    return [measure(rank, stage) for stage in range(3)]


def measure(rank: int, stage: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that a strategy says it holds, and those of the tensors that are there before and after an update."""
    spec = make_spec({"dp": WORLD, "strategy": "zero", "zero": stage})
    mesh = mesh_of(Grid.of(spec.parallel))
    strategy = build(spec, mesh, set())
    optimizer = OPTIMIZERS["adamw"]([shard.leaf for shard in strategy.shards()])
    for index, (inputs, targets) in enumerate(batches_of(rank, 0)):
        with strategy.micro_batch(index == ACCUMULATION - 1):
            strategy(inputs, targets, reduction="sum")[1].backward()
    strategy.finish()
    weights = [*strategy.part.parameters(), *(shard.leaf for shard in strategy.shards())]
    optimizer.step()
    states = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    held = {
        "parameters": stored(weights),
        "gradients": stored([w.grad for w in weights if w.grad is not None]),
        "optimizer": stored(states),
    }
    assert len(strategy.flying) == 0
    return vars(strategy.resident()), held


def stored(tensors: list[Tensor]) -> int:
    """Bytes of the memory behind them, each counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_a_rank_holds_what_the_formula_says() -> None:
    whole = 4 * sum(p.numel() for p in GPT(make_spec({}).model).parameters())
    for stage, ranks in enumerate(zip(*on_ranks(WORLD, measure_all), strict=True)):
        claims, held = zip(*ranks, strict=True)
        for claim, truth in zip(claims, held, strict=True):
            assert {key: claim[key] for key in truth} == truth
            assert truth["parameters"] == whole
        # Rows do not divide evenly, but together the ranks own every element once.
        assert sum(truth["optimizer"] for truth in held) == 2 * whole * (1 if stage else WORLD)
        assert sum(truth["gradients"] for truth in held) == whole * (WORLD if stage < 2 else 1)
        assert (claims[0]["padding"] > 0) == (stage > 0)
