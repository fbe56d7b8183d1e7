"""Rungs and brackets against the figures of the papers that define them."""

from __future__ import annotations

import pytest

from lmworks.spec.errors import SpecError
from lmworks.tune.rungs import halving, hyperband_brackets, hyperband_plan, rung_steps


def test_hyperbands_brackets_are_those_of_its_paper() -> None:
    """R = 81, η = 3: trials and steps of each rung by Algorithm 1 of Li et al. 2018."""
    brackets = [[(rung.trials, rung.step) for rung in bracket.rungs] for bracket in hyperband_brackets(1, 81, 3)]
    assert brackets == [
        [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
        [(34, 3), (11, 9), (3, 27), (1, 81)],
        [(15, 9), (5, 27), (1, 81)],
        [(8, 27), (2, 81)],
        [(5, 81)],
    ]


def test_steps_of_a_bracket_count_what_is_not_repeated() -> None:
    assert halving(9, (100, 300, 900), 3).steps == 9 * 100 + 3 * 200 + 1 * 600


@pytest.mark.parametrize(
    ("first", "last", "eta", "steps"),
    [(10, 90, 3, (10, 30, 90)), (10, 100, 3, (10, 30, 100)), (10, 15, 3, (10, 15)), (50, 50, 4, (50,))],
)
def test_the_last_rung_is_a_whole_run(first: int, last: int, eta: int, steps: tuple[int, ...]) -> None:
    assert rung_steps(first, last, eta) == steps


def test_trials_are_dealt_to_brackets_in_turn() -> None:
    plan = list(hyperband_plan(20, hyperband_brackets(1, 9, 3), 3))
    assert [(trials.start, trials.stop, bracket.trials) for trials, bracket in plan] == [
        (0, 9, 9),
        (9, 14, 5),
        (14, 17, 3),
        (17, 20, 3),
    ]


@pytest.mark.parametrize(
    ("first", "last", "eta", "word"), [(0, 9, 3, "--min-steps"), (10, 9, 3, "9"), (1, 9, 1, "--eta")]
)
def test_what_cannot_be_is_refused(first: int, last: int, eta: int, word: str) -> None:
    with pytest.raises(SpecError, match=word):
        rung_steps(first, last, eta)


@pytest.mark.ray
@pytest.mark.parametrize(("last", "eta"), [(81, 3), (64, 4), (32, 2)])
def test_hyperbands_brackets_are_those_of_ray_tune(last: int, eta: int) -> None:
    """Trials and first step of each bracket."""
    from ray.tune.schedulers import HyperBandScheduler

    theirs = HyperBandScheduler("step", "loss", "min", max_t=last, reduction_factor=eta)
    mine = hyperband_brackets(1, last, eta)
    for s, bracket in zip(range(len(mine) - 1, -1, -1), mine, strict=True):
        assert bracket.trials == theirs._get_n0(s)
        assert bracket.rungs[0].step == theirs._get_r0(s)
