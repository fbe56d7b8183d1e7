"""A simulated rank does what a real one does: the same collectives, the same bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.parallel.initial_weights import source_of
from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.memory_ledger import ACTIVATIONS, CATEGORIES, GRADIENTS, OPTIMIZER, PARAMETERS, MemoryLedger
from lmworks.parallel.mesh import Mesh
from lmworks.plan.pipelines.stages import stages_of_rank
from lmworks.prove.fake_rank import FakeTrainer, Simulation, measure_step
from lmworks.prove.planner_agreement import call_table, different_calls, planned_calls
from lmworks.prove.simulate import Report, simulate
from lmworks.spec import Grid, RunSpec, SpecError, load_run
from lmworks.train.trainer import Trainer


def make_run(parallel: dict[str, Any], **sections: dict[str, Any]) -> RunSpec:
    model = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 4, "vocab": 64, "context": 32}
    data = {"seq": 32, "micro_batch": 2}
    return RunSpec.from_dict(
        {
            "model": model | sections.get("model", {}),
            "data": data | sections.get("data", {}),
            "precision": sections.get("precision", {}),
            "parallel": parallel,
        }
    )


class Real(FakeTrainer):
    """The same step with numbers: what the trainer reads, it reads."""

    count = Trainer.count
    reduce_scalars = Trainer.reduce_scalars
    read = Trainer.read
    memory: Any = SimpleNamespace(read=lambda: 0)
    watchdog = None


def real(_rank: int, specs: list[RunSpec]) -> list[Simulation]:
    return [one_real(spec) for spec in specs]


def one_real(spec: RunSpec) -> Simulation:
    torch.set_num_threads(1)
    mesh = Mesh(Grid.of(spec.parallel), "cpu")
    with MemoryLedger() as ledger:
        rank = Real(spec, mesh, stages_of_rank(spec, mesh.rank("pp")), source_of(spec))
        return measure_step(rank, mesh, ledger, nullcontext())


def simulated(_rank: int, spec: RunSpec, rank: int) -> Report:
    """Called in a process of its own, which belongs to no group."""
    torch.set_num_threads(1)
    return simulate(spec, rank)


LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2, "bucket_mb": 0.02},
    "fsdp2": {"dp": 2, "strategy": "fsdp2"},
    "fsdp2 recompute": {"dp": 2, "strategy": "fsdp2", "recompute": "full"},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "strategy": "fsdp2"},
    "zero-1": {"dp": 2, "strategy": "zero", "zero": 1, "bucket_mb": 0.02},
    "zero-2": {"dp": 2, "strategy": "zero", "zero": 2, "bucket_mb": 0.02},
    "fsdp1": {"dp": 2, "strategy": "fsdp1"},
    "fsdp1 no reshard": {"dp": 2, "strategy": "fsdp1", "reshard": False},
    "tp": {"tp": 2},
    "tp+sp": {"tp": 2, "sp": True},
    "cp ring": {"cp": 2},
    "cp ulysses": {"cp": 2, "cp_method": "ulysses"},
    "pp 1f1b": {"pp": 2},
    "pp interleaved": {"pp": 2, "schedule": "interleaved"},
    "pp zbv": {"pp": 2, "schedule": "zbv"},
    "pp x fsdp2 x tp": {"pp": 2, "dp": 2, "tp": 2, "strategy": "fsdp2", "sp": True},
}
# Variations of what stays; parity counts what real ranks of them send, plan/test_collectives.py simulates the largest,
# and `make test-slow` has them here too.
VARIATIONS = (
    "zero-1", "zero-2", "fsdp1", "fsdp1 no reshard", "tp", "cp ulysses", "pp 1f1b", "pp interleaved", "hsdp",
    "pp x fsdp2 x tp", "cp ring",
)  # fmt: skip


def each_layout(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in VARIATIONS else ()) for name in names]


def accumulating(parallel: dict[str, Any]) -> RunSpec:
    """Over two micro-batches."""
    model = {"layers": 4 if parallel.get("schedule") else 2}
    spec = make_run(parallel, model=model)
    return make_run(parallel, model=model, data={"global_batch": 2 * spec.data.global_batch // spec.accumulation})


def asked_for(request: pytest.FixtureRequest) -> dict[str, RunSpec]:
    """What any test of this session is about: variations only where they are run."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params.get("layout") for item in here}
    return {name: accumulating(LAYOUTS[name]) for name in LAYOUTS if name not in VARIATIONS or name in asked}


