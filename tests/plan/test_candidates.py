"""Candidates of a search: exactly the layouts that a run spec accepts."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from lmworks.plan.search.candidates import (
    LayoutKind,
    SearchProblem,
    cases,
    degree_grid,
    divides,
    layout_kinds,
    legal,
    run_of,
)
from lmworks.spec import ModelSpec, ParallelSpec, RunSpec, SpecError
from lmworks.spec.hardware import parse_cluster
from lmworks.spec.layout import LOOPED

SMALL = ModelSpec(layers=8, hidden=64, heads=8, kv_heads=2, ffn=96, vocab=256, context=128)
MOE = SMALL.replace(experts=4, top_k=2, expert_ffn=32)


def question(model: ModelSpec = SMALL, cluster: str = "16xh100", batch: int = 32, **pinned: object) -> SearchProblem:
    machines = parse_cluster(cluster)
    gpu = machines.accelerator
    assert gpu
    return SearchProblem(model, machines, gpu, 128, batch, compile=False, pinned=pinned)


def run_with(asked: SearchProblem, kind: LayoutKind, row: dict[str, int]) -> RunSpec:
    constant = {"cp_method": asked.constant.cp_method}
    base = RunSpec.from_dict({"model": asked.model.to_dict(), "data": {"seq": asked.seq}, "parallel": constant})
    return run_of(asked, row | vars(kind) | {"offload_activations": 0}, base)


@pytest.mark.parametrize("model", [SMALL, MOE], ids=["dense", "experts"])
def test_every_candidate_is_a_legal_run_of_the_whole_cluster(model: ModelSpec) -> None:
    asked, drawn = question(model), random.Random(0)
    for kind, case in cases(asked):
        index = drawn.randrange(len(case.tp))  # type: ignore[arg-type]
        row = {name: int(value[index]) for name, value in vars(case).items() if isinstance(value, np.ndarray)}
        spec = run_with(asked, kind, row)
        assert spec.parallel.world == 16
        assert spec.accumulation == row["accumulation"]


@pytest.mark.parametrize("seq", [128, 24, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_degrees_are_those_that_the_spec_accepts(method: str, dtype: str, seq: int) -> None:
    """In every number format and for both ways of context parallelism, on sequences of which few divide."""
    asked = replace(question(batch=16, cp=2), constant=ParallelSpec(cp_method=method), dtype=dtype, seq=seq)
    columns, axes = degree_grid(asked), ("tp", "pp", "micro_batch")
    found = set(zip(*(columns[axis].tolist() for axis in axes), strict=True))
    agreed = Counter[bool]()
    for tp, pp, micro in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16)):
        dp = 8 // (tp * pp)
        if not dp or 16 % (dp * micro):
            continue
        row = {"tp": tp, "cp": 2, "pp": pp, "ep": 1, "dp_shard": 1, "dp_replicate": dp, "virtual": 1}
        try:
            run_with(asked, LayoutKind(0, "gpipe" if pp > 1 else "1f1b", "none", "none"), row | {"micro_batch": micro})
        except SpecError:
            assert (tp, pp, micro) not in found
            agreed[False] += 1
        else:
            assert (tp, pp, micro) in found
            agreed[True] += 1
    assert agreed[True] or (method, seq) == ("ring", 100) or dtype == "fp8"
    assert agreed[False] or (method, dtype, seq) == ("ring", "bf16", 128)


def test_what_was_not_priced_is_in_no_layout_that_is_found() -> None:
    asked = question(pp=2)
    kind, case = next(cases(asked))
    row = {name: int(value[0]) for name, value in vars(case).items() if isinstance(value, np.ndarray)}
    base = RunSpec.from_dict({"model": SMALL.to_dict(), "data": {"seq": 128}, "parallel": {"offload_activations": 1.0}})
    assert run_of(asked, row | vars(kind) | {"offload_activations": 0}, base).parallel.offload_activations == 0


def test_what_is_left_out_is_refused_by_the_spec() -> None:
    """The masks against `spec.layout`, on degrees of which many do not fit."""
    asked = question(batch=24, recompute="none")
    sizes = [
        (tp, cp, pp, 16 // (tp * cp * pp))
        for tp, cp, pp in itertools.product((1, 2, 8), (1, 2), (1, 2, 8, 16))
        if 16 % (tp * cp * pp) == 0
    ]
    accepted = refused = 0
    every = list(itertools.product(layout_kinds(asked), sizes, (1, 2, 3)))
    for kind, (tp, cp, pp, dp), virtual in random.Random(0).sample(every, len(every) // 3):
        shard = dp if kind.zero else 1
        row = {"tp": tp, "cp": cp, "pp": pp, "ep": 1, "dp_shard": shard, "dp_replicate": dp // shard, "micro_batch": 1}
        row["virtual"] = virtual
        if (pp == 1 and (kind.schedule != "1f1b" or virtual > 1)) or (kind.schedule in LOOPED and virtual == 1):
            continue  # without a meaning of its own: left out, not refused
        if kind.zero and dp == 1:
            continue
        columns = {name: np.array([value]) for name, value in row.items()}
        allowed = (
            asked.global_batch % dp == 0
            and divides(SMALL, 128, tp, cp, pp * virtual)
            and bool(legal(asked, kind, columns)[0])
        )
        try:
            run_with(asked, kind, row)
        except SpecError:
            assert not allowed, (kind, row)
            refused += 1
        else:
            assert allowed, (kind, row)
            accepted += 1
    assert accepted > 50 and refused > 50


def test_pinned_values_are_kept() -> None:
    found = list(cases(question(tp=4, zero=3, schedule="1f1b")))
    assert found
    for kind, case in found:
        assert kind.zero == 3 and kind.schedule == "1f1b"
        assert set(np.asarray(case.tp)) == {4}


def test_stages_of_a_rank_may_be_fixed_to_a_number_that_is_not_tried() -> None:
    """Ten for 80 blocks on four ranks of a pipeline; without being asked, five and eight."""
    model = SMALL.replace(layers=80)
    found = degree_grid(question(model, pp=4))["virtual"]
    assert set(found.tolist()) == {1, 2, 3, 4, 5, 6, 8}
    assert set(degree_grid(question(model, pp=4, virtual=10))["virtual"].tolist()) == {10}
