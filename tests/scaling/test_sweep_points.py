"""Points of a sweep: exact counts, trunks of forked trials, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import TRUTH

from lmworks.plan.flops import model_flops_per_token
from lmworks.scaling.fitting import fit_law
from lmworks.scaling.points import read_points
from lmworks.spec import DataError, SpecError
from lmworks.sweep.folder import Sweep
from lmworks.sweep.space import Space
from lmworks.train import Trainer
from tiny import make_spec

BASE: dict[str, Any] = {
    "name": "ladder",
    "model": {"preset": "tiny"},
    "data": {"path": "stdlib", "seq": 64, "micro_batch": 2, "global_batch": 4},
    "optim": {"steps": 100},
    "log": {"eval_every": 10},
}


def sweep_of(folder: Path) -> Sweep:
    space = Space.of({"optim.steps": {"values": [100, 200]}})
    return Sweep.create(folder / "ladder", BASE, space, kind="scaling")


def ended(sweep: Sweep, number: int, step: int, loss: float, **more: Any) -> None:
    trial = sweep.trial(number)
    result = {"step": step, "val_step": step, "val_loss": loss, "loss": loss + 0.1, "tokens": 0}
    sweep.write(replace(trial, state="finished", step=step, result=result, **more))


def test_a_row_of_a_finished_trial_has_exact_counts(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    for number, hidden in enumerate((32, 64, 128)):
        sweep.propose({"model.hidden": hidden, "optim.lr": 1e-3})
        if number < 2:
            ended(sweep, number, 100, 4.0 - number)
    points = read_points(sweep.path)
    spec = sweep.spec({"model.hidden": 64})
    assert len(points) == 2 and points.trunk is None
    assert points.notes == ("1 of 3 trials have not finished",)
    assert points.need("n", "")[1] == spec.model.params
    assert points.need("n_no_embed", "")[1] == spec.model.params - spec.model.vocab * 64
    assert points.need("d", "").tolist() == [25_600, 25_600]
    assert points.need("flops", "")[1] == pytest.approx(25_600 * model_flops_per_token(spec.model, 64))
    assert points.loss.tolist() == [4.0, 3.0]
    assert read_points(sweep.path, conditions=["model.hidden=32"], target="train_loss").loss.tolist() == [4.1]


def test_branches_share_a_trunk_and_the_tokens_before_the_fork(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    sweep.propose({"optim.steps": 300})
    for number in (1, 2):
        sweep.propose({"optim.steps": 150, "data.global_batch": 8})
        ended(sweep, number, 150, 3.0, parent={"trial": 0, "step": 100} if number == 1 else {"trial": 1, "step": 120})
    points = read_points(sweep.path)
    assert points.notes == ()  # a trunk is there to branch off
    assert points.trunk is not None and points.trunk.tolist() == [0, 0]
    assert points.need("d", "").tolist() == [100 * 256 + 50 * 512, 100 * 256 + 20 * 512 + 30 * 512]


def test_a_law_is_fitted_to_a_sweep(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    number = 0
    for hidden in (64, 128, 256):
        for steps in (100, 400, 1600):
            overrides = {"model.hidden": hidden, "optim.steps": steps}
            sweep.propose(overrides)
            spec = sweep.spec(overrides)
            n, d = spec.model.params, spec.tokens_per_step * steps
            ended(sweep, number, steps, TRUTH["E"] + 50 / n**0.3 + 90 / d**0.35)
            number += 1
    found = fit_law(read_points(sweep.path), "chinchilla", replicates=0, hold_out=False).fitted
    assert found.params == pytest.approx({"E": TRUTH["E"], "A": 50, "B": 90, "alpha": 0.3, "beta": 0.35}, rel=0.01)
    assert not np.isclose(found.rule.coefficient * 1e6**found.rule.exponent, 6e6, rtol=0.01)  # its own FLOPs


def test_sweeps_without_results_are_refused(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    sweep.propose({})
    with pytest.raises(DataError, match="none of its 1 trials has finished"):
        read_points(sweep.path)
    ended(sweep, 0, 100, float("nan"))
    with pytest.raises(DataError, match="ladder, trial 0: loss is 'nan'"):
        read_points(sweep.path)
    result = {"step": 100, "val_step": 90, "val_loss": 3.0}
    sweep.write(replace(sweep.trial(0), result=result))
    with pytest.raises(DataError, match="trial 0 was evaluated at step 90, not after its last step, 100"):
        read_points(sweep.path)


def test_scores_of_the_last_step_are_columns(tmp_path: Path, dataset: Path) -> None:
    """Losses by position have one mean, the held-out loss; context lengths share the bands that both have."""
    base = make_spec(dataset, "cluster.device=cpu", "optim.steps=4", "log.eval_by_position=true", "log.eval_every=2")
    sweep = Sweep.create(tmp_path / "positions", base.to_dict(), Space.of({"data.seq": {"values": [16, 32]}}))
    for number, seq in enumerate((16, 32)):
        sweep.propose({"data.seq": seq})
        Trainer(sweep.spec({"data.seq": seq}, number), sweep.folder(number).path, quiet=True).run()
        sweep.write(sweep.update(sweep.trial(number)))
    points = read_points(sweep.path)
    bands = [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15)]
    losses = {band: read_points(sweep.path, target=f"val_loss/{band[0]}-{band[1]}").loss for band in bands}
    mean = sum(loss[0] * (last + 1 - first) for (first, last), loss in losses.items()) / 16
    assert mean == pytest.approx(points.loss[0], rel=1e-5)
    assert losses[8, 15][0] != losses[8, 15][1]
    lines = sweep.metrics(0)
    assert [any(key.startswith("val_loss/") for key in line) for line in lines] == [False, False, False, True]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("parallel.tp=2",), r"parallel\.tp = 2"),
        (("align.method=sft", "data.kind=conversations"), "is for pretraining"),
    ],
)
def test_losses_by_position_need_whole_rows(dataset: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_spec(dataset, "log.eval_by_position=true", *overrides)
