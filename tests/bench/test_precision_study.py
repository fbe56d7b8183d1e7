"""`lmworks bench precision`: what formats lose, what an update keeps, verdicts, and runs that go on when stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmworks.bench.precision import study as module
from lmworks.bench.precision.report import as_markdown, as_page, overview_table, write_reports
from lmworks.bench.precision.single_run import (
    INSPECTION_FILE,
    InstrumentedTrainer,
    expected_update,
    full_precision_weight,
    gradient_loss,
    train,
    train_one,
)
from lmworks.bench.precision.study import (
    RunMetrics,
    Stopped,
    Study,
    Training,
    evaluate,
    run_metrics,
    seed_noise,
    study,
    verdict,
)
from lmworks.bench.precision.tensor_formats import FORMATS, RoundingStats, count
from lmworks.bench.precision.variants import (
    BASE,
    MIN_STEPS,
    SEED,
    VARIANTS,
    inspected_steps,
    select_variants,
    variant_spec,
)
from lmworks.kernels.training.adamw import split
from lmworks.model import GPT
from lmworks.record import RunFolder, read_metrics
from lmworks.spec import ModelSpec, OptimSpec, PrecisionSpec, SpecError
from lmworks.train.signals import Interrupted
from tiny import make_spec, write_spec

FORM = {form.name: form for form in FORMATS}


# --- formats --------------------------------------------------------------------------------------------


def counted(values: list[float], name: str, before: float = 1.0) -> list[float]:
    return count(torch.tensor(values), FORM[name], before).tolist()


def test_elements_below_a_format_are_flushed_and_those_beyond_it_saturated() -> None:
    # fp16: the least number is 2⁻²⁴, the largest 65504; half of the first rounds to 0, 65520 would round to 65536.
    assert counted([2.0**-24, 2.0**-25, 0.0, 65519.0, 65520.0], "fp16")[:3] == [5, 1, 1]
    assert counted([2.0**-25, 1e-13], "fp16, loss scaled")[:3] == [2, 1, 0]
    # e4m3: the least is 2⁻⁹, the largest 448 and the next would be 480
    assert counted([2.0**-10, 2.0**-9, 463.0, 464.0], "e4m3")[:3] == [4, 1, 1]
    assert counted([1e-30, 3e38], "bf16")[:3] == [2, 0, 0]


@pytest.mark.parametrize("name", ["e4m3 tensorwise", "e4m3 rowwise", "e5m2 tensorwise"])
def test_scaling_to_the_largest_element_saturates_nothing(name: str) -> None:
    draw = torch.randn(64, 33, generator=torch.Generator().manual_seed(0)) * torch.logspace(-12, 8, 64)[:, None]
    elements, flushed, saturated, *_ = count(draw, FORM[name], 1.0).tolist()
    assert (elements, saturated) == (64 * 33, 0)
    assert (flushed / elements < 0.01) == (name == "e4m3 rowwise"), "small rows vanish beside large ones, not alone"


def test_a_delayed_scale_saturates_what_has_grown() -> None:
    assert counted([1.0, 2.0, -3.0], "e4m3 delayed", before=1.5)[2] == 2
    assert counted([1.0, 2.0, -3.0], "e4m3 delayed", before=3.0)[2] == 0
    assert counted([0.0, 0.0], "e4m3 tensorwise")[:3] == [2, 0, 0], "a tensor of zeros has no scale to find"


def test_errors_are_those_of_a_cast() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for name, dtype in {"bf16": torch.bfloat16, "e5m2": torch.float8_e5m2}.items():
        *_, error, square = count(values, FORM[name], 1.0).tolist()
        assert error == pytest.approx(float((values.to(dtype).double() - values.double()).square().sum()))
        assert square == pytest.approx(float(values.double().square().sum()))


def test_a_census_sees_inputs_weights_and_gradients_of_every_block() -> None:
    spec = ModelSpec.from_preset("tiny")
    model, tokens = GPT(spec), torch.arange(64).view(2, 32)
    census = RoundingStats()
    with census.largest(model):
        model(tokens, tokens)[1].backward()
    with census.counting(model):
        model(tokens, tokens)[1].backward()
    found = census.to_dict()
    assert {role: sorted(forms["bf16"]) for role, forms in found.items()} == {role: ["0", "1"] for role in found}
    weights = sum(
        module.weight.numel() for module in model.blocks["0"].modules() if isinstance(module, torch.nn.Linear)
    )
    assert found["weights"]["bf16"]["0"][0] == weights
    assert found["inputs"]["bf16"]["0"][0] == 2 * 32 * (6 * spec.hidden + spec.ffn)  # q, k, v, out, gate, up and down
    assert found["gradients"]["e4m3 delayed"]["1"][2] == 0, "the same batch twice: its largest element was known"
    assert "fp16, loss scaled" in found["gradients"] and "fp16, loss scaled" not in found["weights"]


# --- what a step is compared by -------------------------------------------------------------------------


def test_the_update_worked_out_is_that_of_pytorchs_adamw() -> None:
    optim = OptimSpec()
    weight = torch.nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(0)))
    adamw = torch.optim.AdamW([weight], lr=1e-2, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=0.1)
    for index in range(3):
        weight.grad = torch.randn(50, generator=torch.Generator().manual_seed(index))
        before = weight.detach().clone()
        adamw.step()
    due = expected_update(optim, adamw.state[weight], adamw.param_groups[0], before)
    torch.testing.assert_close(before.double() + due, weight.detach().double(), rtol=0, atol=1e-6)


def test_a_master_counts_with_the_weight_it_belongs_to() -> None:
    wide = torch.randn(100, generator=torch.Generator().manual_seed(0))
    high, low = split(wide)
    optimizer = torch.optim.SGD([torch.nn.Parameter(high)])
    (leaf,) = optimizer.param_groups[0]["params"]
    assert not torch.equal(full_precision_weight(optimizer, leaf), wide)
    optimizer.state[leaf] = {"low": low}
    assert torch.equal(full_precision_weight(optimizer, leaf), wide)


def test_gradients_lost_are_those_of_fp32_that_are_gone() -> None:
    exact = torch.tensor([1.0, 1e-9, 0.0, 3.0])
    own: Tensor = torch.tensor([2.0, 0.0, 0.0, torch.inf])  # of a loss that was doubled
    assert gradient_loss(own, exact, 2.0).tolist() == [4, 1, 1, pytest.approx(1e-18), pytest.approx(10.0)]


# --- verdicts -------------------------------------------------------------------------------------------


def run(losses: list[float]) -> list[dict[str, Any]]:
    return [{"step": step, "loss": loss, "val_loss": loss, "grad_norm": 1.0} for step, loss in enumerate(losses, 1)]


def test_a_gap_is_of_the_second_half_and_noise_its_root_mean_square() -> None:
    base, seed, own = run([9.0, 9.0, 2.0, 1.0]), run([0.0, 0.0, 2.3, 0.6]), run([0.0, 0.0, 2.1, 1.3])
    assert seed_noise(base, seed) == pytest.approx((0.5 * (0.3**2 + 0.4**2)) ** 0.5)
    assert run_metrics(own, [], base, "").gap == pytest.approx(0.2)
    assert run_metrics([], [], base, "it ended").gap is None and seed_noise(base, []) is None


NOTHING = RunMetrics(**dict.fromkeys(RunMetrics.__dataclass_fields__))


@pytest.mark.parametrize(
    ("found", "overflows", "said"),
    [
        ({"gap": -0.01}, [], "as fp32 within the noise (gap -0.0100)"),
        ({"gap": 0.05}, [], "worse than fp32 by 0.0500, 2.5 × the noise"),
        ({"gap": -0.05}, [], "better than fp32 by 0.0500, 2.5 × the noise"),
        ({}, [], "no fp32 baseline"),
        (
            {"gap": 0.0, "kept": 0.4, "unmoved": 0.7},
            [],
            "as fp32 within the noise (gap +0.0000); lost updates: 60% rounded away, 70% of the weights did not change",
        ),
        ({"gap": 0.0, "kept": 0.96, "unmoved": 0.7, "flushed": 0.005}, [], "as fp32 within the noise (gap +0.0000)"),
        (
            {"gap": 0.0, "flushed": 0.02},
            [1, 2, 9],
            "as fp32 within the noise (gap +0.0000); 2.0% of the gradient's elements became 0; "
            "3 steps skipped by overflow, the last at 9",
        ),
    ],
)
def test_verdicts_follow_from_figures(found: dict[str, float], overflows: list[int], said: str) -> None:
    assert verdict(VARIANTS["fp16"], replace(NOTHING, **found), 0.02, "", overflows) == said


# --- the study ------------------------------------------------------------------------------------------


def test_every_precision_is_a_legal_run(dataset: Path) -> None:
    spec = make_spec(dataset, "precision.dtype=bf16", "precision.weights=bf16", "precision.loss_scale=1024")
    specs = {variant.name: variant_spec(spec, variant) for variant in select_variants([])}
    assert specs["fp32"].precision == PrecisionSpec(loss_scale=1024)
    assert specs["fp16"].precision.loss_scale == 1024 < specs["fp16-high"].precision.loss_scale
    assert specs["fp32-seed"].seed == specs["fp32"].seed + 1
    assert len({json.dumps(one.precision.to_dict()) for one in specs.values()}) == len(specs) - 1, "but for the seed"
    assert inspected_steps(200) == [50, 100, 150, 200] and inspected_steps(MIN_STEPS)[0] == 2


@pytest.mark.parametrize(
    ("change", "names", "said"),
    [
        ((), ["bf61"], "--only bf61: this study has no such precision; did you mean 'bf16'"),
        (("parallel.dp=2",), [], "one device"),
        (("optim.steps=7", "optim.warmup=1"), [], "--steps 7 is too few"),
    ],
)
def test_what_cannot_be_compared_is_refused_at_once(
    dataset: Path, tmp_path: Path, change: tuple[str, ...], names: list[str], said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        study(make_spec(dataset, *change), tmp_path, names)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def small(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Trained in this process, which is what `train_in_subprocess` starts another one for."""
    folder = tmp_path_factory.mktemp("study")
    patch = pytest.MonkeyPatch()
    patch.setattr(module, "train_in_subprocess", train_one)
    patch.setattr("lmworks.bench.precision.single_run.ROUNDS", 2)
    patch.setattr(
        "lmworks.bench.precision.single_run.write_report", lambda folder: folder
    )  # its pictures take a second each
    try:
        return study(
            make_spec(dataset, "optim.steps=8", "optim.lr=3e-4"), folder, ["bf16-nearest", "bf16-master", "fp16-high"]
        )
    finally:
        patch.undo()


