"""Importances of keys: how much of the spread of final losses each explains, by Optuna's PED-ANOVA."""

from __future__ import annotations

import warnings
from typing import Any

from ..sweep.space import Dimension
from .outcome import Outcome
from .storage import import_optuna

LEAST_TRIALS = 4


def importances(found: Outcome) -> dict[str, float]:
    """Shares that add up to 1, the largest first, of finished trials; empty of fewer than four, or where all are
    alike."""
    optuna = import_optuna()
    study = optuna.create_study()
    losses = set()
    for trial in found.trials:
        loss = found.loss(trial.number)
        if trial.number not in found.results.finished or loss is None:
            continue
        chosen = [one for one in found.sweep.space.dimensions if one.key in trial.overrides]
        params = {one.key: trial.overrides[one.key] for one in chosen}
        distributions = {one.key: distribution(optuna, one) for one in chosen}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=loss))
        losses.add(loss)
    if len(study.trials) < LEAST_TRIALS or len(losses) < 2:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    try:
        with warnings.catch_warnings():  # of keys that few trials have
            warnings.simplefilter("ignore")
            shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    except (ValueError, RuntimeError):  # no key is common to all trials
        return {}
    total = sum(shares.values())
    return {key: share / total for key, share in shares.items()} if total else {}


def distribution(optuna: Any, dimension: Dimension) -> Any:
    kinds = optuna.distributions
    if dimension.range is None:
        return kinds.CategoricalDistribution(dimension.values)
    low, high = dimension.range
    if dimension.integer:
        return kinds.IntDistribution(int(low), int(high), dimension.log, int(dimension.step or 1))
    return kinds.FloatDistribution(low, high, dimension.log, dimension.step)