@pytest.fixture(scope="module")
def predictions(request: pytest.FixtureRequest) -> dict[str, Report]:
    """The last rank of every layout; one process, as PyTorch loads much on first use."""
    specs = asked_for(request)
    (found,) = on_ranks(1, simulate_all, list(specs.values()), launched=False, timeout=600)
    return dict(zip(specs, found, strict=True))


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, Simulation]:
    """The same rank for real; all layouts of a size by the same ranks."""
    found, specs = {}, asked_for(request)
    for world in {spec.parallel.world for spec in specs.values()}:
        some = {name: spec for name, spec in specs.items() if spec.parallel.world == world}
        found |= dict(zip(some, on_ranks(world, real, list(some.values()))[-1], strict=True))
    return found


def simulate_all(_rank: int, specs: list[RunSpec]) -> list[Report]:
    torch.set_num_threads(1)
    return [simulate(spec, spec.parallel.world - 1) for spec in specs]


@pytest.mark.parametrize("layout", each_layout(LAYOUTS))
def test_a_simulated_rank_sends_and_holds_what_a_real_one_does(
    layout: str, predictions: dict[str, Report], measured: dict[str, Simulation]
) -> None:
    spec, found, known = accumulating(LAYOUTS[layout]), predictions[layout].simulation, measured[layout]
    assert found.collectives == known.collectives
    rank = spec.parallel.world - 1
    assert not different_calls(planned_calls(spec, rank), call_table(found.collectives, spec, rank))
    assert (found.parameters, found.parameter_bytes) == (known.parameters, known.parameter_bytes)
    for category in (PARAMETERS, OPTIMIZER, GRADIENTS):
        assert found.resident[category] == known.resident[category], category
    # What is on its way is held by a real backend until it has arrived, and a thread of its own lets go of it.
    assert found.peak_bytes == pytest.approx(known.peak_bytes, rel=0.05)


# --- figures that follow from arithmetic --------------------------------------------------------------


PARTS = {"ddp": (1, 1, 1), "zero-1": (1, 1, 2), "zero-2": (1, 2, 2), "fsdp2": (2, 2, 2), "hsdp": (2, 2, 2)}


@pytest.mark.parametrize("layout", each_layout(PARTS))
def test_resident_bytes_are_those_of_the_strategy(layout: str, predictions: dict[str, Report]) -> None:
    """Parts of 4, 4 and 8 bytes a parameter; AdamW also keeps a counter of 4 bytes for every weight."""
    spec, (weights, gradients, moments) = accumulating(LAYOUTS[layout]), PARTS[layout]
    resident = predictions[layout].simulation.resident
    tensors = 2 + 9 * spec.model.layers + 1  # embedding, head, last norm and nine in each block
    assert resident[PARAMETERS] == 4 * spec.model.params // weights
    assert resident[GRADIENTS] == 4 * spec.model.params // gradients
    assert resident[OPTIMIZER] == 8 * spec.model.params // moments + 4 * tensors


def test_recompute_keeps_fewer_activations(predictions: dict[str, Report]) -> None:
    kept, again = (predictions[name].simulation.peak[ACTIVATIONS] for name in ("fsdp2", "fsdp2 recompute"))
    assert again < kept / 2


# --- experts, extrapolation, a thousand ranks -----------------------------------------------------------


@pytest.mark.slow  # parity counts what real ranks with experts send
def test_experts_are_visited_evenly() -> None:
    model = {"layers": 2, "experts": 4, "top_k": 2, "expert_ffn": 32}
    spec = make_run({"dp": 2, "ep": 2, "strategy": "fsdp2"}, model=model)
    (report,) = on_ranks(1, simulated, spec, 1, launched=False)
    (known,) = on_ranks(2, real, [spec])[1]
    assert [(r.kind, r.count) for r in by_name(report.simulation)] == [(r.kind, r.count) for r in by_name(known)]
    assert report.simulation.parameters == known.parameters
    pairs, there_and_back, passes = 2 * 32 * 2, 2, 2
    rows = {row.kind: row for row in report.simulation.collectives}["all-to-all"]
    counts = spec.model.experts * 8  # what each rank asks of the other before it sends: in the forward pass alone
    assert rows.bytes == spec.model.layers * (passes * there_and_back * pairs * spec.model.hidden * 4 + counts)
    assert "evenly" in report.notes[0]