@pytest.mark.slow
def test_each_precision_is_a_run_with_figures(small: Study) -> None:
    assert [one.name for one in small.outcomes] == ["fp32", "fp32-seed", "bf16-master", "bf16-nearest", "fp16-high"]
    assert all(not one.training.error and len(one.training.steps) == 8 for one in small.outcomes)
    assert small.noise is not None and small.noise > 0
    base, nearest, master = small["fp32"], small["bf16-nearest"].metrics, small["bf16-master"].metrics
    assert base.metrics.gap == 0 and base.metrics.kept == pytest.approx(1, abs=1e-3)
    assert nearest.kept is not None and nearest.kept < 0.9 and nearest.unmoved is not None and nearest.unmoved > 0.1
    assert master.kept == pytest.approx(1, abs=1e-3) and (master.unmoved or 0) < 0.01
    assert nearest.gradient_error is not None and 1e-4 < nearest.gradient_error < 0.1
    high = small["fp16-high"].training
    assert high.overflows and high.overflows[0] == 1 and high.curve("loss_scale")[1][1] == 2.0**31
    assert "lost updates" in small["bf16-nearest"].verdict and "overflow" in small["fp16-high"].verdict
    assert small["bf16-nearest"].training.speed is not None and base.training.memory is not None


@pytest.mark.slow
def test_looking_closely_changes_nothing(small: Study, dataset: Path, tmp_path: Path) -> None:
    from tiny import curve
    from tiny import train as plainly

    plainly(small["fp16-high"].training.spec, tmp_path / "plain")
    assert curve(tmp_path / "plain") == curve(small.folder / "fp16-high")


