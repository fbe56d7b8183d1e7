"""Candidates of a search: exactly the layouts that a run spec accepts."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from lmworks.plan.candidates import Question, Words, cases, cuts, legal, words
from lmworks.spec import ModelSpec, RunSpec, SpecError
from lmworks.spec.hardware import parse_cluster

SMALL = ModelSpec(layers=8, hidden=64, heads=8, kv_heads=2, ffn=96, vocab=256, context=128)
MOE = SMALL.replace(experts=4, top_k=2, expert_ffn=32)


def question(model: ModelSpec = SMALL, cluster: str = "16xh100", batch: int = 32, **pinned: object) -> Question:
    machines = parse_cluster(cluster)
    gpu = machines.accelerator
    assert gpu
    return Question(model, machines, gpu, 128, batch, compile=False, pinned=pinned)


def run_of(asked: Question, kind: Words, row: dict[str, int], sp: bool) -> RunSpec:
    strategy = {0: "ddp", 1: "zero", 2: "zero", 3: "fsdp2"}[kind.zero]
    parallel = {name: row[name] for name in ("tp", "cp", "pp", "ep", "dp_replicate", "dp_shard")}
    parallel |= {"strategy": strategy, "zero": kind.zero if strategy == "zero" else 0, "sp": sp}
    parallel |= {"schedule": kind.schedule, "virtual_stages": kind.virtual if row["pp"] > 1 else 1}
    parallel |= {"recompute": kind.recompute, "offload": kind.offload}
    data = {"seq": asked.seq, "micro_batch": row["micro_batch"], "global_batch": asked.global_batch}
    return RunSpec.from_dict({"model": asked.model.to_dict(), "data": data, "parallel": parallel})


@pytest.mark.parametrize("model", [SMALL, MOE], ids=["dense", "experts"])
def test_every_candidate_is_a_legal_run_of_the_whole_cluster(model: ModelSpec) -> None:
    asked, drawn = question(model), random.Random(0)
    for kind, case in cases(asked):
        index = drawn.randrange(len(case.tp))  # type: ignore[arg-type]
        row = {name: int(value[index]) for name, value in vars(case).items() if isinstance(value, np.ndarray)}
        spec = run_of(asked, kind, row, case.sp)
        assert spec.parallel.world == 16
        assert spec.accumulation == row["accumulation"]


def test_what_is_left_out_is_refused_by_the_spec() -> None:
    """The masks against `spec.layout`, on degrees of which many do not fit."""
    asked = question(batch=24)
    sizes = [
        (tp, cp, pp, 16 // (tp * cp * pp))
        for tp, cp, pp in itertools.product((1, 2, 4, 8), (1, 2), (1, 2, 4, 8, 16))
        if 16 % (tp * cp * pp) == 0
    ]
    accepted = refused = 0
    for kind, (tp, cp, pp, dp) in itertools.product(words(asked), sizes):
        shard = dp if kind.zero else 1
        row = {"tp": tp, "cp": cp, "pp": pp, "ep": 1, "dp_shard": shard, "dp_replicate": dp // shard, "micro_batch": 1}
        if pp == 1 and kind.schedule != "1f1b":
            continue  # words without a meaning: left out once, not refused
        if kind.zero and dp == 1:
            continue
        columns = {name: np.array([value]) for name, value in row.items()}
        allowed = asked.global_batch % dp == 0 and cuts(SMALL, 128, tp, cp, pp) and bool(legal(asked, kind, columns)[0])
        try:
            run_of(asked, kind, row, tp > 1)
        except SpecError:
            assert not allowed, (kind, row)
            refused += 1
        else:
            assert allowed, (kind, row)
            accepted += 1
    assert accepted > 200 and refused > 200


def test_pinned_values_are_kept() -> None:
    found = list(cases(question(tp=4, zero=3, schedule="1f1b")))
    assert found
    for kind, case in found:
        assert kind.zero == 3 and kind.schedule == "1f1b"
        assert set(np.asarray(case.tp)) == {4}