def by_name(found: Simulation) -> list[Any]:
    return sorted(found.collectives, key=lambda row: (row.kind, row.group))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "parallel"),
    [
        (6, {"dp": 2, "strategy": "fsdp2"}),
        (13, {"pp": 2, "dp": 2, "tp": 2, "strategy": "fsdp2", "sp": True}),
        (24, {"pp": 2, "schedule": "interleaved", "dp": 2, "strategy": "fsdp2", "recompute": "selective"}),
    ],
    ids=["fsdp2", "pp x fsdp2 x tp", "interleaved"],
)
def test_a_few_layers_tell_the_rest(layers: int, parallel: dict[str, Any]) -> None:
    spec = make_run(parallel, model={"layers": layers})
    few, all_of_them = on_ranks(1, few_and_all, spec, launched=False, timeout=600)[0]
    assert few.how.startswith("extrapolated: linear in layers, from 2 and 3 a stage")
    assert all_of_them.how == "exact"
    found, known = few.simulation, all_of_them.simulation
    assert (found.parameters, found.collectives) == (known.parameters, known.collectives)
    assert found.resident == known.resident
    assert found.peak_bytes == pytest.approx(known.peak_bytes, rel=0.01)
    for category in CATEGORIES:
        assert found.peak[category] == pytest.approx(known.peak[category], rel=0.02, abs=0.01 * known.peak_bytes)


def few_and_all(_rank: int, spec: RunSpec) -> tuple[Report, Report]:
    torch.set_num_threads(1)
    return simulate(spec, 1), simulate(spec, 1, exact=True)


@pytest.mark.parametrize(
    ("parallel", "why"), [({"dp": 2}, "buckets"), ({"recompute": "full", "recompute_every": 2, "tp": 2}, "recompute")]
)
def test_layers_that_differ_are_all_simulated(parallel: dict[str, Any], why: str) -> None:
    (report,) = on_ranks(1, simulated, make_run(parallel, model={"layers": 2}), 0, launched=False)
    assert report.how == "exact"
    assert why in report.notes[0]


LLAMA = ["parallel.tp=8", "parallel.pp=4", "parallel.dp_shard=32", "parallel.strategy=fsdp2", "parallel.sp=true"]


@pytest.mark.slow
def test_a_rank_of_a_thousand() -> None:
    """Llama 3 70B: a quarter of its eighty layers stand on this rank's stage, each weight cut in 8 × 32."""
    spec = load_run("llama3-70b", [*LLAMA, "data.seq=1024", "data.micro_batch=1", "precision.dtype=bf16"])
    assert spec.parallel.world == 1024
    (report,) = on_ranks(1, simulated, spec, 521, launched=False, timeout=600)
    assert report.place == {"pp": 2, "dp_replicate": 0, "dp_shard": 1, "cp": 0, "tp": 1, "ep": 0}
    layers = len(report.stages[0].layers)
    model, norms = spec.model, 2 * spec.model.hidden  # whole on every tensor-parallel rank
    assert report.simulation.parameters == layers * ((model.block_params - norms) // 8 + norms) // 32
    rows = {(row.kind, row.group): row for row in report.simulation.collectives}
    assert rows["send", "pp"].count == rows["recv", "pp"].count == 2 * spec.accumulation
    assert rows["all-gather", "tp"].count == rows["reduce-scatter", "tp"].count == 4 * layers * spec.accumulation
    assert rows["reduce-scatter", "shard"].bytes == 32 * report.simulation.parameter_bytes


# --- the command --------------------------------------------------------------------------------------


def run_cli(_rank: int, arguments: list[str]) -> list[str]:
    runner = CliRunner()
    results = [runner.invoke(app, ["simulate", *arguments, *more]) for more in ([], ["--json"])]
    assert [result.exit_code for result in results] == [0, 0]
    return [result.stdout for result in results]


def test_the_command_prints_what_it_found() -> None:
    small = ["tiny", "model.layers=1", "parallel.dp=4", "parallel.strategy=fsdp2", "--world", "4", "--rank", "3"]
    (shown, written) = on_ranks(1, run_cli, small, launched=False)[0]
    for words in ("rank 3 of 4", "Collectives of one step", "reduce-scatter", "gathered weights", "exact"):
        assert words in shown
    facts = json.loads(written)
    assert facts["world"] == 4
    assert facts["memory"]["peak_bytes"] == sum(facts["memory"]["peak"].values())
    assert facts["parameters"]["bytes"] == 4 * facts["parameters"]["count"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "parallel.dp=4", "--world", "1024", "--rank", "0"], "--world 1024, but the layout has 4 ranks"),
        (["tiny", "parallel.dp=4", "--world", "4", "--rank", "4"], "--rank 4 is not one of the layout's 4 ranks"),
        (["tiny", "parallel.dp=4", "--world", "4", "--rank", "-1"], "--rank -1 is not one of"),
        (["tiny", "--exact", "--layers-per-stage", "2"], "--exact simulates every layer"),
        (["tiny", "parallel.dp=2", "parallel.offload=optimizer"], "parallel.offload = 'optimizer' cannot be simulated"),
        (
            ["tiny", "model.layers=3", "parallel.offload_activations=1"],
            "parallel.offload_activations = 1 cannot be simulated",
        ),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(SpecError) as error:
        app(["simulate", *arguments], standalone_mode=False)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
