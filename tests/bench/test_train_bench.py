"""`lmworks bench train`: what it measures is a real run's, its floors are the planner's work, and nothing is left."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import ANY

import pytest
import torch
from typer.testing import CliRunner

from lmworks.bench import roofline, train
from lmworks.bench.roofline import PeakRates, datasheet_peak_rates, measured_peak_rates, step_roofline
from lmworks.bench.train import bench_train
from lmworks.cli.bench import prediction_rows
from lmworks.cli.main import app
from lmworks.parallel import preflight
from lmworks.plan.predict import step_flops
from lmworks.spec import Gpu, TrainingError, load_run
from lmworks.train import Trainer
from lmworks.train.device import PeakMemory
from lmworks.train.health.bad_step import Health, HealthIssue
from tiny import built, make_spec, steps_of, write_spec

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FAST = 1e30  # no limit
KNOWN = PeakRates("measured", {"fp32": 1e10, "bf16": 1e9}, 1e9)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Rates that are known instead of measured; returns the folder that temporary ones are made in."""
    here = tmp_path / "temporary"
    here.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    monkeypatch.setattr(train, "measured_peak_rates", lambda *_: KNOWN)
    monkeypatch.setattr(train, "cached_machine", lambda _: KNOWN.machine("cpu"))
    yield here


def test_figures_are_of_the_trainers_own_steps(dataset: Path, tmp_path: Path, quick: Path) -> None:
    spec = make_spec(dataset)
    facts = bench_train(spec, 2, kernels=True)
    assert facts is not None
    assert facts["tokens_per_s"] == pytest.approx(spec.tokens_per_step / facts["step_s"])
    assert facts["model_tflops"] == pytest.approx(step_flops(spec).model / facts["step_s"] / 1e12)
    assert facts["mfu"] is None and facts["hfu"] is None  # of a peak that nobody knows
    reached = facts["floors"]["measured"]
    assert reached["reached"] == pytest.approx(step_roofline(spec, KNOWN, "cpu").seconds / facts["step_s"])
    assert reached["products_s"] == pytest.approx(step_flops(spec).model / KNOWN.flops["fp32"])
    assert facts["predicted"]["step_s"] == pytest.approx(step_roofline(spec, KNOWN, "cpu").seconds)
    assert facts["kernels"]["rows"][0]["seconds"] > 0
    assert len(facts["losses"]) == train.WARM_UP + 2 + 1
    assert not list(quick.glob("lmworks*"))
    json.dumps(facts, allow_nan=False)


