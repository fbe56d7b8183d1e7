"""Trying a remedy: two profiled runs of a spec, compared by sequence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lmworks.bench import remedy_trial
from lmworks.bench.remedy_trial import try_remedy
from lmworks.spec import LMWorksError


def test_the_gain_is_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the sequences in 1.5 times the time: a quarter less for each. Both are measured in turns."""
    change = "data.micro_batch=16"
    measured = [((), 1.0), ((change,), 1.5), ((), 1.25), ((change,), 1.5), ((), 0.8), ((change,), 1.4)]
    left = list(measured)

    def step_seconds(source: str, overrides: Sequence[str], steps: int) -> float:
        wanted, seconds = left.pop(0)
        assert tuple(overrides) == wanted
        return seconds

    monkeypatch.setattr(remedy_trial, "step_seconds", step_seconds)
    trial = try_remedy("tiny", [change], 3)
    assert (trial.before_s, trial.after_s, trial.gain, trial.apart) == (1.0, 1.5, 0.25, True)
    assert trial.gain_range == pytest.approx((0.125, 0.4)) and not left
    left = [*measured[:5], ((change,), 1.7)]  # 0.85 s for as many sequences as before, which took 0.8 to 1.25 s
    assert not try_remedy("tiny", [change], 3).apart


def test_a_run_that_fails_is_one_line() -> None:
    with pytest.raises(LMWorksError, match=r"profile train nowhere\.toml : .*nowhere\.toml") as error:
        remedy_trial.step_seconds("nowhere.toml", (), 1)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_real_trial() -> None:
    small = ["model.layers=1", "data.seq=32", "data.micro_batch=2", "precision.dtype=fp32"]
    trial = try_remedy("tiny", small, 2)
    assert trial.before_s > 0 and trial.after_s > 0
