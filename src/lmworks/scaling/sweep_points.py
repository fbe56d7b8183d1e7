"""Points of a sweep: a row for every finished trial, with counts by the planner.

`n` and `n_no_embed` are the two conventions of parameters; `flops` counts attention and the head; `loss` is that on
held-out data after the last step. Trials that began with another's checkpoint share the `trunk` of that one. Keys that
the sweep varies, and figures of a trial's result, are columns too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..plan.flops import run_flops_per_token
from ..spec import RunSpec
from ..spec.errors import DataError
from ..sweep.folder import Sweep, Trial

REPLACED = ("step", "val_step", "loss", "val_loss", "tokens")  # of a result: columns have them under other names


def sweep_columns(path: Path) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """Columns as a CSV file would have them, and what is missing; refused where no trial has finished."""
    sweep = Sweep.open(path)
    trials = {trial.number: trial for trial in sweep.trials()}
    specs = {number: sweep.spec(trial.overrides, number) for number, trial in trials.items()}
    rows = [row_of(trial, trials, specs, path) for trial in trials.values() if trial.state == "finished"]
    if not rows:
        raise DataError(f"{path}: none of its {len(trials)} trials has finished")
    if not any(trial.parent for trial in trials.values()):
        for row in rows:
            del row["trunk"]
    names = list(dict.fromkeys(name for row in rows for name in row))
    trunks = {trial.parent["trial"] for trial in trials.values() if trial.parent}
    left = [trial for trial in trials.values() if trial.state != "finished" and trial.number not in trunks]
    notes = (f"{len(left)} of {len(trials)} trials have not finished",) if left else ()
    return {name: [str(row.get(name, "")) for row in rows] for name in names}, notes


def row_of(trial: Trial, trials: Mapping[int, Trial], specs: Mapping[int, RunSpec], path: Path) -> dict[str, Any]:
    spec, result = specs[trial.number], trial.result or {}
    where = f"{path}: trial {trial.number}"
    loss, step = result.get("val_loss"), result.get("step", trial.step)
    if loss is None:
        raise DataError(f"{where} has no loss on held-out data; set log.eval_every")
    if result.get("val_step") != step:
        raise DataError(
            f"{where} was evaluated at step {result.get('val_step')}, not after its last step, {step}; "
            f"log.eval_every must divide optim.steps"
        )
    model, tokens = spec.model, tokens_at(trial, step, trials, specs)
    own = {key: value for key, value in result.items() if key not in REPLACED}
    return {
        **trial.overrides,
        **own,
        "trial": trial.number,
        "n": model.params,
        "n_no_embed": model.params - model.embedding_params,
        "d": tokens,
        "flops": run_flops_per_token(spec) * tokens,
        "seq": spec.data.seq,
        "lr": spec.optim.lr,
        "batch": spec.tokens_per_step,
        "trunk": trunk_of(trial, trials),
        "train_loss": result.get("loss"),
        "loss": loss,
    }


def tokens_at(trial: Trial, step: int, trials: Mapping[int, Trial], specs: Mapping[int, RunSpec]) -> int:
    """Tokens seen up to a step; those before a fork are its parent's."""
    each = specs[trial.number].tokens_per_step
    if trial.parent is None or step <= trial.parent["step"]:
        return each * step
    before = trial.parent["step"]
    return tokens_at(trials[trial.parent["trial"]], before, trials, specs) + each * (step - before)


def trunk_of(trial: Trial, trials: Mapping[int, Trial]) -> int:
    while trial.parent is not None:
        trial = trials[trial.parent["trial"]]
    return trial.number
