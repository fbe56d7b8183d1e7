"""ZeRO stages 0, 1 and 2 against one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data_parallel import (
    DENSE,
    SPARSE,
    Outcome,
    check,
    compare_cases,
    make_spec,
    start,
    with_rules,
)

from lmworks.model import GPT
from lmworks.parallel.mesh import Mesh
from lmworks.parallel.zero import Zero
from lmworks.spec import RunSpec
from lmworks.study.ranks import on_ranks

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


@pytest.mark.slow  # `lmworks parity` holds the same strategies against one rank, through the trainer
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
