"""The memory of many candidates at once: against the sheet of each, and against published runs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from lmworks.plan.case import Case
from lmworks.plan.exact.shards import weights
from lmworks.plan.memory.rank_weights import resident
from lmworks.plan.memory.reserve import capacity, oom_probability, reserve, usable
from lmworks.plan.memory.sheet import Budget, budget, memory, run_budget, saved_by_blocks
from lmworks.plan.pipelines import in_flight
from lmworks.plan.software import SOFTWARE
from lmworks.spec import Grid, ModelSpec, RunSpec, SpecError, catalogue
from lmworks_validation.sources import SOURCES

H100 = catalogue()["H100-SXM-80GB"]
LLAMA = ModelSpec.from_preset("llama3-8b")

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # parallel, data
    "ddp": ({"dp": 8}, {}),
    "ddp, accumulation": ({"dp": 8}, {"global_batch": 32}),
    "zero-1": ({"dp": 8, "strategy": "zero", "zero": 1}, {}),
    "zero-2": ({"dp": 8, "strategy": "zero", "zero": 2}, {"global_batch": 32}),
    "zero-3": ({"dp": 8, "strategy": "fsdp2"}, {}),
    "zero-3, kept": ({"dp": 8, "strategy": "fsdp2", "reshard": False}, {}),
    "zero-3, accumulation": ({"dp": 8, "strategy": "fsdp2"}, {"global_batch": 32}),
    "hsdp, full": ({"dp_shard": 8, "dp_replicate": 4, "strategy": "fsdp2", "recompute": "full"}, {}),
    "zero-3, selective": ({"dp": 8, "strategy": "fsdp2", "recompute": "selective"}, {"micro_batch": 4}),
    "zero-3, mlp": ({"dp": 8, "strategy": "fsdp2", "recompute": "mlp"}, {"micro_batch": 4}),
    "every second block": (
        {"dp": 8, "strategy": "fsdp2", "recompute": "full", "recompute_every": 2}, {"micro_batch": 4}),
    "tp": ({"tp": 8}, {}),
    "tp, sp": ({"tp": 8, "sp": True, "recompute": "selective"}, {"micro_batch": 4}),
    "cp": ({"cp": 4, "dp": 4, "strategy": "fsdp2"}, {}),
    "pp": ({"pp": 4}, {"global_batch": 16}),
    "gpipe": ({"pp": 4, "schedule": "gpipe"}, {"global_batch": 16}),
    "interleaved": ({"pp": 4, "schedule": "interleaved"}, {"global_batch": 16}),
    "zbv": ({"pp": 4, "schedule": "zbv"}, {"global_batch": 16}),
    "zero-3, pp": ({"dp": 8, "strategy": "fsdp2", "pp": 4}, {"global_batch": 128}),
    "3d": (
        {"dp": 8, "strategy": "zero", "zero": 1, "tp": 2, "sp": True, "pp": 4}, {"global_batch": 128}),
    "offload": ({"dp": 8, "strategy": "fsdp2", "offload": "full"}, {}),
    "offload of activations": (
        {"dp": 8, "strategy": "fsdp2", "offload_activations": 6.0}, {"micro_batch": 4}),
    "offload of inputs": (
        {"dp": 8, "strategy": "fsdp2", "recompute": "selective", "offload_activations": 9.0}, {"micro_batch": 4}),
    "offload of all activations": (  # the highest moment is then at the lowest blocks, which have theirs back
        {"compile": True, "offload_activations": 99.0}, {"micro_batch": 4}),
    "offload of what is kept beside the MLP": (
        {"compile": True, "recompute": "mlp", "offload_activations": 5.0}, {"micro_batch": 4}),
    "offload of every second block": (
        {"dp": 8, "strategy": "fsdp2", "recompute": "full", "recompute_every": 2, "offload_activations": 30.0},
        {"micro_batch": 4}),
}  # fmt: skip


def run(parallel: dict[str, Any], data: dict[str, Any], preset: str = "llama3-8b") -> RunSpec:
    given = {"seq": 4096, "micro_batch": 1, **data}
    return RunSpec.from_dict(
        {"model": {"preset": preset}, "data": given, "parallel": parallel, "precision": {"dtype": "bf16"}}
    )


def llama(**changes: Any) -> Case:
    return Case(LLAMA, H100, SOFTWARE["lmworks"], 4096, **changes)


def together(case: Case) -> Case:
    """With other candidates in the same arrays."""
    other = {"micro_batch": 2, "tp": 2, "pp": 2, "dp_shard": 2, "accumulation": 4, "virtual": case.virtual}
    numbers = ("micro_batch", "accumulation", "dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "virtual")
    return case.replace(**{name: np.array([getattr(case, name), other.get(name, 1)]) for name in numbers})


def check(spec: RunSpec) -> None:
    """Rounded row by row in a sheet, and not in arrays."""
    for stage in {0, spec.parallel.pp - 1}:
        said, sheet = (
            budget(together(Case.of(spec)), np.array([stage, 0])),
            memory(spec, "cuda", Grid.of(spec.parallel).rank(pp=stage)),
        )
        held = resident(spec, Grid.of(spec.parallel).rank(pp=stage))
        assert np.broadcast_to(said.allocated, 2)[0] == pytest.approx(sheet.total, abs=20)
        for name in ("parameters", "gradients", "master", "optimizer"):
            assert np.broadcast_to(getattr(said, name), 2)[0] == getattr(held, name), name
        assert np.broadcast_to(said.host, 2)[0] == sheet.host


@pytest.mark.parametrize("precision", [{}, {"weights": "bf16", "states": "bf16"}], ids=["fp32 weights", "bf16 weights"])
@pytest.mark.parametrize(("parallel", "data"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_many_candidates_have_the_bytes_of_each_ones_sheet(
    parallel: dict[str, Any], data: dict[str, Any], precision: dict[str, str]
) -> None:
    spec = run(parallel, data)
    check(spec.replace(precision=spec.precision.replace(**precision)))


def test_experts_too() -> None:
    check(run({"dp": 8, "ep": 8, "strategy": "fsdp2"}, {}, "mixtral-8x7b"))
    check(run({"dp": 8, "ep": 4, "pp": 2, "strategy": "fsdp2"}, {"global_batch": 64}, "mixtral-8x7b"))


def test_a_budget_adds_up_to_the_rows_of_its_sheet() -> None:
    spec = run({"dp": 8, "strategy": "fsdp2", "pp": 2}, {"global_batch": 32})
    sheets = [memory(spec, "cuda", Grid.of(spec.parallel).rank(pp=stage)) for stage in (0, 1)]
    assert [run_budget(spec, stage).allocated for stage in (0, 1)] == [sheet.total for sheet in sheets]
    assert run_budget(spec).allocated == max(sheet.total for sheet in sheets)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [
        ("gpipe", 1),
        ("looped-bfs", 2),
        ("1f1b", 1),
        ("interleaved", 3),
        ("interleaved-zero-bubble", 2),
        ("zbv", 2),
        ("dualpipev", 2),
    ],
)
def test_states_of_a_pipeline_repeat(schedule: str, virtual: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of many micro-batches has the highest states of a shorter one."""
    orders = [(many * ranks, rank, whole) for many in (5, 9) for rank in range(ranks) for whole in (True, False)]

    def states() -> list[dict[in_flight.PassKind, set[Any]]]:
        found = [in_flight.pass_states.__wrapped__(schedule, ranks, virtual, *order) for order in orders]
        return [{kind: {*map(tuple, table)} for kind, table in each.items()} for each in found]

    few = states()
    monkeypatch.setattr(in_flight, "repeating", lambda _schedule, _ranks, micro_batches: micro_batches)
    assert few == states()


