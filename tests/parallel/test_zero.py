"""ZeRO stages 0, 1 and 2 against one rank."""

from __future__ import annotations

import pytest
import torch
from data_parallel import (
    DENSE,
    SPARSE,
    Outcome,
    check,
    compare_cases,
    make_spec,
    mesh_of,
    start,
    with_rules,
)

from lmworks.model import GPT
from lmworks.parallel.local_ranks import on_ranks
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
EVERYDAY = ("stage 1", "stage 2 experts", "in place of ddp")  # each stage's way; `make test-slow` has the rest


def build(spec: RunSpec, mesh: Mesh, experts: set[str]) -> Zero:
    part = GPT(spec.model)
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.copy_(start(spec, name, parameter.shape, mesh.rank("ep"), experts))
    return Zero(part, spec, mesh, experts, spec.parallel.zero)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Outcome]]:
    return on_ranks(WORLD, compare_cases, {f"{name} / sgd": SPECS[name] for name in EVERYDAY}, build)


@pytest.fixture(scope="module")
def all_outcomes() -> list[dict[str, Outcome]]:
    return on_ranks(WORLD, compare_cases, CASES, build)


@pytest.mark.parametrize("name", EVERYDAY)
def test_steps_equal_one_rank(outcomes: list[dict[str, Outcome]], name: str) -> None:
    for outcome in outcomes:
        check(outcome[f"{name} / sgd"].differences)
        meet_once(name, outcome[f"{name} / sgd"])


@pytest.mark.slow  # `lmworks prove parity` holds the same strategies against one rank, through the trainer
@pytest.mark.parametrize("case", CASES)
def test_steps_of_every_stage_equal_one_rank(all_outcomes: list[dict[str, Outcome]], case: str) -> None:
    for outcome in all_outcomes:
        check(outcome[case].differences)
        meet_once(case.split(" / ")[0], outcome[case])


def meet_once(name: str, outcome: Outcome) -> None:
    """Unless stage 2 shards them in every pass."""
    early, late = outcome.trace.early, outcome.trace.late
    assert late
    assert len(early) == (2 * len(late) if name.startswith("stage 2") else 0)
    assert {"allreduce_"} == {*late} if "stage 0" in name or "ddp" in name else {"_reduce_scatter_base_"} == {*late}


def test_steps_without_contexts_as_in_a_pipeline() -> None:
    specs = {f"stage {n}": make_spec({"dp": 2, "strategy": "zero", "zero": n}) for n in range(3)}
    for outcome in on_ranks(2, compare_cases, with_rules(specs, ("",)), build, False):
        for case in outcome.values():
            assert case.trace.early == []
            check(case.differences)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_frozen_weight_stays_as_it_is(when: str) -> None:
    for moved in on_ranks(2, steps_with_a_frozen_weight, when):
        assert moved == {"norm.weight": False, "head.weight": True, "blocks.0.mlp.up.weight": True}


def steps_with_a_frozen_weight(rank: int, when: str) -> dict[str, bool]:
    """Whether some weights changed in two steps of any stage, where the last norm is frozen `when` Zero is made."""
    changed = set()
    for stage in range(3):
        spec = make_spec({"dp": 2, "strategy": "zero", "zero": stage})
        part = GPT(spec.model)
        before = {name: weight.detach().clone() for name, weight in part.named_parameters()}
        part.norm.weight.requires_grad_(when == "after")
        zero = Zero(part, spec, mesh_of(Grid.of(spec.parallel)), set(), stage)
        part.norm.weight.requires_grad_(False)
        optimizer = torch.optim.SGD([shard.leaf for shard in zero.shards()], lr=0.1)
        for _ in range(2):
            with zero.micro_batch(last=True):
                tokens = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(rank))
                zero(tokens[:, :-1], tokens[:, 1:], keep_logits=False)[1].backward()
            zero.finish()
            optimizer.step()
            zero.after_step()
            zero.zero_grad()
        changed |= {name for name, weight in part.named_parameters() if not torch.equal(weight, before[name])}
    return {name: name in changed for name in ("norm.weight", "head.weight", "blocks.0.mlp.up.weight")}
