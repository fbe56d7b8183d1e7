"""What goes wrong in the numbers is caught before it reaches the weights, and the run can go on from there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmworks.record import RunFolder, read_metrics
from lmworks.spec import TrainingError
from lmworks.train import Trainer
from tiny import before_step, built, curve, differences, events, live, make_spec, resume, saved, steps_of, train

NAN, INF = float("nan"), float("inf")
MIDDLE = "blocks.1.mlp.up.weight"


def poison_gradient(trainer: Trainer, name: str, value: float) -> None:
    """One element of one gradient, with the loss untouched."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoiled = gradient.clone()
        spoiled.view(-1)[0] = value
        return spoiled

    trainer.model.get_parameter(name).register_hook(spoil)


def poison_weight(trainer: Trainer, name: str, value: float) -> None:
    with torch.no_grad():
        trainer.model.get_parameter(name).view(-1)[0] = value


@pytest.mark.parametrize("value", [NAN, INF], ids=str)
@pytest.mark.parametrize("poison", [poison_gradient, poison_weight])
def test_nonfinite_step_keeps_weights_and_names_parameter(
    dataset: Path, tmp_path: Path, poison: Callable[[Trainer, str, float], None], value: float
) -> None:
    trainer = built(make_spec(dataset, "model.layers=3"), tmp_path / "run")
    list(steps_of(trainer, 3))
    poison(trainer, MIDDLE, value)
    before = live(trainer)
    with pytest.raises(TrainingError, match=f"step 4: .*{MIDDLE}.*the step was not taken"):
        list(steps_of(trainer, 1))
    assert differences(live(trainer), before) == []
    (fault,) = events(tmp_path / "run", "fault")
    assert (fault["step"], fault["parameter"], fault["cursor"]) == (4, MIDDLE, 3)


def test_gradient_norm_overflow_is_rejected(dataset: Path, tmp_path: Path) -> None:
    """Every element is finite, their squares are not: Adam's second moment would be infinite for good."""
    trainer = built(make_spec(dataset, "optim.clip=0"), tmp_path / "run")
    poison_gradient(trainer, "norm.weight", 1e30)
    before = live(trainer)
    with pytest.raises(TrainingError, match="step 1: gradient norm inf"):
        list(steps_of(trainer, 1))
    assert differences(live(trainer), before) == []


def test_failed_run_resumes_bitwise(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, "checkpoint.every=4")
    train(spec, tmp_path / "straight")
    trainer = Trainer(spec, tmp_path / "run", quiet=True)
    before_step(trainer, 7, lambda: poison_weight(trainer, "norm.weight", NAN))
    with pytest.raises(TrainingError, match=r"step 7: loss nan, from the weight norm\.weight"):
        trainer.run()
    kinds = [event["kind"] for event in RunFolder(tmp_path / "run").events()]
    assert kinds == ["start", "save", "fault", "fail"]
    assert [line[0] for line in curve(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]  # no line for a step not taken
    resume(tmp_path / "run")
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")
    assert differences(saved(tmp_path / "run"), saved(tmp_path / "straight")) == []


# --- fp16 and its loss scale ---------------------------------------------------------------------------

FP16 = ("precision.dtype=fp16", "precision.loss_scale=16777216", "precision.loss_scale_window=4", "optim.steps=16")


def test_fp16_overflow_skips_step_and_halves_scale(dataset: Path, tmp_path: Path) -> None:
    trainer = built(make_spec(dataset, *FP16), tmp_path / "run")
    start = live(trainer)
    (first,) = steps_of(trainer, 1)
    assert first["grad_norm"] == INF or first["grad_norm"] != first["grad_norm"]
    assert first["loss_scale"] == 2**24
    assert differences(live(trainer), start) == []
    values = [first, *steps_of(trainer, 15)]
    skipped = [n for n, v in enumerate(values, 1) if not abs(v["grad_norm"]) < INF]
    recorded = events(tmp_path / "run", "overflow")
    assert [event["step"] for event in recorded] == skipped
    assert all(event["next_scale"] == event["loss_scale"] / 2 for event in recorded)
    scales = [v["loss_scale"] for v in values]
    for step, (now, then) in enumerate(itertools.pairwise(scales), 1):
        assert then == now / 2 if step in skipped else then in (now, 2 * now)
    assert len(skipped) < 8 and values[-1]["loss"] < first["loss"] - 0.5


def test_skipped_step_records_norm(dataset: Path, tmp_path: Path) -> None:
    train(make_spec(dataset, *FP16), tmp_path / "run")
    first = read_metrics(RunFolder(tmp_path / "run").metrics_path)[0]
    assert first["grad_norm"] is None and first["nonfinite"]["grad_norm"] in ("inf", "nan")


def test_loss_scale_state_survives_resume(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, *FP16, "checkpoint.every=6")
    whole = train(spec, tmp_path / "straight")
    trainer = Trainer(spec, tmp_path / "run", quiet=True)

    def fail() -> None:
        raise RuntimeError

    before_step(trainer, 9, fail)
    with pytest.raises(RuntimeError):
        trainer.run()
    resumed = resume(tmp_path / "run")
    assert resumed.loss_scale.state_dict() == whole.loss_scale.state_dict()
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")
    assert differences(saved(tmp_path / "run"), saved(tmp_path / "straight")) == []


def test_fp16_stops_at_minimal_scale(dataset: Path, tmp_path: Path) -> None:
    """A gradient that is NaN by itself would otherwise be skipped for the rest of the run."""
    trainer = built(make_spec(dataset, *FP16, "precision.loss_scale=8"), tmp_path / "run")
    poison_gradient(trainer, "norm.weight", NAN)
    before = live(trainer)
    with pytest.raises(TrainingError, match="step 4: gradient norm nan"):
        list(steps_of(trainer, 10))
    assert differences(live(trainer), before) == []
    assert [event["loss_scale"] for event in events(tmp_path / "run", "overflow")] == [8, 4, 2]


def test_nan_loss_is_rejected_in_fp16(dataset: Path, tmp_path: Path) -> None:
    trainer = built(make_spec(dataset, *FP16), tmp_path / "run")
    poison_weight(trainer, "norm.weight", NAN)
    with pytest.raises(TrainingError, match=r"step 1: loss nan, from the weight norm\.weight"):
        list(steps_of(trainer, 1))