# --- published runs -------------------------------------------------------------------------------------


def test_torchtitan_reserves_what_it_says() -> None:
    """20 runs from 8 to 512 GPUs, reserved bytes: 3 % off in the mean, none more than 15 %."""
    rows = [row for row in SOURCES["torchtitan"].rows() or [] if row.reserved]
    errors = np.array([float(budget(row.case).reserved) / row.reserved - 1 for row in rows if row.reserved])
    assert len(errors) == 20
    assert np.abs(errors).mean() < 0.04
    assert np.abs(errors).max() < 0.15


def test_korthikanti_is_reproduced() -> None:
    """34 + 5as/h bytes a token and layer, cut by tp and sp, and 1 + (p − 1)/pv as many when interleaved."""
    rows = [row for row in SOURCES["korthikanti"].rows() or [] if row.activations and row.share_of is None]
    assert len(rows) == 8
    for row in rows:
        assert float(saved_by_blocks(row.case)) == pytest.approx(row.activations, rel=0.001)
        first = budget(row.case, 0)
        assert row.states is not None
        assert float(first.parameters + first.gradients + first.master + first.optimizer) > row.states


def test_runs_that_were_published_fit() -> None:
    """llm-foundry's micro-batches are as large as fits: none is said not to, and the fullest nearly fill the GPU."""
    rows = SOURCES["llm-foundry"].rows() or []
    full = np.array([float(budget(row.case).reserved) / usable(row.case.gpu) for row in rows])
    assert full.max() <= 1
    assert full.max() > 0.9


# --- arithmetic -----------------------------------------------------------------------------------------


def test_zero_cuts_one_kind_after_another() -> None:
    bytes_of = {zero: budget(llama(zero=zero, dp_shard=8)) for zero in range(4)}
    whole = 4 * LLAMA.params
    steps = 4 * len(weights(LLAMA))  # an fp32 count for each tensor
    assert [float(bytes_of[z].optimizer) - steps for z in range(4)] == [2 * whole, *[2 * whole / 8] * 3]
    assert [float(bytes_of[z].gradients) for z in range(4)] == [whole, whole, whole / 8, whole / 8]
    assert [float(bytes_of[z].parameters) for z in range(4)] == [whole, whole, whole, whole / 8]


