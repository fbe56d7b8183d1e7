"""The search: its front is one, what it finds fits and runs, and the closed form agrees with the timeline."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from lmworks.plan.case import Case
from lmworks.plan.cluster_request import ClusterRequest, run_on_cluster
from lmworks.plan.devices.machine import Machine
from lmworks.plan.memory.reserve import oom_probability, usable
from lmworks.plan.memory.sheet import budget, run_budget
from lmworks.plan.predict import predict
from lmworks.plan.search.candidates import NUMBERS, SearchProblem, cases, problem_of
from lmworks.plan.search.explain import changed_by, explain, read_layout, with_defaults
from lmworks.plan.search.search import (
    Result,
    fitting,
    front,
    min_memory_bytes,
    pareto_front_rows,
    search,
    smallest_fitting_cluster,
)
from lmworks.plan.step.price import price
from lmworks.spec import RunSpec, SpecError


def asked(model: str, cluster: str, batch: int, seq: int = 8192, **pinned: object) -> tuple[RunSpec, SearchProblem]:
    base = run_on_cluster(model, [], ClusterRequest(seq=seq, micro_batch=1, global_batch=batch, dtype="bf16"))
    return base, problem_of(base, cluster, pinned=pinned)


@pytest.fixture(scope="module")
def found() -> tuple[RunSpec, SearchProblem, Result]:
    base, question = asked("llama3-8b", "32xh100", 128, offload="none")
    return base, question, search([question])


def test_unbeaten_rows_are_those_that_nothing_beats() -> None:
    drawn = np.random.default_rng(0)
    seconds, reserved = drawn.integers(0, 20, 200).astype(float), drawn.integers(0, 20, 200).astype(float)
    rows = pareto_front_rows(seconds, reserved)
    kept = {(seconds[row], reserved[row]) for row in rows}
    for s, r in zip(seconds, reserved, strict=True):
        beaten = ((seconds <= s) & (reserved <= r) & ((seconds < s) | (reserved < r))).any()
        assert beaten != ((s, r) in kept)
    assert list(seconds[rows]) == sorted(seconds[rows])
    assert len(kept) == len(rows)


def test_front_is_every_candidate_priced_one_by_one(found: tuple[RunSpec, SearchProblem, Result]) -> None:
    """Case by case against one by one: the same layouts, seconds and bytes."""
    _, question, _ = found
    small = SearchProblem(
        question.model,
        question.cluster,
        question.gpu,
        8192,
        128,
        pinned={"recompute": "full", "cp": 1, "offload": "none"},
    )
    best = front(fitting(small, Counter()))
    for layout in best[:5]:
        scalars = {name: int(getattr(layout.case, name)) for name in (*NUMBERS, "accumulation")}
        alone = layout.case.replace(**scalars)
        assert float(price(alone).seconds) == pytest.approx(layout.step_s, rel=1e-9)
        assert float(budget(alone).reserved) == pytest.approx(layout.reserved, rel=1e-9)
    fastest = min(
        float(np.min(np.where(budget(case).reserved <= question.safe_bytes, price(case).seconds, np.inf)))
        for _, case in cases(small)
    )
    assert best[0].step_s <= fastest


def test_what_is_found_fits_and_is_a_run_of_the_whole_cluster(found: tuple[RunSpec, SearchProblem, Result]) -> None:
    base, question, result = found
    assert result.legal > result.fitting > len(result.front) > 1
    for layout in result.front:
        spec = layout.spec(base)
        assert spec.parallel.world == 32
        assert spec.data.global_batch == 128
        assert RunSpec.from_dict(spec.to_dict()) == spec
        assert 0 < layout.reserved <= question.safe_bytes < usable(question.gpu)
        assert oom_probability(layout.reserved, question.gpu) <= 0.1
        again = Case.of(spec, question.gpu)
        assert float(budget(again).reserved) == pytest.approx(layout.reserved, rel=1e-6)
    speeds = [layout.tokens_per_s for layout in result.front]
    rooms = [layout.headroom for layout in result.front]
    assert speeds == sorted(speeds, reverse=True)
    assert rooms == sorted(rooms)


@pytest.mark.parametrize("lora", [{"rank": 16}, {"rank": 16, "base": "nf4"}], ids=["lora", "qlora"])
def test_layouts_of_adapters_are_those_of_the_run(lora: dict[str, object]) -> None:
    """Bytes and seconds of each are those of the spec that is written, and gradients cost nearly nothing."""
    base = run_on_cluster("llama3-8b", [], ClusterRequest(seq=4096, micro_batch=1, global_batch=16, dtype="bf16"))
    base = base.replace(lora=base.lora.replace(**lora))
    pinned = {"cp": 1, "pp": 1, "recompute": "none", "offload": "none", "micro_batch": 1}
    found = search([problem_of(base, "8xh100", pinned=pinned)])
    assert {layout.words.zero for layout in found.front} - {0}
    for layout in found.front:
        again = Case.of(layout.spec(base), layout.problem.gpu)
        assert again.adapters and again.frozen_base == base.lora.base
        assert float(budget(again).reserved) == pytest.approx(layout.reserved, rel=1e-6)
        priced = price(again)
        assert float(priced.seconds) == pytest.approx(layout.step_s, rel=1e-6)
        assert float(priced.parts["optimizer"]) < 0.01 * layout.step_s


def test_closed_form_and_timeline_agree(found: tuple[RunSpec, SearchProblem, Result]) -> None:
    """The best are priced again, and may not turn out to be something else."""
    _, _, result = found
    for layout in result.front:
        assert float(price(layout.case).seconds) == pytest.approx(layout.step_s, rel=0.02), layout.case.text


def test_several_clusters_are_told_apart_by_what_they_cost() -> None:
    base, hopper = asked("llama3-8b", "8xh100", 64, cp=1, pp=1, offload="none")
    ampere = problem_of(base, "8xa100", pinned=hopper.pinned)
    result = search([hopper, ampere])
    assert result.front[0].problem is hopper  # the faster one
    figures = [(one.tokens_per_s, one.headroom, -one.dollars_per_gtoken) for one in result.front]
    for own in figures:
        assert not any(all(a >= b for a, b in zip(other, own, strict=True)) and other != own for other in figures)


def test_a_model_that_fits_nowhere_names_a_cluster_that_is_enough() -> None:
    """Its weights, gradients and states alone are 83 A100s full: 128 of them hold no activations beside."""
    pinned = {"offload": "none", "recompute": "full", "cp": 1, "tp": 8, "schedule": "1f1b"}
    _, question = asked("llama3-405b", "64xa100", 128, **pinned)
    larger = smallest_fitting_cluster(question)
    assert larger and larger.cluster.gpus == 256
    half = replace(larger, cluster=larger.cluster.replace(nodes=larger.cluster.nodes // 2))
    assert min_memory_bytes(larger) <= question.safe_bytes < min_memory_bytes(half)


def test_explaining_names_what_binds() -> None:
    base, question = asked("llama3-70b", "64xh100", 256)
    nothing = Result((), 0, 0)
    rule = explain(question, read_layout(["tp=3"]), base, nothing)
    assert rule.binding == "rule" and rule.text == "tp × cp × pp = 3 does not divide the 64 GPUs"
    rule = explain(question, read_layout(["tp=16", "schedule=zbv"]), base, nothing)
    assert rule.binding == "rule" and "virtual_stages = 2 needs parallel.pp > 1" in rule.text
    full = explain(question, read_layout(["tp=8", "zero=0"]), base, nothing)
    assert full.binding == "memory" and full.budget and float(full.budget.reserved) > question.safe_bytes
    assert full.changes
    fits = explain(question, read_layout(["tp=8", "pp=4", "recompute=full"]), base, nothing)
    assert fits.binding == "" and fits.step_s and fits.step_s > 0


def test_a_change_is_as_small_as_it_can_be() -> None:
    _, question = asked("llama3-70b", "64xh100", 256)
    layout = with_defaults(question, {"tp": 4, "micro_batch": 2})
    single = {text for _, text in changed_by(layout, 1, lambda _: 7)}
    assert single == {
        "recompute none → selective",
        "recompute none → mlp",
        "recompute none → full",
        "offload none → optimizer",
        "offload none → full",
        "micro_batch 2 → 1",
        "offload_activations 0 → 7",
        "tp 4 → 8, dp_shard 16 → 8",
        "cp 1 → 2, dp_shard 16 → 8",
        "pp 1 → 2, dp_shard 16 → 8",
    }
    for changed, _ in changed_by(layout, 2, lambda _: 0):
        assert changed["offload_activations"] == 0
        assert changed["tp"] * changed["pp"] * changed["cp"] * changed["dp_shard"] == 64


@pytest.fixture(scope="module")
def one_gpu() -> tuple[RunSpec, SearchProblem, Result]:
    """Llama 3 8B on one H200 with bf16 weights and states: 48 GB of these, 74 GB of activations of 16,384 tokens."""
    half = ["precision.dtype=bf16", "precision.weights=bf16", "precision.states=bf16", "precision.master=false"]
    base = run_on_cluster("llama3-8b", half, ClusterRequest(seq=8192, micro_batch=1, global_batch=4))
    question = problem_of(base, "1xh200")
    return base, question, search([question])


def test_activations_wait_in_host_memory_where_that_is_faster(one_gpu: tuple[RunSpec, SearchProblem, Result]) -> None:
    """As many as are missing, to the GiB, for the layout that would not fit; what fits has none."""
    _, question, result = one_gpu
    best = result.front[0]
    assert best.offload_gib > 0 and best.words.recompute == "none"
    less = best.case.replace(offload_activations=best.offload_gib - 1)
    assert float(budget(less).reserved) > question.safe_bytes
    plain = search([replace(question, pinned={"offload_activations": 0})]).front[0]
    assert best.step_s < plain.step_s and plain.offload_gib == 0
    pinned = search([replace(question, pinned={"offload_activations": 30.5})])
    assert {layout.offload_gib for layout in pinned.front} == {30.5}


def test_figures_of_what_is_found_are_those_of_its_plan(one_gpu: tuple[RunSpec, SearchProblem, Result]) -> None:
    """Activations in host memory and blocks that compute their MLP again among them."""
    base, question, result = one_gpu
    kinds = {(layout.words.recompute, layout.offload_gib > 0) for layout in result.front}
    assert {("none", True), ("mlp", False)} <= kinds
    for layout in result.front:
        spec = layout.spec(base)
        assert (spec.parallel.offload_activations, spec.parallel.recompute) == (
            layout.offload_gib,
            layout.words.recompute,
        )
        told = predict(spec, Machine.of(question.gpu))
        assert told.time is not None and told.time.total == pytest.approx(layout.step_s, rel=1e-9)
        exact = run_budget(spec)
        assert float(layout.budget.allocated) == pytest.approx(float(exact.allocated), rel=0.005), layout.case.text
        assert told.memory.host == exact.host == pytest.approx(float(layout.budget.host), rel=1e-9)


def test_what_is_not_asked_about_does_not_fit() -> None:
    """The search leaves out rows that do not fit with all blocks recomputed: every case, row by row, says the same."""
    _, question = asked("llama3-8b", "4xh100", 8, offload="none", offload_activations=0)
    eager = replace(question, compile=False, pinned={**question.pinned, "schedule": "zbv"})
    for one in (question, eager):
        counted: Counter[str] = Counter()
        fitting(one, counted)
        every = [np.asarray(budget(case).reserved) for _, case in cases(one)]
        assert counted["legal"] == sum(map(len, every))
        assert counted["fitting"] == sum(int((each <= one.safe_bytes).sum()) for each in every)
        assert min_memory_bytes(one) == min(float(each.min()) for each in every)


def test_what_only_fits_with_activations_in_host_memory_is_found() -> None:
    """It fits under no recompute without them, and is fastest with less recompute and more of them."""
    pinned = {"cp": 1, "schedule": "1f1b"}
    _, question = asked("llama3-70b", "16xh100", 32, **pinned)
    (first, *_) = search([question]).front
    assert first.words.recompute == "mlp" and first.words.offload == "optimizer"
    assert first.step_s == pytest.approx(22.49, abs=0.2) and float(first.case.offload_activations) > 50
    _, plainer = asked("llama3-70b", "16xh100", 32, **pinned, recompute="full")
    assert first.step_s < 0.99 * search([plainer]).front[0].step_s


def test_explaining_tells_what_could_wait_in_host_memory() -> None:
    base, question = asked("llama3-8b", "8xh100", 64)
    nothing = Result((), 0, 0)
    full = explain(question, read_layout(["micro_batch=4", "recompute=selective"]), base, nothing)
    assert full.binding == "memory"
    (away,) = (change for change in full.changes if change.startswith("offload_activations"))
    gibs = int(away.split("→")[1].split()[0])
    said = read_layout(["micro_batch=4", "recompute=selective", f"offload_activations={gibs}"])
    fits = explain(question, said, base, nothing)
    assert fits.binding == "" and fits.budget and float(fits.budget.host) == pytest.approx(gibs * 2**30, rel=0.001)
    assert f"{gibs}.0 GiB of host memory ({8 * gibs}." in fits.text
    piped = explain(question, read_layout(["pp=2", "offload_activations=1"]), base, nothing)
    assert piped.binding == "rule" and "works without parallel.pp = 2" in piped.text


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("tp", "write name=value"),
        ("colour=3", "colour is no part of a layout"),
        ("tp=0", "tp = 0 must be a whole number, at least 1"),
        ("recompute=some", "it can be none, selective, mlp, full"),
        ("offload_activations=-1", "offload_activations = -1 must be GiB, at least 0"),
        ("offload_activations=some", "must be GiB, at least 0"),
        ("zero=4", "it can be 0, 1, 2, 3"),
        ("schedule=2f2b", "it can be gpipe"),
    ],
)
def test_nonsense_in_a_layout_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(SpecError, match=wrong):
        read_layout([text])
