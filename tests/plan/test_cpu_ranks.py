"""Steps of data-parallel CPU ranks: one rank's compute, and what the collectives of a measured link add to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmworks.bench import calibrate
from lmworks.plan.devices.machine import Machine, Rate
from lmworks.plan.devices.profile import Profile, load_profile, profile_of
from lmworks.plan.exact.collectives import collectives
from lmworks.plan.predict import Prediction, predict
from lmworks.plan.step.cpu_ranks import backward_seconds, not_priced
from lmworks.plan.step.one_device import step_time
from lmworks.plan.step.op_prices import op_prices
from lmworks.spec import RunSpec, load_run
from typed import lmworks

ALPHA, BETA = 10e-3, 100e-9  # of every collective over two ranks: 10 ms, 10 MB/s
SIZES = [1024, 2**20, 2**24]
FAST = {"gemm.fp32": (Rate((64, 64, 64), 2e10),), "attention.fp32": (Rate((64, 64), 2e10),)}
FAST |= {"attention_backward.fp32": (Rate((64, 64), 2e10),)}
FAST |= {kind: (Rate((2**20,), 4e9),) for kind in ("stream", "strided", "exp", "tanh", "optimizer")}


def links(ranks: int = 2) -> dict[str, object]:
    us = [1e6 * (ALPHA + BETA * size) for size in SIZES]
    column = {"above": 0.0, "alpha_us": 1e6 * ALPHA, "beta_ns": 1e9 * BETA}
    fit = {f"{name}{end}": [value] for name, value in column.items() for end in ("", "_low", "_high")}
    fit = {name: value for name, value in fit.items() if not name.startswith("above_")}
    kinds = ("all-reduce", "all-gather", "reduce-scatter")
    measured = {kind: {str(ranks): us} for kind in kinds}
    fits = {"fit": {kind: {str(ranks): fit} for kind in kinds}}
    return {"gpus": ["cpu, 1 threads"], "fabric": "pcie", "link_gbs": 0.01, "sizes": SIZES, **measured, **fits}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    machine = Machine("cpu, 1 threads", "cpu", "measured", FAST, 1e-5, 1e-5, 2**33)
    calibrate.save(Profile(machine, made={}, network=links()), tmp_path / "profile.toml")
    return tmp_path / "profile.toml"


def spec_of(profile: Path, *overrides: str) -> RunSpec:
    layout = ["cluster.nodes=2", "cluster.device=cpu", "parallel.dp=2", f"cluster.profile={profile}"]
    shape = ["model.layers=4", "model.hidden=256", "model.heads=4", "data.micro_batch=1", "data.seq=64"]
    return load_run("tiny", [*shape, *layout, *overrides])


def predicted(spec: RunSpec) -> Prediction:
    return predict(spec, load_profile(spec.cluster.profile).machine)


def compute_of(spec: RunSpec) -> dict[str, float]:
    return step_time(spec, load_profile(spec.cluster.profile).machine).parts


def test_fsdp2_waits_for_every_collective(profile: Path) -> None:
    spec = spec_of(profile, "parallel.strategy=fsdp2")
    time = predicted(spec).time
    assert time is not None and time.tags["communication"] == "measured"
    wire = sum(ALPHA * call.count + BETA * call.bytes for call in collectives(spec))
    assert time.parts["communication"] == pytest.approx(wire, rel=1e-4)
    alone = compute_of(spec)
    assert time.parts["optimizer"] == pytest.approx(alone["optimizer"] / 2)  # each rank updates its half
    assert {part: time.parts[part] for part in alone if part != "optimizer"} == pytest.approx(
        {part: alone[part] for part in alone if part != "optimizer"}
    )
    assert time.interval[0] < time.total < time.interval[1]


def test_ddp_with_one_bucket_hides_nothing(profile: Path) -> None:
    spec = spec_of(profile, "parallel.bucket_mb=1000")
    time = predicted(spec).time
    assert time is not None
    size = 4 * spec.model.params
    assert time.parts["communication"] == pytest.approx(2 * ALPHA + BETA * size, rel=1e-3)  # and the step's figures
    assert {part: time.parts[part] for part in compute_of(spec)} == pytest.approx(compute_of(spec))


def test_ddp_hides_what_the_backward_pass_covers(profile: Path) -> None:
    """Of many small buckets on a slow link, the first alone is waited for: the link is busy from there on."""
    spec = spec_of(profile, "parallel.bucket_mb=1")
    time = predicted(spec).time
    assert time is not None
    calls = next(call.count for call in collectives(spec) if call.what == "gradients")
    on_wire = calls * ALPHA + BETA * 4 * spec.model.params + ALPHA
    backward = backward_seconds(spec, load_profile(profile).machine)
    assert calls > 5 and 0.02 < backward < 0.5
    exposed = time.parts["communication"]
    assert on_wire - backward < exposed < on_wire - 0.5 * backward


def test_more_nodes_than_were_measured_add_latency_and_bytes(profile: Path) -> None:
    two, eight = (
        predicted(spec_of(profile, "parallel.bucket_mb=1000", f"parallel.dp={n}", f"cluster.nodes={n}")).time
        for n in (2, 8)
    )
    assert two is not None and eight is not None and eight.tags["communication"] == "modelled"
    more = eight.parts["communication"] - two.parts["communication"]
    size = 4 * spec_of(profile).model.params
    # a ring of 8: seven times the steps of a ring of 2 (of both all-reduces), and 1.75 times the bytes
    assert more == pytest.approx(2 * 6 * ALPHA + 0.75 * BETA * size, rel=0.01)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["parallel.tp=2", "parallel.dp=1"], "those of DDP and FSDP2 alone are predicted"),
        (["cluster.nodes=1"], "has no collectives inside a node: `lmworks bench collectives --profile` adds them"),
        (["cluster.profile="], "several CPU ranks need a measured link: cluster.profile"),
    ],
)
def test_what_is_not_predicted_says_why(profile: Path, overrides: list[str], why: str) -> None:
    spec = spec_of(profile, *overrides)
    machine = Machine("cpu, 1 threads", "cpu", "measured", FAST, 1e-5, 1e-5, 2**33)
    assert predict(spec, machine).time is None
    assert why in not_priced(spec, profile_of(spec.cluster) if spec.cluster.profile else None)


def test_the_plan_shows_communication(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["cluster.nodes=2", "cluster.device=cpu", "parallel.dp=2", f"cluster.profile={profile}"]
    code, out, err = lmworks(capsys, "plan", "tiny", *changes)
    assert code == 0, err
    assert "communication" in out and "measured" in out
    code, out, _ = lmworks(capsys, "plan", "tiny", *changes, "cluster.nodes=1")
    assert "step time: not predicted" in out and "has no collectives inside a node" in out


def test_links_between_nodes_are_read_back(profile: Path) -> None:
    read = load_profile(profile)
    assert read.curve is None and read.between is not None
    assert read.between.seconds("all-reduce", 2.0**20, 2) == pytest.approx(ALPHA + BETA * 2**20, rel=1e-4)
    both = replace(read, links=links())
    assert both.to_dict()["links"]["fit"] == both.to_dict()["network"]["fit"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_prices_of_ops_and_collectives_add_up_to_the_step(profile: Path, strategy: str) -> None:
    spec = spec_of(profile, f"parallel.strategy={strategy}")
    prices, time = op_prices(spec, load_profile(str(profile)).machine), predicted(spec).time
    assert prices is not None and time is not None
    assert sum(one.seconds for one in prices) == pytest.approx(time.total, rel=1e-9)
    wire = {one.op: one.seconds for one in prices if one.part == "communication"}
    assert sum(wire.values()) == pytest.approx(time.parts["communication"])
    assert wire.keys() == ({"all-reduce"} if strategy == "ddp" else {"all-gather", "reduce-scatter", "all-reduce"})


def test_a_sharded_update_moves_its_shard(profile: Path) -> None:
    moved = {}
    for strategy in ("ddp", "fsdp2"):
        prices = op_prices(spec_of(profile, f"parallel.strategy={strategy}"), load_profile(str(profile)).machine)
        assert prices is not None
        moved[strategy] = sum(one.bytes for one in prices if one.part == "optimizer")
    assert moved["fsdp2"] == pytest.approx(moved["ddp"] / 2)
