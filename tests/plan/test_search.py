"""The search: its front is one, what it finds fits and runs, and the closed form agrees with the timeline."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from lmworks.plan.case import Case
from lmworks.plan.memory.budget import budget
from lmworks.plan.memory.reserve import oom_probability, usable
from lmworks.plan.search.candidates import NUMBERS, Question, cases, question_of
from lmworks.plan.search.explain import changed_by, explain, filled, read_layout
from lmworks.plan.search.search import Result, enough, fitting, front, least, search, unbeaten
from lmworks.plan.step.price import price
from lmworks.plan.wish import Wish, job
from lmworks.spec import RunSpec, SpecError


def asked(model: str, cluster: str, batch: int, seq: int = 8192, **pinned: object) -> tuple[RunSpec, Question]:
    base = job(model, [], Wish(seq=seq, micro_batch=1, global_batch=batch))
    return base, question_of(base, cluster, pinned=pinned)


@pytest.fixture(scope="module")
def found() -> tuple[RunSpec, Question, Result]:
    base, question = asked("llama3-8b", "32xh100", 128)
    return base, question, search([question])


def test_unbeaten_rows_are_those_that_nothing_beats() -> None:
    drawn = np.random.default_rng(0)
    seconds, reserved = drawn.integers(0, 20, 200).astype(float), drawn.integers(0, 20, 200).astype(float)
    rows = unbeaten(seconds, reserved)
    kept = {(seconds[row], reserved[row]) for row in rows}
    for s, r in zip(seconds, reserved, strict=True):
        beaten = ((seconds <= s) & (reserved <= r) & ((seconds < s) | (reserved < r))).any()
        assert beaten != ((s, r) in kept)
    assert list(seconds[rows]) == sorted(seconds[rows])
    assert len(kept) == len(rows)


def test_front_is_every_candidate_priced_one_by_one(found: tuple[RunSpec, Question, Result]) -> None:
    """Case by case against one by one: the same layouts, seconds and bytes."""
    _, question, _ = found
    small = Question(question.model, question.cluster, question.gpu, 8192, 128, pinned={"recompute": "full", "cp": 1})
    best = front(fitting(small, Counter()))
    for layout in best[:5]:
        scalars = {name: int(getattr(layout.case, name)) for name in (*NUMBERS, "accumulation")}
        alone = layout.case.replace(**scalars)
        assert float(price(alone).seconds) == pytest.approx(layout.step_s, rel=1e-9)
        assert float(budget(alone).reserved) == pytest.approx(layout.reserved, rel=1e-9)
    fastest = min(
        float(np.min(np.where(budget(case).reserved <= question.room, price(case).seconds, np.inf)))
        for kind, case in cases(small)
        if kind.offload == "none"
    )
    assert best[0].step_s <= fastest


def test_what_is_found_fits_and_is_a_run_of_the_whole_cluster(found: tuple[RunSpec, Question, Result]) -> None:
    base, question, result = found
    assert result.legal > result.fitting > len(result.front) > 1
    for layout in result.front:
        spec = layout.spec(base)
        assert spec.parallel.world == 32
        assert spec.data.global_batch == 128
        assert RunSpec.from_dict(spec.to_dict()) == spec
        assert 0 < layout.reserved <= question.room < usable(question.gpu)
        assert oom_probability(layout.reserved, question.gpu) <= 0.1
        again = Case.of(spec, question.gpu)
        assert float(budget(again).reserved) == pytest.approx(layout.reserved, rel=1e-6)
    speeds = [layout.tokens_per_s for layout in result.front]
    rooms = [layout.headroom for layout in result.front]
    assert speeds == sorted(speeds, reverse=True)
    assert rooms == sorted(rooms)


def test_closed_form_and_timeline_agree(found: tuple[RunSpec, Question, Result]) -> None:
    """The best are priced again, and may not turn out to be something else."""
    _, _, result = found
    for layout in result.front:
        assert float(price(layout.case).seconds) == pytest.approx(layout.step_s, rel=0.02), layout.case.text


def test_several_clusters_are_told_apart_by_what_they_cost() -> None:
    base, hopper = asked("llama3-8b", "8xh100", 64, cp=1)
    ampere = question_of(base, "8xa100", pinned={"cp": 1})
    result = search([hopper, ampere])
    assert result.front[0].question is hopper  # the faster one
    figures = [(one.tokens_per_s, one.headroom, -one.dollars_per_gtoken) for one in result.front]
    for own in figures:
        assert not any(all(a >= b for a, b in zip(other, own, strict=True)) and other != own for other in figures)


def test_a_model_that_fits_nowhere_names_a_cluster_that_is_enough() -> None:
    _, question = asked("llama3-405b", "8xa100", 8, offload="none")
    assert least(question) > question.room
    larger = enough(question)
    assert larger and least(larger) <= question.room
    assert larger.cluster.gpus > 8


def test_explaining_names_what_binds() -> None:
    base, question = asked("llama3-70b", "64xh100", 256)
    nothing = Result((), 0, 0)
    rule = explain(question, read_layout(["tp=3"]), base, nothing)
    assert rule.binding == "rule" and rule.text == "tp × cp × pp = 3 does not divide the 64 GPUs"
    rule = explain(question, read_layout(["tp=16", "schedule=zbv"]), base, nothing)
    assert rule.binding == "rule" and "virtual_stages = 2 needs parallel.pp > 1" in rule.text
    full = explain(question, read_layout(["tp=8", "zero=0"]), base, nothing)
    assert full.binding == "memory" and full.budget and float(full.budget.reserved) > question.room
    assert full.changes
    fits = explain(question, read_layout(["tp=8", "pp=4", "recompute=full"]), base, nothing)
    assert fits.binding == "" and fits.step_s and fits.step_s > 0


def test_a_change_is_as_small_as_it_can_be() -> None:
    _, question = asked("llama3-70b", "64xh100", 256)
    layout = filled(question, {"tp": 4, "micro_batch": 2})
    single = {text for _, text in changed_by(layout, 1)}
    assert single == {
        "recompute none → selective",
        "recompute none → full",
        "offload none → optimizer",
        "offload none → full",
        "micro_batch 2 → 1",
        "tp 4 → 8, dp_shard 16 → 8",
        "cp 1 → 2, dp_shard 16 → 8",
        "pp 1 → 2, dp_shard 16 → 8",
    }
    for changed, _ in changed_by(layout, 2):
        assert changed["tp"] * changed["pp"] * changed["cp"] * changed["dp_shard"] == 64


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("tp", "write name=value"),
        ("colour=3", "colour is no part of a layout"),
        ("tp=0", "tp = 0 must be a whole number, at least 1"),
        ("recompute=some", "it can be none, selective, full"),
        ("zero=4", "it can be 0, 1, 2, 3"),
        ("schedule=2f2b", "it can be gpipe"),
    ],
)
def test_nonsense_in_a_layout_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(SpecError, match=wrong):
        read_layout([text])