@pytest.mark.slow
def test_reports_have_the_figures_and_stand_alone(small: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    markdown, html = write_reports(small)
    text, page = markdown.read_text(), html.read_text()
    for one in small.outcomes:
        assert f"| {one.name} | {one.verdict} | {one.metrics.val_loss:.4f} |" in text
        assert f"<td>{one.name}</td>" in page
    assert page.count("<svg") == 4 and "http" not in page.split("<main>")[1]
    assert "report.png" in text and (small.folder / "report.png").stat().st_size > 10_000
    assert "| gradients | e4m3 rowwise |" in text
    json.dumps(small.to_dict(), allow_nan=False)


@pytest.mark.slow
def test_what_is_finished_is_not_trained_again(small: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "train_in_subprocess", lambda folder, name: pytest.fail(f"{name} was trained again"))
    again = study(small.spec, small.folder, ["bf16-nearest", "bf16-master", "fp16-high"])
    assert [one.verdict for one in again.outcomes] == [one.verdict for one in small.outcomes]
    other = small.spec.replace(optim=small.spec.optim.replace(lr=1e-4))
    with pytest.raises(SpecError, match="fp32 holds a run of another spec"):
        study(other, small.folder)


@pytest.mark.slow
def test_a_precision_that_fails_is_a_row_with_its_reason(small: Study) -> None:
    trainings = [one.training for one in small.outcomes]
    broken = Training(VARIANTS["fp8-rowwise"], small.spec, error="precision.dtype = 'fp8' needs torchao")
    found = evaluate(small.spec, small.folder, [*trainings, broken])
    _, rows = overview_table(found)
    assert rows[-1] == ["fp8-rowwise", "–", "–", "–", "–", "–", "failed: precision.dtype = 'fp8' needs torchao"]
    assert "failed: precision.dtype" in as_markdown(found, []) and "failed: precision.dtype" in as_page(found)


@pytest.mark.slow
def test_nothing_is_said_against_an_fp32_that_failed(small: Study) -> None:
    trainings = [replace(one.training, steps=[], error="no memory") if one.name == "fp32" else one.training
                 for one in small.outcomes]  # fmt: skip
    found = evaluate(small.spec, small.folder, trainings)
    assert found.noise is None and found["fp32"].verdict == "failed: no memory"
    assert found["bf16-master"].verdict.startswith("no fp32 baseline")
    as_markdown(found, [])


def test_a_training_that_was_stopped_goes_on_and_stops_the_study(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = variant_spec(make_spec(dataset, "optim.steps=8"), VARIANTS["bf16"])
    write_spec(spec, tmp_path / "bf16.toml")
    write_spec(variant_spec(make_spec(dataset, "optim.steps=8"), BASE), tmp_path / "fp32.toml")
    looks = iter([0, 0, 0, 15])  # a signal arrives in the fourth step
    with monkeypatch.context() as patch:
        patch.setattr(InstrumentedTrainer, "local_stop_signal", lambda self: next(looks))
        with pytest.raises(Interrupted):
            train_one(tmp_path, "bf16")
    assert not (tmp_path / "bf16.json").exists()
    monkeypatch.setattr("lmworks.bench.precision.single_run.write_report", lambda folder: folder)
    train(tmp_path / "bf16", spec)
    run = RunFolder(tmp_path / "bf16")
    assert [event["kind"] for event in run.events() if event["kind"] in ("interrupt", "resume")] == [
        "interrupt",
        "resume",
    ]
    assert [line["step"] for line in read_metrics(run.path / INSPECTION_FILE)] == inspected_steps(8)


@pytest.mark.parametrize(("code", "stopped"), [(130, True), (75, True), (3, False)])
def test_how_a_training_ends_is_how_the_study_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, stopped: bool
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    monkeypatch.setattr(module, "PROGRAM", ("-c", f"exit {code}"))
    if stopped:
        with pytest.raises(Stopped, match="the same command continues") as error:
            module.train_in_subprocess(tmp_path, "bf16")
        assert error.value.exit_code == code
    else:
        module.train_in_subprocess(tmp_path, "bf16")
        assert json.loads((tmp_path / "bf16.json").read_text()) == {"error": "its process ended with exit code 3"}


@pytest.mark.slow
def test_the_whole_command(dataset: Path, tmp_path: Path) -> None:
    file = write_spec(make_spec(dataset, "model.hidden=64"), tmp_path / "spec.toml")
    command = [sys.executable, "-m", "lmworks", "study", "precision", str(file), "--steps", "8", "--json"]
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    found = {one["name"]: one for one in facts["precisions"]}
    assert list(found) == list(VARIANTS) and not any(one["error"] for one in found.values())
    assert found["bf16-nearest"]["kept"] < found["bf16-stochastic"]["kept"] < 1.1
    errors = [found[name]["gradient_error"] for name in ("fp16", "bf16", "fp8-rowwise")]
    assert errors == sorted(errors) and errors[0] > 0, "fewer digits, larger errors"
    assert found["fp8-tensorwise"]["facts"]["emulated"] and found["fp8-tensorwise"]["speed"] is None
    assert found[SEED.name]["gap"] != 0
