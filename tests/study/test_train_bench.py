"""`lmworks bench train`: what it measures is a real run's, its floors are the planner's work, and nothing is left."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.plan.flops import step_flops
from lmworks.spec import Gpu, TrainingError
from lmworks.study import roofline, train_bench
from lmworks.study.roofline import Ceilings, datasheet_ceilings, floor, measured_ceilings
from lmworks.study.train_bench import bench_train
from tiny import built, make_spec, steps_of, write_spec

FAST = 1e30  # no limit
KNOWN = Ceilings("measured", {"fp32": 1e10, "bf16": 1e9}, 1e9)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Rates that are known instead of measured; returns the folder that temporary ones are made in."""
    here = tmp_path / "temporary"
    here.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    monkeypatch.setattr(train_bench, "measured_ceilings", lambda *_: KNOWN)
    monkeypatch.setattr(train_bench, "cached_machine", lambda _: KNOWN.machine("cpu"))
    yield here


def test_figures_are_of_the_trainers_own_steps(dataset: Path, tmp_path: Path, quick: Path) -> None:
    spec = make_spec(dataset)
    facts = bench_train(spec, 2, kernels=True)
    assert facts is not None
    assert facts["tokens_per_s"] == pytest.approx(spec.tokens_per_step / facts["step_s"])
    assert facts["model_tflops"] == pytest.approx(step_flops(spec).model / facts["step_s"] / 1e12)
    assert facts["mfu"] is None and facts["hfu"] is None  # of a peak that nobody knows
    reached = facts["floors"]["measured"]
    assert reached["reached"] == pytest.approx(floor(spec, KNOWN, "cpu").seconds / facts["step_s"])
    assert facts["predicted"]["step_s"] == pytest.approx(floor(spec, KNOWN, "cpu").seconds)
    assert facts["kernels"]["rows"][0]["seconds"] > 0
    assert len(facts["losses"]) == train_bench.WARM_UP + 2 + 1
    assert not list(quick.glob("lmworks*"))
    json.dumps(facts, allow_nan=False)


def test_the_weights_of_a_seed_train_as_the_trainer_does(
    dataset: Path, tmp_path: Path, quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(dataset)
    plain = built(spec, tmp_path / "plain")
    monkeypatch.setattr(train_bench, "drawn_on", lambda *_: plain.weights)
    facts = bench_train(spec, 1)
    assert facts is not None
    assert facts["losses"] == [values["loss"] for values in steps_of(plain, train_bench.WARM_UP + 1)]


def test_the_floor_is_flops_where_memory_is_fast_and_bytes_where_products_are(dataset: Path) -> None:
    spec = make_spec(dataset, "parallel.recompute=full")
    once = spec.replace(parallel=spec.parallel.replace(recompute="none"))
    work = floor(spec, Ceilings("measured", {"fp32": 1e9}, FAST), "cpu")
    assert work.seconds * 1e9 == pytest.approx(step_flops(once).hardware, rel=1e-6)  # nothing computed again
    moved = floor(spec, Ceilings("measured", {"fp32": FAST}, 1e9), "cpu")
    optimizer = moved.parts["optimizer"] * 1e9  # reads weight, gradient, two moments; writes all but the gradient
    assert optimizer >= 28 * spec.model.params
    assert floor(spec, Ceilings("measured", {"fp32": 1e9}, 1e9), "cpu").seconds == pytest.approx(
        work.seconds + moved.seconds
    )


def test_ranks_share_the_floor(dataset: Path) -> None:
    spec = make_spec(dataset, "parallel.dp=2")
    found = floor(spec, KNOWN, "cpu")
    assert found.seconds == pytest.approx(step_flops(spec).model / 2 / KNOWN.flops["fp32"])


def test_a_datasheet_has_ceilings_too() -> None:
    card = Gpu(name="card", bf16_tflops=100.0, fp8_tflops=200.0, bandwidth_gbs=1000.0)
    sheet = datasheet_ceilings(card)
    assert sheet.flops == {"bf16": 1e14, "fp8": 2e14} and sheet.bandwidth == 1e12
    rates = sheet.machine("cuda").rates
    assert rates["gemm.fp8"][0].rate == 2e14
    assert rates["attention.fp8"][0].rate == 1e14  # which is not done in 8 bits


def test_ceilings_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "SIDE", {"cpu": 64})
    monkeypatch.setattr(roofline, "COPIED", {"cpu": 2**16})
    found = measured_ceilings(torch.device("cpu"), "fp32", seconds=0.01)
    assert found.flops.keys() == {"fp32"} and found.flops["fp32"] > 1e6 and found.bandwidth > 1e6


def test_what_does_not_fit_is_said_in_one_line(dataset: Path, quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr(train_bench, "take_steps", full)
    with pytest.raises(TrainingError, match=r"does not fit into the \d+ GiB.*lower data.micro_batch"):
        bench_train(make_spec(dataset))
    assert not list(quick.glob("lmworks*"))


def test_the_command_prints_tables_and_json(dataset: Path, tmp_path: Path, quick: Path) -> None:
    file = write_spec(make_spec(dataset), tmp_path / "spec.toml")
    ask = ["bench", "train", str(file), "--steps", "1"]
    told = CliRunner().invoke(app, [*ask, "--profile"])
    assert told.exit_code == 0, told.output
    for words in ("tokens/s", "of the measured floor", "allocated, planned", "optimizer", "One step: kernels for"):
        assert words in told.output
    answer = json.loads(CliRunner().invoke(app, [*ask, "--json"]).stdout)
    assert answer["steps"] == 1 and answer["ranks"] == 1
    bad = CliRunner().invoke(app, [*ask, "model.widht=7"])
    assert bad.exit_code != 0


@pytest.mark.slow
def test_ranks_are_started_and_the_first_one_answers(dataset: Path, tmp_path: Path) -> None:
    file = write_spec(make_spec(dataset, "parallel.dp=2", "parallel.strategy=fsdp2"), tmp_path / "spec.toml")
    command = [sys.executable, "-m", "lmworks", "bench", "train", str(file), "--steps", "1", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["ranks"] == 2
