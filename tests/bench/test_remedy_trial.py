"""Trying a remedy: two profiled runs of a spec, compared by sequence."""

from __future__ import annotations

import pytest

from lmworks.bench import remedy_trial
from lmworks.bench.remedy_trial import try_remedy
from lmworks.spec import LMWorksError


def test_the_gain_is_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the sequences in 1.5 times the time: a quarter less for each."""
    seconds = {(): 1.0, ("data.micro_batch=16",): 1.5}
    monkeypatch.setattr(remedy_trial, "step_seconds", lambda source, overrides, steps: seconds[tuple(overrides)])
    trial = try_remedy("tiny", ["data.micro_batch=16"], 3)
    assert (trial.before_s, trial.after_s, trial.gain) == (1.0, 1.5, 0.25)


def test_a_run_that_fails_is_one_line() -> None:
    with pytest.raises(LMWorksError, match=r"profile train nowhere\.toml : .*nowhere\.toml") as error:
        remedy_trial.step_seconds("nowhere.toml", (), 1)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_real_trial() -> None:
    small = ["model.layers=1", "data.seq=32", "data.micro_batch=2", "precision.dtype=fp32"]
    trial = try_remedy("tiny", small, 2)
    assert trial.before_s > 0 and trial.after_s > 0