def test_the_weights_of_a_seed_train_as_the_trainer_does(
    dataset: Path, tmp_path: Path, quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(dataset)
    plain = built(spec, tmp_path / "plain")
    monkeypatch.setattr(train, "weights_on_device", lambda *_: plain.weights)
    facts = bench_train(spec, 1)
    assert facts is not None
    assert facts["losses"] == [values["loss"] for values in steps_of(plain, train.WARM_UP + 2)]


def test_the_last_step_is_not_timed(dataset: Path, quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It launches no passes ahead, so that a host whose queue is full ends it far sooner than the device does."""
    step = train.one_step

    def held_by_the_queue(trainer: Trainer, left: int) -> float:
        time.sleep(0.1 if left > 1 else 0.0)
        return step(trainer, left)

    monkeypatch.setattr(train, "one_step", held_by_the_queue)
    facts = bench_train(make_spec(dataset), 2)
    assert facts is not None and facts["steps"] == 2
    assert facts["step_s_range"][0] >= 0.1


def test_a_step_in_memory_that_was_there_already(dataset: Path, quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, in a process that has freed as much before: by how much the plan is off is not known."""
    monkeypatch.setattr(PeakMemory, "read", lambda _: 0)
    facts = bench_train(make_spec(dataset), 1)
    assert facts is not None and facts["predicted"]["allocated_error"] is None
    assert prediction_rows(facts["predicted"])[-1] == ["allocated, planned", ANY, ""]


def test_nothing_is_saved_and_no_memory_wanted_for_it(
    dataset: Path, quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: 0)
    monkeypatch.setattr(preflight, "memory_limits", lambda _: preflight.Limits())  # staging copies alone are checked
    assert bench_train(make_spec(dataset, "checkpoint.asynchronous=true"), 1) is not None


def test_the_floor_is_flops_where_memory_is_fast_and_bytes_where_products_are(dataset: Path) -> None:
    spec = make_spec(dataset, "parallel.recompute=full")
    once = spec.replace(parallel=spec.parallel.replace(recompute="none"))
    work = step_roofline(spec, PeakRates("measured", {"fp32": 1e9}, FAST), "cpu")
    assert work.seconds * 1e9 == pytest.approx(step_flops(once).hardware, rel=1e-6)  # nothing computed again
    away = make_spec(dataset, "model.layers=3", "parallel.offload_activations=1")  # nor sent to the host
    assert "offload" not in step_roofline(away, KNOWN, "cpu").parts
    moved = step_roofline(spec, PeakRates("measured", {"fp32": FAST}, 1e9), "cpu")
    optimizer = moved.parts["optimizer"] * 1e9  # reads weight, gradient, two moments; writes all but the gradient
    assert optimizer >= 28 * spec.model.params
    assert step_roofline(spec, PeakRates("measured", {"fp32": 1e9}, 1e9), "cpu").seconds == pytest.approx(
        work.seconds + moved.seconds
    )


def test_ranks_share_the_floor(dataset: Path) -> None:
    spec = make_spec(dataset, "parallel.dp=2")
    found = step_roofline(spec, KNOWN, "cpu")
    assert found.seconds == pytest.approx(step_flops(spec).model / 2 / KNOWN.flops["fp32"])


def test_a_datasheet_has_ceilings_too() -> None:
    card = Gpu(name="card", bf16_tflops=100.0, fp8_tflops=200.0, bandwidth_gbs=1000.0)
    sheet = datasheet_peak_rates(card)
    assert sheet.flops == {"bf16": 1e14, "fp8": 2e14} and sheet.bandwidth == 1e12
    rates = sheet.machine("cuda").rates
    assert rates["gemm.fp8"][0].rate == 2e14
    assert rates["attention.fp8"][0].rate == 1e14  # which is not done in 8 bits


def test_ceilings_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "MATMUL_SIZE", {"cpu": 64})
    monkeypatch.setattr(roofline, "COPY_BYTES", {"cpu": 2**16})
    found = measured_peak_rates(torch.device("cpu"), "fp32", seconds=0.01)
    assert found.flops.keys() == {"fp32"} and found.flops["fp32"] > 1e6 and found.bandwidth > 1e6


def test_what_does_not_fit_is_said_in_one_line(dataset: Path, quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr(train, "time_steps", full)
    with pytest.raises(
        TrainingError,
        match=r"^out of memory in .*: 20 GiB more .*; predicted \S+ GiB .* has \S+ GiB: lower data.micro_batch",
    ):
        bench_train(make_spec(dataset))
    assert not list(quick.glob("lmworks*"))


def test_a_spike_is_a_step_like_any_other(dataset: Path, quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the spec would do about it: there is no checkpoint to go back to."""
    monkeypatch.setattr(Health, "limits", lambda _: (-1.0, -1.0))
    monkeypatch.setattr(Health, "check_step", spiking)
    for action in ("skip", "rewind", "stop"):
        facts = bench_train(make_spec(dataset, f"health.spike_loss={action}", "checkpoint.every=4"), 1)
        assert facts is not None and len(facts["losses"]) == train.WARM_UP + 2


def spiking(health: Health, *_: object) -> list[HealthIssue]:
    return [HealthIssue("spike_loss", health.spec.spike_loss, "a spike")]


@pytest.mark.parametrize("action", ["skip", "rewind", "stop"])
def test_what_does_not_train_is_said_in_one_line(
    action: str, dataset: Path, quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "weights_on_device", lambda *_: lambda _name, shape: torch.full(shape, torch.nan))
    with pytest.raises(TrainingError, match=r"^step 1: loss nan.*cannot be timed: lower optim\.lr") as said:
        bench_train(make_spec(dataset, f"health.nonfinite={action}", "checkpoint.every=4"), 1)
    assert "lmworks-bench" not in str(said.value)  # that folder is gone


def test_deepspeed_stays_with_what_it_can() -> None:
    given = load_run(
        "tiny", ["parallel.engine=deepspeed", "parallel.strategy=zero", "parallel.zero=1", "health.spike_grad=stop"]
    )
    kept = train.tolerate_bad_steps(given).health
    assert (kept.nonfinite, kept.spike_grad) == ("stop", "log")


def test_the_command_prints_tables_and_json(dataset: Path, tmp_path: Path, quick: Path) -> None:
    file = write_spec(make_spec(dataset), tmp_path / "spec.toml")
    ask = ["bench", "train", str(file), "--steps", "1"]
    told = CliRunner().invoke(app, [*ask, "--profile"])
    assert told.exit_code == 0, told.output
    for words in (
        "tokens/s",
        "of the measured floor",
        "of one product's pace",
        "allocated, planned",
        "optimizer",
        "One step: kernels for",
    ):
        assert words in told.output
    answer = json.loads(CliRunner().invoke(app, [*ask, "--json"]).stdout)
    assert answer["steps"] == 1 and answer["ranks"] == 1
    bad = CliRunner().invoke(app, [*ask, "model.widht=7"])
    assert bad.exit_code != 0


# --- the scripts that wait for a GPU --------------------------------------------------------------------


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def test_every_variant_of_the_table_is_a_legal_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    table = script("train_gpu", monkeypatch)
    for name, row in table.ROWS.items():
        for variant, changes in row.variants.items():
            kept = [one for one in changes if not one.startswith(table.FIT)]
            spec = table.run_spec(row, kept)
            assert spec.parallel.compile == (not variant.startswith("eager")), f"{name} {variant}"
    shape = table.run_spec(table.ROWS["1.5b"], []).model  # as the peer's: layers, dim, ffn, heads, vocab, untied
    assert (shape.layers, shape.hidden, shape.ffn, shape.heads, shape.kv_heads, shape.vocab, shape.tie_embeddings) == (
        16, 2048, 8192, 32, 8, 128256, False,
    )  # fmt: skip


def test_a_limit_on_memory_becomes_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    table = script("train_gpu", monkeypatch)
    row = table.ROWS["8b"]
    changes = table.overrides(row, "within 100 GiB")
    assert 95 < table.expected(row, changes)["allocated_gib"] <= 100


def test_paths_of_the_loss_are_legal_and_gaps_are_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = script("loss_gpu", monkeypatch)
    for path in losses.PATHS.values():
        load_run(losses.MODEL[0], [*losses.MODEL[1:], *path.overrides])
    flat, above = [3.0] * 30, [3.0] * 10 + [3.5] * 20
    found = losses.gap(above, flat)
    assert found["last"] == found["most"] == pytest.approx(0.5)
    assert found["mean"] == found["away"] > 0
    assert losses.gap(flat, above)["mean"] == -found["mean"]


@pytest.mark.slow
def test_fast_paths_learn_what_the_plain_one_does() -> None:
    command = [sys.executable, "loss_gpu.py", "--tiny", "--steps", "30", "--no-save"]
    answer = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("within the noise") == 3 and "OUTSIDE" not in answer.stdout


@pytest.mark.slow
def test_ranks_are_started_and_the_first_one_answers(dataset: Path, tmp_path: Path) -> None:
    file = write_spec(make_spec(dataset, "parallel.dp=2", "parallel.strategy=fsdp2"), tmp_path / "spec.toml")
    command = [sys.executable, "-m", "lmworks", "bench", "train", str(file), "--steps", "1", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["ranks"] == 2