@pytest.mark.parametrize(
    ("optimizer", "each"), [("adamw", 8), ("adamw8bit", 2.03), ("adafactor", 0.00157), ("sgd", 0), ("muon", 4)]
)
def test_states_by_optimizer(optimizer: str, each: float) -> None:
    assert float(budget(llama(optimizer=optimizer)).optimizer) == pytest.approx(each * LLAMA.params, rel=0.01)


def test_megatron_holds_18_bytes_a_parameter() -> None:
    found = budget(Case(LLAMA, H100, SOFTWARE["megatron"], 4096))
    state = found.parameters + found.gradients + found.master + found.optimizer
    assert float(state) == 18 * LLAMA.params


def test_an_optimizer_that_nobody_knows() -> None:
    with pytest.raises(SpecError, match="'adam' is not known; did you mean 'adamw'"):
        budget(llama(optimizer="adam"))


def test_offload_moves_bytes_to_the_host() -> None:
    here, states, all_of_it = (
        budget(llama(zero=3, dp_shard=8, offload=kind)) for kind in ("none", "optimizer", "full")
    )
    assert float(states.optimizer) == 0
    # Weights and gradients of what is updated, and two moments; the former are pinned in powers of two.
    assert 1 < float(states.host) / (16 * LLAMA.params / 8) < 1.06
    assert float(all_of_it.host) == float(states.host)
    assert float(here.allocated) > float(states.allocated) > float(all_of_it.allocated)


def test_recompute_keeps_less() -> None:
    sizes = [float(budget(llama(recompute=kind)).activations) for kind in ("none", "selective", "mlp", "full")]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("name", SOFTWARE)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_many_at_once_are_as_one_by_one(name: str, schedule: str) -> None:
    degrees = {"tp": [1, 2, 8], "cp": [1, 2, 1], "pp": [2, 4, 2], "dp_shard": [8, 4, 2], "ep": [1, 4, 2]}
    many = {**degrees, "micro_batch": [1, 2, 4], "accumulation": [8, 16, 8]}
    model = ModelSpec.from_preset("mixtral-8x7b")
    words: dict[str, Any] = {"virtual": 1 if schedule == "1f1b" else 2, "zero": 3, "sp": True, "schedule": schedule}
    code = SOFTWARE[name]
    together = budget(Case(model, H100, code, 4096, **{key: np.array(values) for key, values in many.items()}, **words))
    for index in range(3):
        alone = budget(Case(model, H100, code, 4096, **{key: values[index] for key, values in many.items()}, **words))
        for field in fields(Budget):
            value = np.broadcast_to(getattr(together, field.name), (3,))[index]
            assert float(value) == pytest.approx(float(getattr(alone, field.name))), field.name


# --- a GPU ----------------------------------------------------------------------------------------------


def test_room_on_a_gpu() -> None:
    assert capacity(H100) == pytest.approx(79.2 * 2**30, rel=0.001)
    assert usable(H100) == capacity(H100) - reserve().context


def test_the_probability_that_it_does_not_fit() -> None:
    room = usable(H100)
    chances = oom_probability(room * np.array([0.5, 0.95, 1.0, 1.05, 2.0]), H100)
    assert chances[0] < 1e-6
    assert chances[2] == 0.5
    assert chances[4] > 1 - 1e-6
    assert list(chances) == sorted(chances)
    assert oom_probability(room, H100) == 0.5
    assert oom_probability(1.0, H100.replace(memory_gb=1)) == 1, "the context alone is more"


def test_reserved_is_more_than_allocated() -> None:
    found = budget(llama())
    assert float(found.reserved) == pytest.approx((1 + reserve().slack) * float(found.allocated))
    assert found.to_dict()["reserved"] == float(found.reserved)


@pytest.mark.parametrize(
    ("layers", "parallel"),
    [
        (68, {"pp": 8, "schedule": "interleaved", "virtual_stages": 3}),  # a third rank with a block more
        (13, {"pp": 8}),
        (35, {"pp": 8, "schedule": "zbv"}),
        (32, {"pp": 4}),
    ],
)
def test_the_fullest_rank_of_a_pipeline_is_found(layers: int, parallel: dict[str, Any]) -> None:
    spec = RunSpec.from_dict(
        {
            "model": LLAMA.replace(layers=layers).to_dict(),
            "parallel": parallel,
            "data": {"micro_batch": 1, "global_batch": 32, "seq": 4096},
            "cluster": {"gpu": "h100"},
        }
    )
    case = Case.of(spec)
    each = [float(budget(case, rank).allocated) for rank in range(spec.parallel.pp)]
    assert float(budget(case).allocated) == max(each)
    assert float(run_budget(spec).allocated) == max(
        float(run_budget(spec, rank).allocated) for rank in range(spec.parallel.pp)
    )
